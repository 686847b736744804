"""Rows of many batches, and batches of RL, as they have always been: to the bit."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.base import Rows
from lit_dlm.finetuning.dparallel import BlockComplements
from lit_dlm.finetuning.tabom import TimeDelay
from lit_dlm.rl.batch import SampleBuilder, join
from lit_dlm.training.batch import SupervisedExample, collate
from lit_dlm.training.bounds import BoundViews
from lit_dlm.training.layout import lay_out
from lit_dlm.training.masking import (
    Autoregressive,
    CoupledMasking,
    CoupledViews,
    MaskedPrompt,
    RandomMasking,
    SemiAutoregressive,
    TraceMasking,
)
from lit_dlm.training.states import Masking
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.vision.base import PromptPictures
from tests.finetuning.runs import EOS, MASK, PAD, VOCAB

G = 13
BLOCK: dict[str, Any] = {"attention": "block", "block_size": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "full": {},
    "shift": {"shift": 1},
    "arange": {"positions": "arange"},
    "sequence": BLOCK,
    "sequence shift": {**BLOCK, "block_size": 3, "shift": 1},
    "response": {**BLOCK, "block_origin": "response"},
    "response shift": {**BLOCK, "block_origin": "response", "shift": 1},
}
MASKINGS: list[Masking] = [
    RandomMasking(copies=3, weight="1/t"),
    RandomMasking(level="block", copies=2),
    SemiAutoregressive(block_size=4, rows_per_sample=2),
    TraceMasking(),
    TraceMasking(padding="replayed", shrink=2, rows_per_sample=2),
    Autoregressive(),
    TimeDelay(window=4),
    CoupledMasking(pairs=2, level="token"),
    CoupledViews(),
    MaskedPrompt(),
    BoundViews(),
    BoundViews(coupled=True),
    BoundViews(block_size=3),
    BlockComplements(block_size=4),
]


def spec(**changes: Any) -> BackboneSpec:
    return BackboneSpec(family="any", mask_id=MASK, pad_id=PAD, eos_ids=(EOS,), **changes)


def digest(values: list[Any]) -> str:
    """Of tensors with dtype and shape, and of the ``repr`` of all else."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.contiguous().numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:16]


def of_rows(rows: Rows) -> list[Any]:
    context = (rows.mask, rows.position_ids, rows.predictors, rows.response_start, rows.pictures)
    return [rows.ids, rows.targets, rows.scored, *context]


