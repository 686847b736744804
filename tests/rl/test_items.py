"""Training items: exact states, targets that cover the response, weights by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lit_dlm.losses.corruption import Autoregressive, RandomMasking, TraceMasking
from lit_dlm.losses.views import CoupledMasking, CoupledViews, MaskedPrompt
from lit_dlm.rl.items import RowBuilder, collate_items, training_rows
from lit_dlm.trajectories.record import Trajectory
from tests.rollouts import (
    EOS,
    FAMILIES,
    MASK,
    VOCAB,
    G,
    answer_cells,
    decoded,
    direct_log_probs,
    module,
    policy,
    unit_table,
)


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("packing", [1, 3])
def test_log_probs_are_those_of_the_true_states(name: str, packing: int) -> None:
    """Left padding, a short last block and end-of-text fills are among these rollouts."""
    backbone = policy(**FAMILIES[name]).eval()
    if packing > 1 and backbone.spec.attention != "block":
        with pytest.raises(ValueError, match="packing"):
            module(backbone, packing=packing)
        return
    rl = module(backbone, packing=packing)
    records = decoded(backbone, 12, per_step=1 if packing > 1 else 2)
    assert min(len(answer_cells(record)) for record in records) < G
    items = rl.rows.items(records)
    assert packing == 1 or max(len(item.hidden) for item in items) == packing
    for first in range(0, len(items), 7):
        chosen = items[first : first + 7]
        with torch.no_grad():
            scores = rl.score(collate_items([(i, 1.0) for i in chosen], records, backbone.spec))
        for item, part in zip(
            chosen, scores.log_prob.split([i.num_units for i in chosen]), strict=True
        ):
            item.old_log_prob = part
    found = unit_table(items, "old_log_prob", len(records))
    for row, record in enumerate(records):
        cells = answer_cells(record)  # all of them, each once, and nothing else
        assert found[row].isfinite().nonzero()[:, 0].tolist() == cells
        expected = direct_log_probs(backbone, record)
        torch.testing.assert_close(found[row, cells], expected[cells], rtol=0, atol=1e-10)
        # What the sampler noted is the same number, rounded.
        sampled = torch.from_numpy(record.signals["commit_log_prob"])[cells]
        known = sampled.isfinite()
        torch.testing.assert_close(sampled[known].double(), expected[cells][known])


@pytest.mark.slow
def test_reference_alignment_moves_the_blocks_of_training_rows_only() -> None:
    backbone = policy(attention="block", block_size=3).eval()
    records = [record for record in decoded(backbone, 12) if record.num_prompt % 3]
    exact = module(backbone, block_alignment="absolute")
    moved = module(backbone, block_alignment="response")
    assert backbone.spec.block_origin == "sequence"
    assert moved.row_spec.block_origin == "response"
    differences = []
    for rl in (exact, moved):
        items = rl.rows.items(records)
        with torch.no_grad():
            batch = collate_items([(item, 1.0) for item in items], records, rl.row_spec)
            found = rl.score(batch).log_prob
        expected = [direct_log_probs(backbone, records[i.record])[i.cells] for i in items]
        differences.append(float((found - torch.cat(expected)).abs().max()))
    assert differences[0] < 1e-10
    assert differences[1] > 1e-3


def trace(steps: list[int], *, tokens: list[int] | None = None, prompt: int = 2) -> Trajectory:
    values = tokens or list(range(3, 3 + len(steps)))
    return Trajectory(
        uid="one",
        prompt_ids=np.arange(3, 3 + prompt, dtype=np.int32),
        tokens=np.array(values, np.int32),
        commit_step=np.array(steps, np.int32),
        num_steps=max(steps) + 1,
        mask_id=MASK,
        vocab_size=VOCAB,
        meta={"reward": 1.0, "place": 0, "response": 0},
    )


def builder(corruption: Any = None, *, block: bool = False, **options: Any) -> RowBuilder:
    changes: dict[str, Any] = {"attention": "block", "block_size": 4, "block_origin": "response"}
    spec = policy(lora=False, **(changes if block else {})).spec
    return RowBuilder(corruption or TraceMasking(padding="replayed"), spec, **options)


@pytest.mark.parametrize(
    ("block", "shrink", "count"),
    [(False, 1, 7), (False, 2, 4), (False, 8, 1), (True, 1, 4), (True, 2, 2), (True, 4, 1)],
)
def test_shrinkage_counts_rows(block: bool, shrink: int, count: int) -> None:
    """Seven distinct steps, four in the first block of four cells and three in the second.

    Full attention has ceil(7 / s) rows, a block model max(ceil(4 / s), ceil(3 / s)).
    """
    record = trace([0, 3, 1, 2, 4, 6, 5, 5])
    items = builder(TraceMasking(shrink=shrink), block=block).items([record])
    assert len(items) == count
    covered = torch.stack([item.supervised[0] for item in items]).sum(0)
    assert covered.tolist() == [1] * 8


def test_padding_is_no_target_but_may_be_asked_for() -> None:
    """Three cells of answer, five of fill, two of which were written before the answer's end."""
    record = trace([1, 0, 2, 2, 0, 1, 3, 3], tokens=[5, 6, EOS, EOS, EOS, EOS, EOS, EOS])
    plain = builder().items([record])
    # Step 3 wrote fill only: no row. Fill of earlier steps is shown as it was.
    assert [item.cells.tolist() for item in plain] == [[1], [0], [2]]
    assert plain[1].hidden[0].tolist() == [True, False, True, True, False, True, True, True]
    hidden = builder(TraceMasking()).items([record])[1].hidden[0]
    assert hidden.tolist() == [True, False, True, True, True, True, True, True]
    two = builder(num_padding=2).items([record])
    assert [item.cells.tolist() for item in two] == [[1, 4], [0], [2, 3]]
    assert len(builder(num_padding=None).items([record])) == 4


