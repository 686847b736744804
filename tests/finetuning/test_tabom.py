"""TABOM: equality with a slow loop on full logits, empty batches, resuming, two processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lit_dlm.datamodules.resuming import EpochPlan
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.finetuning.tabom import TABOMModule
from lit_dlm.training.batch import SupervisedBatch, SupervisedExample
from lit_dlm.training.masking import RandomMasking
from lit_dlm.training.sharding import whole_weights
from lit_dlm.training.terms import LossTerms
from tests.finetuning.runs import (
    EXPERTS,
    VOCAB,
    Data,
    Watch,
    examples,
    quiet,
    run,
    small,
    trained,
    two_processes,
)
from tests.processes import in_two_processes
from tests.training.reference import entropy_of, slow_ranking
from tests.training.supervised import BLOCK, assert_same_loss, batch_of, sft, slow_log_probs, tabom

pytestmark = pytest.mark.slow  # training runs

Scores = dict[str, float]


def slow_loss(model: TABOMModule, batch: SupervisedBatch) -> Tensor:
    """Full logits, one cell and one pair at a time."""
    states, log_probs = slow_log_probs(model, batch)
    # A forbidden id has no probability: leave it out rather than multiply 0 by -inf.
    kept = [v for v in range(VOCAB) if v not in model.backbone.spec.forbidden_ids]
    picked = [
        -log_probs[b, t, batch.ids[b, batch.start + t]]
        for b, t in states.supervised.nonzero().tolist()
    ]
    ranking = slow_ranking(
        entropy_of(log_probs.double()[..., kept]),
        batch.steps.tolist(),
        states.supervised.tolist(),
        states.cut.tolist(),
        window=model.rank_window,
        margin=model.margin,
        ties=model.ties,
        decode_entropy=batch.decode_entropy.tolist(),
        blocks=None if batch.blocks is None else batch.blocks.tolist(),
    )
    return torch.stack(picked).mean() + model.rank_weight * ranking


SPARSE = {**EXPERTS, "attention": "full", "block_size": None}


@pytest.mark.parametrize(
    ("changes", "ties"),
    [
        *(({"shift": shift}, ties) for shift in (0, 1) for ties in ("strict", "rank")),
        (SPARSE, "strict"),
        (BLOCK, "strict"),
        ({**BLOCK, "shift": 1, "block_origin": "response"}, "rank"),
    ],
)
def test_loss_and_gradients_equal_a_slow_loop_on_full_logits(changes: Any, ties: Any) -> None:
    model = tabom(small(**changes), rank_weight=1.5, ties=ties)
    batch = batch_of(model, 6)
    assert_same_loss(model, model.terms(batch).total, slow_loss(model, batch))


def test_logged_counts_are_those_of_the_states() -> None:
    model = tabom(rank_window=None)
    batch = batch_of(model, 6)
    states, _ = slow_log_probs(model, batch)
    parts = model.terms(batch).means()
    counts = states.supervised.sum(1)
    assert parts["num_supervised"] == counts.sum()
    # One token a step: every two supervised positions of a row make a pair.
    assert parts["num_pairs"] == (counts * (counts - 1) // 2).sum()
    assert 0.0 <= float(parts["pair_accuracy"]) <= 1.0


def validated(model: SFTModule, folder: Path, *, batch_size: int, **options: Any) -> Scores:
    """Scores of one validation of examples of which two have no decode."""
    given = examples(24, never=(0, 5))
    data = Data(given, batch_size=2, val_fraction=0.7, val_batch_size=batch_size)
    (scores,) = quiet(folder, **options).validate(model, data, verbose=False)
    return {name: float(value) for name, value in scores.items()}


@pytest.mark.parametrize("loss_norm", ["local", "global"])
@pytest.mark.parametrize("kind", ["tabom", "sft"])
def test_validation_does_not_depend_on_the_batch_size(
    tmp_path: Path, kind: str, loss_norm: Any
) -> None:
    """Alone, some samples have no target and others a single one, which is no pair."""
    drawn = RandomMasking(weight="1/num_targets")
    model: SFTModule = sft(drawn, loss_norm=loss_norm)
    if kind == "tabom":
        model = tabom(loss_norm=loss_norm, rank_weight=1.5)
    seen: list[LossTerms] = []
    terms = model.terms

    def watched(batch: SupervisedBatch) -> LossTerms:
        seen.append(terms(batch))
        return seen[-1]

    model.terms = watched  # type: ignore[method-assign]
    wanted = validated(model, tmp_path, batch_size=64)
    (only,) = seen
    parts = {"val/loss": only.total, **{f"val/{k}": v for k, v in only.means().items()}}
    assert wanted == pytest.approx({name: float(v) for name, v in parts.items()}, rel=1e-5)
    if kind == "tabom":
        assert wanted["val/num_pairs"] > 0
        both = wanted["val/loss_ce"] + 1.5 * wanted["val/loss_rank"]
        assert wanted["val/loss"] == pytest.approx(both, rel=1e-6)
    for batch_size in (1, 4):
        assert validated(model, tmp_path, batch_size=batch_size) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("num_workers", "accumulate"), [(0, 1), (2, 2)])
def test_a_resumed_run_repeats_batches_cuts_and_weights(
    tmp_path: Path, num_workers: int, accumulate: int
) -> None:
    """Cut in the middle of the second pass, with dropout."""
    data_of = {"batch_size": 3 - accumulate, "num_workers": num_workers}

    def train(name: str, steps: int, resume: Path | None = None) -> tuple[TABOMModule, Watch]:
        watch, model = Watch(), tabom(small(dropout=0.2))
        if resume:
            for value in filter(lambda one: one.requires_grad, model.parameters()):
                torch.nn.init.zeros_(value)
        run(
            model, Data(examples(), **data_of), tmp_path / name, steps=steps, resume=resume,
            callbacks=(watch,), accumulate_grad_batches=accumulate,
        )  # fmt: skip
        return model, watch

    model, whole = train("a", 6)
    _, first = train("b", 5)
    resumed, second = train("c", 6, tmp_path / "b" / "run.ckpt")
    assert first.batches + second.batches == whole.batches
    assert first.losses + second.losses == whole.losses
    torch.testing.assert_close(trained(resumed), trained(model), rtol=0, atol=0)
    assert len({seed for _, seeds, _ in whole.batches for seed in seeds}) > len(examples())
    stored = torch.load(tmp_path / "a" / "run.ckpt", weights_only=True)["state_dict"]
    assert all("lora_" in name for name in stored)


def plans() -> list[EpochPlan]:
    """The batches of two processes."""
    return [
        EpochPlan(np.zeros(8), numbers=np.arange(8), batch_size=2, seed=0, rank=rank, world_size=2)
        for rank in (0, 1)
    ]


def given_to_both() -> list[SupervisedExample]:
    """Within one pass of two steps, the second process has no decoded sample at all."""
    never = [ref.number for number in (0, 1) for ref in plans()[1].batch(number)]
    return examples(never=tuple(never))


def _validate(rank: int, folder: Path) -> Scores:
    strategy = two_processes("ddp")
    return validated(tabom(), folder, batch_size=3, devices=2, strategy=strategy)


@pytest.mark.ddp
def test_two_processes_validate_like_one(tmp_path: Path) -> None:
    """An odd number of samples: one of the processes gets a copy, which does not count."""
    wanted = validated(tabom(), tmp_path, batch_size=64)
    for found in in_two_processes(_validate, tmp_path):
        assert found == pytest.approx(wanted, rel=1e-5)


class Logged(Callback):
    """Notes what is logged of every batch."""

    def __init__(self) -> None:
        self.scores: list[Scores] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.scores.append({name: float(v) for name, v in trainer.callback_metrics.items()})


def logged_of(terms: LossTerms) -> Any:
    """What is to be logged of a step that is one batch."""
    values = {"loss": terms.total.detach(), **terms.means()}
    return pytest.approx({f"train/{name}": float(v) for name, v in values.items()}, rel=1e-5)


def test_a_logged_value_is_over_all_accumulated_batches(tmp_path: Path) -> None:
    """The second batch has no decode: the mean of two means would be half the value."""
    given = examples(never=(1, 3, 5, 6))
    logged, model = Logged(), tabom()
    before = model.terms(batch_of(model, given))
    options = {"callbacks": (logged,), "accumulate_grad_batches": 4}
    run(model, Data(given, batch_size=2), tmp_path, steps=1, **options)
    assert logged.scores == [{}, {}, {}, logged_of(before)]


def _train(rank: int, folder: Path, losses: list[float], wanted: Any, weights: Any) -> Any:
    """Under both strategies, one run after the other; the sum of each weight."""
    sums = []
    for kind in ("ddp", "fsdp"):
        watch, logged, model = Watch(), Logged(), tabom(loss_norm="global")
        data = Data(given_to_both(), batch_size=2)
        run(
            model, data, folder / kind, steps=2, callbacks=(watch, logged), devices=2,
            strategy=two_processes(kind), log_every_n_steps=2,
        )  # fmt: skip
        assert logged.scores == [{}, wanted]  # only the second step is written
        # Each process divides by half of the global count, and gradients are averaged.
        own = [0.0, 0.0] if rank else [2 * loss for loss in losses]
        assert watch.losses == pytest.approx(own, rel=1e-5, abs=0)
        with whole_weights(model):
            torch.testing.assert_close(trained(model), weights, rtol=1e-4, atol=1e-6)
            sums.append([float(value.double().sum()) for value in trained(model).values()])
    return sums


@pytest.mark.ddp
def test_two_processes_of_which_one_has_no_target_train_like_one(tmp_path: Path) -> None:
    """With whole weights on both (DDP), and with split ones (FSDP2)."""
    model = tabom(loss_norm="global")
    optimizer = torch.optim.AdamW([v for v in model.parameters() if v.requires_grad], lr=0.01)
    given, losses = given_to_both(), []
    for number in (0, 1):
        both = [given[ref.number] for plan in plans() for ref in plan.batch(number)]
        optimizer.zero_grad()
        terms = model.terms(batch_of(model, both))
        terms.total.backward()
        optimizer.step()
        losses.append(float(terms.total.detach()))
    expected = (losses, logged_of(terms), trained(model))
    first, second = in_two_processes(_train, tmp_path, *expected)
    assert first == second