def responses(count: int) -> list[dict[str, Any]]:
    """Ended and open answers, cells left open, tied steps, given cells; of two passes."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        ids = rng.integers(3, VOCAB, G).astype(np.int32)
        if number % 3:
            ids[rng.integers(1, G) :] = EOS
        if number % 4 == 3:
            ids[rng.integers(0, G)] = MASK
        steps, given = rng.permutation(G) // (1 + number % 2), None
        if number % 5 == 2:
            given = rng.random(G) < 0.2
            steps[given] = -1
            steps[~given] = np.unique(steps[~given], return_inverse=True)[1]
        prompt = rng.integers(3, VOCAB, rng.integers(1, 6)).astype(np.int32)
        found.append({"prompt_ids": prompt, "ids": ids, "steps": steps.astype(np.int32)})
        found[-1] |= {"given": given, "entropy": rng.random(G).astype(np.float32)}
    return found


def examples(family: str) -> list[SupervisedExample]:
    found = [
        SupervisedExample(
            uid=f"u{number}",
            prompt_ids=one["prompt_ids"],
            response_ids=one["ids"][: G - number % 3],
            steps=None if number == 4 else one["steps"][: G - number % 3],
            given=None if one["given"] is None else one["given"][: G - number % 3],
            decode_entropy=one["entropy"][: G - number % 3],
            non_ltr=one["entropy"][: G - number % 3] < 0.3 if number % 2 else None,
            epoch=number % 2,
            is_real=number != 6,
        )
        for number, one in enumerate(responses(8))
    ]
    if family == "full":  # pictures in two prompts, one of them in both
        for number, names in ((1, ("a", "b")), (5, ("b",))):
            ids = np.array([5, *range(VOCAB, VOCAB + 3), 6], np.int32)
            pictures = PromptPictures(digests=names, first_id=VOCAB)
            found[number] = replace(found[number], prompt_ids=ids, pictures=pictures)
    return found


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("full", "864947a19bc7659b"),
        ("shift", "de1d87b94565cedd"),
        ("arange", "6434206ef9746f22"),
        ("sequence", "e954238c89c236b6"),
        ("sequence shift", "ad201f7fd8d64bf2"),
        ("response", "42d811e0a7d6a9bc"),
        ("response shift", "c9730278f165fc11"),
    ],
)
def test_rows_of_every_masking(family: str, expected: str) -> None:
    """With no fill learnt, two cells of it, or all; behind prompts of one to five tokens."""
    kind, found = spec(**FAMILIES[family]), []
    for num_padding in (0, 2, None):
        for masking in MASKINGS:
            shape: dict[str, Any] = {"response_length": G, "spec": kind, "num_padding": num_padding}
            batch = collate(examples(family), seed=7, cut=True, **shape)
            try:
                states = masking.states(batch)
                rows = lay_out(batch, states, kind)
            except ValueError as error:  # not for this attention
                found.append(str(error).split(":")[0])
                continue
            weight = states.supervised.float() if states.weight is None else states.weight
            found += [*of_rows(rows), states.response, weight, states.num_units(), states.cut]
    assert digest(found) == expected


def record(number: int, one: dict[str, Any]) -> Trajectory:
    steps = one["steps"].copy()
    written = steps >= 0
    steps[written] = np.unique(steps[written], return_inverse=True)[1]
    return Trajectory(
        uid=f"r{number}",
        prompt_ids=one["prompt_ids"],
        tokens=one["ids"],
        commit_step=steps,
        num_steps=int(steps.max()) + 1,
        mask_id=MASK,
        vocab_size=VOCAB,
        given=one["given"],
        meta={"prompt": number // 2, "response": number % 2, "reward": 1.0},
    )


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("full", "9c95ac2d2644a561"),
        ("sequence", "7ff15ccff3e9156e"),
        ("sequence shift", "ea56f24f809c4ece"),
        ("response", "8f6ba5654ca0212a"),
        ("response shift", "d4552ab5fba99cb3"),
    ],
)
def test_tables_and_batches_of_rl(family: str, expected: str) -> None:
    """Two passes over 70 records, of which maskings see 64 at a time; batches in any order."""
    kind, found = spec(**FAMILIES[family]), []
    records = [record(number, one) for number, one in enumerate(responses(70))]
    is_block = kind.attention == "block"
    for masking in MASKINGS:
        weight = getattr(masking, "weight", None)
        if isinstance(masking, Autoregressive) or weight == "1/t":
            continue
        for normalise in (None, "response_length", "group_mean", "reference"):
            if isinstance(masking, BoundViews) and normalise:
                continue
            builder = SampleBuilder(
                masking,
                kind,
                seed=3,
                num_padding=2,
                normalise=normalise,  # type: ignore[arg-type]
                copies=3 if is_block and normalise else 1,
            )
            try:
                every = join([builder.samples(records, epoch=n) for n in range(2)])
                numbers = torch.from_numpy(np.random.default_rng(0).permutation(len(every))[:9])
                batch = every.select(numbers, factor=0.5, num_slots=16)
                rows = batch.rows()
            except ValueError as error:
                found.append(str(error).split(":")[0])
                continue
            states, tokens = every.states, every.tokens
            found += [states.sample, states.hidden, states.supervised]
            found += [tokens.weight, tokens.kl_weight, every.token, every.coefficient]
            found += [tokens.response, tokens.position, tokens.sample, every.size, *of_rows(rows)]
            found += [batch.tokens.weight, batch.tokens.kl_weight, batch.token, batch.coefficient]
            found += [batch.states.sample, batch.states.response, batch.num_rows]
    assert digest(found) == expected
