import hashlib
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lit_dlm.trajectories import Trajectory
from lit_dlm.trajectories.format import decode_block
from lit_dlm.trajectories.members import encode_members
from tests.trajectories.samples import MASK, VOCAB, from_history, random_history, small_record


def tiny(tokens=(4, 5, 6), commit_step=(1, 0, 2), **changes) -> Trajectory:
    return small_record(tokens, commit_step, num_steps=3, **changes)


def test_states_follow_the_step_convention():
    """Commit steps 1, 0, 2: before step 0 all is masked, before step 1 the second token shows,
    before step 2 the first two, before step 3 (the end) all."""
    record = tiny()
    expected = [[9, 9, 9], [9, 5, 9], [4, 5, 9], [4, 5, 6]]
    assert record.all_states().tolist() == expected
    assert [record.state_at(t).tolist() for t in range(4)] == expected
    assert record.events().tolist() == [[0, 1, 5], [1, 0, 4], [2, 2, 6]]
    with pytest.raises(ValueError, match=r"step must be in 0\.\.3"):
        record.state_at(4)
    with pytest.raises(ValueError, match=r"step must be in 0\.\.2"):
        record.committed_at(3)


def test_writes_that_were_overwritten_are_kept():
    """One position: written 3 at step 0, masked at 1, written 4 at 2, edited to 5 at 3."""
    record = from_history([[MASK], [3], [MASK], [4], [5]], prompt_ids=[])
    assert (record.tokens, record.commit_step) == ([5], [3])
    assert record.superseded.tolist() == [[0, 0, 3], [1, 0, MASK], [2, 0, 4]]
    # Masked before steps 0 and 2.
    assert record.masked_rows().tolist() == [[0, 0], [2, 0]]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_generated=st.integers(1, 40),
    num_steps=st.integers(0, 20),
    remask=st.sampled_from([0.0, 0.1, 0.5]),
    given=st.sampled_from([0.0, 0.4]),
    fill=st.sampled_from([1.0, 0.6]),
)
def test_replay_equals_the_history(seed, **shape):
    history = random_history(np.random.default_rng(seed), **shape)
    record = from_history(history, prompt_ids=[1])
    np.testing.assert_array_equal(record.all_states(), history)
    np.testing.assert_array_equal(record.initial(), history[0])
    events, replayed = record.events(), history[0].copy()
    for t, (before, after) in enumerate(pairwise(history)):
        np.testing.assert_array_equal(record.state_at(t), before)
        np.testing.assert_array_equal(record.committed_at(t), np.flatnonzero(after != before))
        for _, position, token in events[events[:, 0] == t]:
            replayed[position] = token
        np.testing.assert_array_equal(replayed, after)
    np.testing.assert_array_equal(record.state_at(len(history) - 1), history[-1])
    rows = [(t, i) for t, state in enumerate(history[:-1]) for i in np.flatnonzero(state == MASK)]
    assert [tuple(row) for row in record.masked_rows()] == rows


def test_digest_is_the_published_hash():
    """Lengths (P, G, T, mask, events), prompt, tokens, commit steps as unsigned 32-bit numbers."""
    record = tiny(tokens=[4, 5, MASK], commit_step=[1, 0, -1])
    numbers = [1, 3, 3, MASK, 0, 3, 4, 5, MASK, 1, 0, 0xFFFFFFFF]
    expected = hashlib.sha256(b"ldt.traj.v1\0" + struct.pack("<12I", *numbers)).digest()[:16]
    assert record.digest() == expected
    assert tiny(uid="other", seed=5).digest() == tiny().digest()
    assert tiny(commit_step=[1, 0, 1]).digest() != tiny().digest()
    given = tiny(given=[True, False, False], commit_step=[-1, 0, 2])
    assert given.digest() != tiny(commit_step=[0, 0, 2]).digest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit_step": [1, 0, 3]}, "commit_step must be in"),
        ({"commit_step": [1, 0, -1]}, "must hold the mask id"),
        ({"tokens": [4, 5, VOCAB]}, "tokens must be in"),
        ({"tokens": [4, 5, -2]}, "tokens must be in"),
        ({"prompt_ids": [VOCAB + 1]}, "prompt_ids must be in"),
        ({"prompt_ids": [VOCAB, 3, VOCAB + 2]}, "prompt_ids must be in"),
        ({"given": [True, False, False]}, "given position has a commit step"),
        ({"tokens": [4, 5, MASK]}, "ends as a mask after a write"),
        ({"superseded": [[2, 0, 7]]}, "not earlier than the last write"),
        ({"superseded": [[0, 0, 4]]}, "repeats the value"),
        ({"superseded": [[0, 0, MASK]]}, "repeats the value"),
        ({"superseded": [[1, 2, 7], [0, 2, 8]]}, "out of"),
        ({"superseded": [[0, 3, 7]]}, "outside the canvas"),
        ({"superseded": [[0, 0, VOCAB]]}, "superseded must be in"),
        ({"status": "done"}, "status must be one of"),
        ({"meta": {"correct": []}}, "meta 'correct': got list"),
        ({"meta": {"method": 1}}, "meta 'method': got int"),
        ({"seed": -1}, "seed must be in"),
        ({"uid": ""}, "1 to 65535 bytes"),
        ({"uid": "\ud800"}, "uid must be a text"),
        ({"commit_step": [0, 0]}, "shape"),
        ({"signals": {"commit_prob": np.zeros(2, dtype=np.float16)}}, "commit_prob"),
        ({"signals": {"prob": np.zeros(3)}}, "signal 'prob'"),
    ],
)
def test_validate_names_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes).validate()


def test_rows_of_pictures_count_up_from_the_end_of_the_vocabulary():
    prompts = [[1, VOCAB, VOCAB + 1, 2, VOCAB + 2], [VOCAB, 1]]
    records = [
        from_history([[MASK], [3]], uid=uid, prompt_ids=ids)
        for uid, ids in zip("ab", prompts, strict=True)
    ]
    found = decode_block(encode_members(records)[0])
    assert [record.prompt_ids.tolist() for record in found] == prompts
