"""States of decodes that rewrite: equal to replays of the records, block by block."""

from typing import Any

import numpy as np
import pytest
import torch

from lit_dlm.rl.batch import SampleBuilder
from lit_dlm.training.bounds import DecodedViews
from lit_dlm.trajectories.record import Trajectory, derive
from tests.finetuning.runs import EOS, MASK, VOCAB, G, small

FULL: dict[str, Any] = {}
BLOCKS: dict[str, Any] = {"attention": "block", "block_size": 3, "block_origin": "response"}


def rewriting(count: int) -> list[Trajectory]:
    """Decodes of random writes of 12 steps, which replace tokens and take them back."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(count):
        states = [np.full(G, MASK, np.int32)]
        for _ in range(12):
            written = rng.random(G) < 0.3
            tokens = np.where(rng.random(G) < 0.2, MASK, rng.integers(3, VOCAB, G))
            states.append(np.where(written, tokens, states[-1]).astype(np.int32))
        last = np.where(states[-1] == MASK, rng.integers(3, VOCAB, G), states[-1]).astype(np.int32)
        if number % 2:
            last[-2:] = EOS  # one of them behind the answer
        record = Trajectory(
            uid=f"decode/{number}",
            prompt_ids=np.arange(3, 5 + number % 2, dtype=np.int32),
            vocab_size=VOCAB,
            **{**derive(states[0], np.stack([*states[1:], last]), MASK), "given": None},
        )
        record.validate()
        assert record.superseded is not None
        records.append(record)
    return records


@pytest.mark.parametrize("kind", [FULL, BLOCKS])
@pytest.mark.parametrize("num_states", [1, 3, 40])
def test_states_are_those_of_the_decode_with_all_that_was_not_final_as_targets(
    kind: dict[str, Any], num_states: int
) -> None:
    """The ``n``-th of ``N`` states is before step ``floor(n S / N)`` of a block's ``S`` steps."""
    builder = SampleBuilder(DecodedViews(num_states=num_states), small(**kind).spec)
    records = rewriting(6)
    batch = builder.responses(records)
    states = builder.masking.states(batch)
    starts = range(0, G, 3) if kind else [0]
    for row, record in enumerate(records):
        for number in range(num_states):
            at = row * num_states + number
            assert states.response[at] == row
            for first in starts:
                cells = slice(first, first + 3 if kind else G)
                events = record.events()
                here = np.isin(events[:, 1], np.arange(G)[cells])
                steps = np.unique(events[here, 0])
                seen = record.state_at(int(steps[number * len(steps) // num_states]))[cells]
                final, maskable = record.tokens[cells], batch.maskable[row, cells].numpy()
                wrong = (seen != MASK) & (seen != final)
                assert states.hidden[at, cells].tolist() == (seen == MASK).tolist()
                assert states.shown[at, cells].tolist() == np.where(wrong, seen, -1).tolist()
                targets = maskable & (seen != final)
                assert states.supervised[at, cells].tolist() == targets.tolist()
            left = states.supervised[at]
            wanted = torch.where(left, 1 / (num_states * left.sum().clamp_min(1)), 0.0)
            torch.testing.assert_close(states.coefficient[at], wanted)


def test_rows_show_what_was_replaced_and_the_clean_copy_does_not() -> None:
    builder = SampleBuilder(DecodedViews(num_states=4), small(**BLOCKS).spec)
    samples = builder.samples(rewriting(4))
    batch = samples.select(torch.tensor([3, 1]))
    rows = batch.rows()
    # A row holds a sample: the prompt, the clean response, then a copy for each state.
    start, n = batch.responses.start, rows.ids.shape[1]
    width = batch.states.hidden.shape[1]
    assert torch.equal(rows.ids[:, : start + width], rows.targets[:, : start + width])
    copies = (n - start - width) // width
    noisy = rows.ids[:, start + width :].unflatten(1, (copies, width))
    for row in range(2):
        of_row = (batch.states.sample == row).nonzero()[:, 0].tolist()
        for copy, state in enumerate(of_row):
            shown = batch.states.shown[state]
            assert copy == 0 or (shown >= 0).any()
            assert torch.equal(noisy[row, copy][shown >= 0], shown[shown >= 0])
            assert (noisy[row, copy][batch.states.hidden[state]] == MASK).all()


def test_states_need_at_least_one() -> None:
    with pytest.raises(ValueError, match="num_states"):
        DecodedViews(num_states=0)
