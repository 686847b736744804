"""Replay is the record written out: numpy, torch and a slow simulation agree at every step."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from lit_dlm.trajectories.record import Trajectory, from_history
from lit_dlm.trajectories.replay import BatchedReplay, ReplayedStep, iter_steps, selected
from tests.trajectories.samples import MASK, VOCAB, random_history, random_record


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
    steps = list(iter_steps(record))
    assert [replayed.step for replayed in steps] == list(range(record.num_steps))
    for replayed, after in zip(steps, canvases[1:], strict=True):
        assert replayed.canvas.tolist() == after
        assert record.state_at(replayed.step + 1).tolist() == after
        changed = [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
        assert replayed.positions.tolist() == changed
        positions, tokens = selected(record, replayed.step)
        assert positions.tolist() == changed
        assert tokens.tolist() == replayed.tokens.tolist() == [after[i] for i in changed]
        before = after


def test_steps_do_not_share_their_canvas() -> None:
    record = random_record(np.random.default_rng(3))
    first, *_, last = list(iter_steps(record))
    first.canvas[:] = 0
    assert last.canvas.tolist() == record.tokens.tolist()


def test_torch_replays_a_batch_of_unequal_records_like_numpy() -> None:
    rng = np.random.default_rng(11)
    records = [random_record(rng, f"r{i}", **shape) for i, shape in enumerate(RECORDS)]
    replay = BatchedReplay(records)
    states = replay.all_states()
    T = max(record.num_steps for record in records)
    assert states.shape == (len(records), T + 1, 23)
    for t in range(T + 1):
        torch.testing.assert_close(replay.states_at(t), states[:, t], rtol=0, atol=0)
        for row, record in enumerate(records):
            expected = record.state_at(min(t, record.num_steps))
            assert states[row, t, : record.num_generated].tolist() == expected.tolist()
            assert (states[row, t, record.num_generated :] == MASK).all()


def test_torch_takes_one_step_per_record() -> None:
    rng = np.random.default_rng(5)
    records = [random_record(rng, f"r{i}", remask=0.3) for i in range(4)]
    steps = torch.tensor([0, 3, 7, 5])
    states = BatchedReplay(records).states_at(steps)
    for row, record in enumerate(records):
        assert states[row].tolist() == record.state_at(int(steps[row])).tolist()


def test_a_hand_written_decode() -> None:
    """Position 0 gets 5 at step 0 and 6 at step 2; position 1 gets 7 at step 1, is masked again
    at step 2 and gets 8 at step 3."""
    history = [[MASK, MASK], [5, MASK], [5, 7], [6, MASK], [6, 8]]
    record = from_history(history, uid="x", prompt_ids=[1], mask_id=MASK, vocab_size=VOCAB)
    assert record.superseded is not None
    assert record.superseded.tolist() == [[0, 0, 5], [1, 1, 7], [2, 1, MASK]]
    positions, tokens = selected(record, 2)
    assert (positions.tolist(), tokens.tolist()) == ([0, 1], [6, MASK])
    assert BatchedReplay([record]).all_states()[0].tolist() == history


def test_replay_says_nothing_about_a_match() -> None:
    """A function of the record alone cannot verify: none of its results claims to."""
    names = {field.name for field in fields(ReplayedStep)}
    assert names == {"step", "positions", "tokens", "canvas"}
    public = {name for name in (*dir(BatchedReplay), *dir(Trajectory)) if name[0] != "_"}
    assert not [name for name in public if "match" in name or "exact" in name]


def test_batches_of_two_are_two_records_and_not_one() -> None:
    """Both samples interleaved in one record was a failure of a peer's format."""
    rng = np.random.default_rng(2)
    histories = [random_history(rng, num_generated=9, num_steps=6) for _ in range(2)]
    records = [
        from_history(h, uid=f"{i}", prompt_ids=[1], mask_id=MASK, vocab_size=VOCAB)
        for i, h in enumerate(histories)
    ]
    states = BatchedReplay(records).all_states()
    for row, history in enumerate(histories):
        np.testing.assert_array_equal(states[row].numpy(), history)


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


def test_steps_outside_the_record_and_empty_batches_are_refused() -> None:
    record = random_record(np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"step must be in 0\.\.6, got 7"):
        selected(record, 7)
    with pytest.raises(ValueError, match="expected at least one record"):
        BatchedReplay([])
    other = from_history([[1], [2]], uid="y", prompt_ids=[3], mask_id=1, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="expected one mask id"):
        BatchedReplay([record, other])
