"""Replay is the record written out: states and a slow simulation agree at every step."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.replay import states_at
from tests.trajectories.samples import MASK, VOCAB, from_history, random_history, random_record


def simulate(record: Trajectory) -> list[list[int]]:
    """Every canvas by writing one event after another into a list."""
    canvas = [MASK] * record.num_generated
    for position in range(record.num_generated):
        if record.given is not None and record.given[position]:
            canvas[position] = int(record.tokens[position])
    canvases = [list(canvas)]
    for step in range(record.num_steps):
        writes = [] if record.superseded is None else record.superseded.tolist()
        for at, position, token in writes:
            if at == step:
                canvas[position] = token
        for position, at in enumerate(record.commit_step.tolist()):
            if at == step:
                canvas[position] = int(record.tokens[position])
        canvases.append(list(canvas))
    return canvases


RECORDS = [
    {},
    {"remask": 0.3},
    {"given": 0.3, "fill": 0.6},
    {"remask": 0.5, "given": 0.2, "fill": 0.5, "num_generated": 23, "num_steps": 11},
    {"num_prompt": 0, "num_generated": 1, "num_steps": 1},
    {"num_steps": 30, "num_generated": 5},
]


@pytest.mark.parametrize("shape", RECORDS)
def test_every_step_is_what_the_simulation_writes(shape: dict) -> None:
    record = random_record(np.random.default_rng(7), **shape)
    canvases = simulate(record)
    np.testing.assert_array_equal(record.all_states(), canvases)
    before = canvases[0]
    for step, after in enumerate(canvases[1:]):
        assert record.state_at(step + 1).tolist() == after
        changed = [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
        assert record.committed_at(step).tolist() == changed
        before = after


def test_a_batch_holds_every_record_and_its_last_canvas_once_it_has_ended() -> None:
    rng = np.random.default_rng(11)
    records = [
        random_record(rng, f"r{i}", num_steps=num_steps, remask=0.3)
        for i, num_steps in enumerate((3, 7, 5))
    ]
    for step in range(8):
        states = states_at(records, step)
        assert (states.shape, states.dtype) == ((3, 12), torch.int64)
        for row, record in enumerate(records):
            expected = simulate(record)[min(step, record.num_steps)]
            assert states[row].tolist() == expected


def test_a_hand_written_decode() -> None:
    """Position 0 gets 5 at step 0 and 6 at step 2; position 1 gets 7 at step 1, is masked again
    at step 2 and gets 8 at step 3."""
    history = [[MASK, MASK], [5, MASK], [5, 7], [6, MASK], [6, 8]]
    record = from_history(history, uid="x", prompt_ids=[1], mask_id=MASK, vocab_size=VOCAB)
    assert record.superseded is not None
    assert record.superseded.tolist() == [[0, 0, 5], [1, 1, 7], [2, 1, MASK]]
    positions = record.committed_at(2)
    assert (positions.tolist(), record.state_at(3)[positions].tolist()) == ([0, 1], [6, MASK])
    assert [states_at([record], step)[0].tolist() for step in range(5)] == history


def test_replay_says_nothing_about_a_match() -> None:
    """A function of the record alone cannot verify: none of its results claims to."""
    public = {name for name in dir(Trajectory) if name[0] != "_"}
    assert not [name for name in public if "match" in name or "exact" in name]


def test_batches_of_two_are_two_records_and_not_one() -> None:
    """Both samples interleaved in one record was a failure of a peer's format."""
    rng = np.random.default_rng(2)
    histories = [random_history(rng, num_generated=9, num_steps=6) for _ in range(2)]
    records = [
        from_history(h, uid=f"{i}", prompt_ids=[1], mask_id=MASK, vocab_size=VOCAB)
        for i, h in enumerate(histories)
    ]
    for step in range(7):
        states = states_at(records, step)
        for row, history in enumerate(histories):
            np.testing.assert_array_equal(states[row].numpy(), history[step])


def test_a_record_with_missing_steps_does_not_replay_as_a_whole_one() -> None:
    """61 of 64 steps dropped, or all steps shuffled, still "matched" in a peer's replay.

    Here such a record replays to other canvases, and its digest is another one.
    """
    rng = np.random.default_rng(4)
    record = random_record(rng, num_generated=16, num_steps=16)
    order = rng.permutation(16).astype(np.int32)
    shuffled = Trajectory(
        **{
            **{field.name: getattr(record, field.name) for field in fields(Trajectory)},
            "commit_step": order[record.commit_step],
        }
    )
    assert (shuffled.all_states() != record.all_states()).any()
    assert shuffled.digest() != record.digest()
