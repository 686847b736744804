import numpy as np
import pytest
import torch

from lit_dlm.modules.state_batch import (
    collate_states,
    collate_trace_states,
    trace_state,
)
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
    batch = collate_states([trace_state(SHORT, 1), trace_state(LONG, 3)])
    assert batch.start == 3
    assert batch.ids.tolist() == [[0, 0, 5, MASK, 8, MASK, 0], [5, 6, 7, 10, 11, MASK, 13]]
    assert batch.target.tolist() == [[0, 0, 5, 7, 8, 9, 0], [5, 6, 7, 10, 11, 12, 13]]
    assert batch.pad_mask.tolist() == [[False] * 2 + [True] * 4 + [False], [True] * 7]
    assert batch.masked.nonzero().tolist() == [[0, 3], [0, 5], [1, 5]]
    assert batch.is_real.all()


def test_states_made_together_equal_states_made_one_by_one() -> None:
    for steps in ([1, 3], [0, 0], [2, 4]):
        records = [SHORT, LONG]
        together = collate_trace_states(records, steps, [True, False])
        examples = [trace_state(*pair) for pair in zip(records, steps, strict=True)]
        one_by_one = collate_states(examples)
        for name in ("ids", "target", "masked", "pad_mask"):
            assert torch.equal(getattr(together, name), getattr(one_by_one, name)), name
        assert together.is_real.tolist() == [True, False]


@pytest.mark.parametrize("with_prompt", [False, True])
def test_stored_rows_lie_on_their_columns(with_prompt: bool) -> None:
    """Every stored row holds its own position number within the sample's rows."""
    examples = []
    for record in (SHORT, LONG):
        rows = record.num_generated + (record.num_prompt if with_prompt else 0)
        example = trace_state(record, 0)
        values = np.arange(1, rows + 1, dtype=np.float32)[:, None]
        examples.append(
            type(example)(
                trace=record,
                response=example.response,
                features=values,
                proposals=np.arange(1, rows + 1, dtype=np.int32),
            )
        )
    batch = collate_states(examples)
    assert batch.features is not None
    assert batch.proposals is not None
    expected = (
        [[0, 0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 5, 6, 7]]
        if with_prompt
        else [[1, 2, 3, 0], [1, 2, 3, 4]]
    )
    assert batch.features[..., 0].tolist() == expected
    assert batch.proposals.tolist() == expected


def test_batch_moves_as_a_whole() -> None:
    batch = collate_states([trace_state(SHORT, 0)]).to("meta")
    assert batch.ids.device.type == batch.is_real.device.type == "meta"
    assert batch.start == 1


def test_stored_features_must_be_there_for_all_or_none() -> None:
    with_features = trace_state(SHORT, 0)
    with_features = type(with_features)(
        trace=SHORT,
        response=with_features.response,
        features=np.zeros((3, 2), dtype=np.float32),
        proposals=np.zeros(3, dtype=np.int32),
    )
    with pytest.raises(ValueError, match="stored features are missing"):
        collate_states([with_features, trace_state(LONG, 0)])
    assert torch.equal(collate_states([trace_state(SHORT, 3)]).masked, torch.zeros(1, 4).bool())