def test_weights_of_every_normalisation() -> None:
    """Groups of two, one and one token; the answer has four of eight cells."""
    record = trace([0, 0, 1, 2, 3, 3, 3, 3], tokens=[5, 6, 7, EOS, EOS, EOS, EOS, EOS])
    longer = trace([0] * 8)

    def weights(normalise: Any, *, block: bool = False) -> list[list[float]]:
        rows = builder(normalise=normalise, block=block)
        return [i.weight.tolist() for i in rows.items([record, longer]) if i.record == 0]

    assert weights("group_mean") == weights(None) == [[0.5, 0.5], [1.0], [1.0]]
    assert weights("response_length") == [[0.25, 0.25], [0.25], [0.25]]
    assert weights("max_gen_length") == [[0.125, 0.125], [0.125], [0.125]]
    assert weights("max_gen_length") == weights(None, block=True)
    # dLLM-RL: full attention by targets with the divergence undivided, blocks by the longest.
    assert weights("reference") == [[0.5, 0.5], [1.0], [1.0]]
    assert builder(normalise="reference").items([record])[0].kl_weight.tolist() == [1.0, 1.0]
    assert weights("reference", block=True) == [[0.125, 0.125], [0.125], [0.125]]


def test_group_mean_of_a_block_model_is_per_block() -> None:
    """Row 0 holds step 0 of both blocks: three tokens of the first, one of the second."""
    (first, *_) = builder(block=True, normalise="group_mean").items(
        [trace([0, 0, 0, 1, 2, 3, 3, 3])]
    )
    assert first.cells.tolist() == [0, 1, 2, 4]
    torch.testing.assert_close(first.weight, torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))


def test_a_row_cap_weighs_what_is_left() -> None:
    """Three of eight rows stand for all: their weights add up to those of eight."""
    record = trace(list(range(8)))
    items = builder(TraceMasking(rows_per_sample=3, padding="replayed")).items([record])
    assert len(items) == 3
    torch.testing.assert_close(torch.cat([i.weight for i in items]), torch.full((3,), 8 / 3))


