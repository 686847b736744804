from dataclasses import replace

import numpy as np
import pytest

from lit_dlm.modules.state_batch import collate_states, remasked, states_at
from lit_dlm.trajectories.record import Trajectory
from tests.traces import MASK, VOCAB


def trace(prompt: list[int], tokens: list[int], commit_step: list[int]) -> Trajectory:
    return Trajectory(
        uid="x",
        prompt_ids=np.array(prompt),
        tokens=np.array(tokens),
        commit_step=np.array(commit_step),
        num_steps=max(commit_step) + 1,
        mask_id=MASK,
        vocab_size=VOCAB,
    )


SHORT = trace([5], [7, 8, 9], [1, 0, 2])
LONG = trace([5, 6, 7], [10, 11, 12, 13], [0, 1, 3, 2])


def test_states_are_padded_around_the_response() -> None:
    """Prompts of one and three on the left, responses of three and four on the right."""
    traces = [SHORT, LONG]
    batch = collate_states(traces, states_at(traces, [1, 3]), is_real=[True, False])
    assert batch.start == 3
    assert batch.ids.tolist() == [[0, 0, 5, MASK, 8, MASK, 0], [5, 6, 7, 10, 11, MASK, 13]]
    assert batch.target.tolist() == [[0, 0, 5, 7, 8, 9, 0], [5, 6, 7, 10, 11, 12, 13]]
    assert batch.pad_mask.tolist() == [[False] * 2 + [True] * 4 + [False], [True] * 7]
    assert batch.masked.nonzero().tolist() == [[0, 3], [0, 5], [1, 5]]
    assert batch.is_real.tolist() == [True, False]
    assert batch.to("meta").ids.device.type == "meta"


def test_states_made_together_equal_states_made_one_by_one() -> None:
    over = replace(SHORT, superseded=np.array([[0, 0, 6]]))
    for traces in ([SHORT, LONG], [over, LONG]):
        for steps in ([1, 3], [0, 0], [2, 4]):
            for trace, step, state in zip(traces, steps, states_at(traces, steps), strict=True):
                assert np.array_equal(state, trace.state_at(step))


@pytest.mark.parametrize("with_prompt", [False, True])
def test_stored_rows_lie_on_their_columns(with_prompt: bool) -> None:
    """Every stored row holds its own position number within the sample's rows."""
    features = []
    for record in (SHORT, LONG):
        rows = np.arange(1, record.num_generated + with_prompt * record.num_prompt + 1)
        features.append((rows[:, None].astype(np.float32), rows.astype(np.int32)))
    batch = collate_states([SHORT, LONG], states_at([SHORT, LONG], [0, 0]), features=features)
    assert batch.features is not None
    assert batch.proposals is not None
    expected = [[1, 2, 3, 0], [1, 2, 3, 4]]
    if with_prompt:
        expected = [[0, 0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 5, 6, 7]]
    assert batch.features[..., 0].tolist() == expected
    assert batch.proposals.tolist() == expected


def test_remasking_hides_one_to_all_of_what_was_written() -> None:
    rng = np.random.default_rng(0)
    given = replace(LONG, given=np.arange(4) == 0, commit_step=np.array([-1, 1, 3, 2]))
    for trace, counts in ((LONG, {1, 2, 3, 4}), (given, {1, 2, 3})):
        found = set()
        for _ in range(60):
            response = remasked(trace, rng)
            hidden = response == MASK
            assert np.array_equal(response[~hidden], trace.tokens[~hidden])
            assert trace is LONG or not hidden[0]
            found.add(int(hidden.sum()))
        assert found == counts