def test_views_become_one_item_whose_scores_are_added_up() -> None:
    backbone = policy().eval()
    records = decoded(backbone, 6)
    rl = module(backbone, corruption=CoupledViews(), seed=3)
    items = rl.rows.items(records)
    assert [item.record for item in items] == list(range(6))
    batch = collate_items([(item, 1.0) for item in items], records, backbone.spec)
    with torch.no_grad():
        found = rl.score(batch).log_prob.split([item.num_units for item in items])
    for item, record, log_prob in zip(items, records, found, strict=True):
        assert item.cells.tolist() == answer_cells(record)
        expected = torch.zeros(G, dtype=torch.float64)
        coefficient = item.coefficient
        ids = torch.from_numpy(record.canvas().astype(np.int64))
        for view in range(len(item.hidden)):
            canvas = ids.clone()
            canvas[record.num_prompt :][item.hidden[view]] = MASK
            with torch.no_grad():
                logits = backbone.denoise(canvas[None]).logits[0, record.num_prompt :]
            cells = item.supervised[view].nonzero()[:, 0]
            factor, coefficient = coefficient[: len(cells)], coefficient[len(cells) :]
            tokens = torch.from_numpy(record.tokens.astype(np.int64))[cells]
            expected[cells] += factor * logits.log_softmax(-1)[cells, tokens]
        torch.testing.assert_close(log_prob, expected[item.cells], rtol=0, atol=1e-6)


def test_masked_prompts_differ_between_passes_and_not_between_batches() -> None:
    backbone = policy().eval()
    records = decoded(backbone, 8)
    rl = module(backbone, corruption=MaskedPrompt())

    def prompts(items: Any) -> list[list[int]]:
        batch = collate_items([(item, 1.0) for item in items], records, backbone.spec)
        rows = training_rows(batch, backbone.spec)
        start = rows.response_start
        assert (rows.ids[:, start:] == MASK).all()
        return [
            ids[start - records[item.record].num_prompt : start].tolist()
            for ids, item in zip(rows.ids, items, strict=True)
        ]

    first, second = rl.rows.items(records), rl.rows.items(records, epoch=1)
    alone = [prompts([item])[0] for item in first]
    assert prompts(first) == alone
    assert prompts(second) != alone
    assert any(MASK in prompt for prompt in alone)


@pytest.mark.parametrize(
    ("corruption", "attention", "message"),
    [
        (MaskedPrompt(), "block", "MaskedPrompt changes the prompt"),
        (RandomMasking(level="block"), "full", "'block' needs a model with block attention"),
        (CoupledMasking(level="block"), "full", "'block' needs a model with block attention"),
        (Autoregressive(), "full", "Autoregressive hides nothing"),
        (RandomMasking(weight="1/t"), "full", "weight: has no part in training on rollouts"),
        (TraceMasking(weight="none"), "block", "weight: has no part in training on rollouts"),
    ],
)
def test_states_that_do_not_fit_are_refused_at_once(
    corruption: Any, attention: str, message: str
) -> None:
    backbone = policy(attention=attention, block_size=3 if attention == "block" else None)
    with pytest.raises(ValueError, match=message):
        module(backbone, corruption=corruption)


@pytest.mark.parametrize("corruption", [RandomMasking(copies=2), CoupledMasking(level="block")])
def test_rows_do_not_depend_on_what_they_are_drawn_with(corruption: Any) -> None:
    rows = builder(corruption, block=True)
    records = decoded(policy(attention="block", block_size=4, block_origin="response"), 6)
    whole = [item for item in rows.items(records) if item.record == 4]
    part = rows.items(records[4:5])
    assert all(a.hidden.equal(b.hidden) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("corruption", [TraceMasking(), RandomMasking(copies=4), CoupledViews()])
@pytest.mark.parametrize("block", [False, True])
def test_given_tokens_are_shown_in_every_state_and_never_predicted(
    block: bool, corruption: Any
) -> None:
    """The mark behind a picture stands there before the first step."""
    record = replace(trace([2, 0, 1, -1]), given=np.array([False, False, False, True]))
    made = builder(corruption, block=block)
    items = made.items([record])
    assert all(3 not in item.cells for item in items)
    assert {cell for item in items for cell in item.cells.tolist()} <= {0, 1, 2}
    batch = collate_items([(item, 1.0) for item in items], [record], made.spec)
    rows = training_rows(batch, made.spec)
    shown = (rows.targets == record.tokens[3]) & (rows.ids == rows.targets)
    assert shown.sum() == (rows.targets == record.tokens[3]).sum() > 0


def test_rewritten_tokens_are_refused() -> None:
    record = trace([0, 1, 2, 3])
    object.__setattr__(record, "superseded", np.array([[0, 1, 4]], np.int32))
    with pytest.raises(ValueError, match="one: expected a decode that writes every token once"):
        builder().items([record])
