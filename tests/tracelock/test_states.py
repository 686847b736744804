"""Batches of states, and the projector that is fitted on them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lit_dlm.backbones.projection import PCAFitter, Projector, ProjectorConfig
from lit_dlm.tracelock.states import (
    cached_projector,
    collate_states,
    state_snapshots,
    states_at,
    trace_states,
)
from tests.tracelock.traces import trace
from tests.traces import MASK, recorded, small_backbone, small_projector

CONFIG = ProjectorConfig(hidden_size=16, hidden_rank=6, delta_rank=3)

SHORT = trace([5], [7, 8, 9], [1, 0, 2])
LONG = trace([5, 6, 7], [10, 11, 12, 13], [0, 1, 3, 2])
TRACES = [SHORT, LONG]


def test_states_are_padded_around_the_response() -> None:
    """Prompts of one and three on the left, responses of three and four on the right."""
    batch = collate_states(TRACES, states_at(TRACES, [1, 3]), is_real=[True, False])
    assert batch.start == 3
    assert batch.ids.tolist() == [[0, 0, 5, MASK, 8, MASK, 0], [5, 6, 7, 10, 11, MASK, 13]]
    assert batch.target.tolist() == [[0, 0, 5, 7, 8, 9, 0], [5, 6, 7, 10, 11, 12, 13]]
    assert batch.pad_mask.tolist() == [[False] * 2 + [True] * 4 + [False], [True] * 7]
    assert batch.masked.nonzero().tolist() == [[0, 3], [0, 5], [1, 5]]
    assert batch.is_real.tolist() == [True, False]
    assert batch.to("meta").ids.device.type == "meta"


def test_states_made_together_equal_states_made_one_by_one() -> None:
    over = replace(SHORT, superseded=np.array([[0, 0, 6]]))
    for traces in (TRACES, [over, LONG]):
        for steps in ([1, 3], [0, 0], [2, 4]):
            for one, step, state in zip(traces, steps, states_at(traces, steps), strict=True):
                assert np.array_equal(state, one.state_at(step))


def test_stored_rows_lie_on_their_columns() -> None:
    """Every stored row holds its own position number within the sample's rows."""
    for with_prompt, expected in (
        (False, [[1, 2, 3, 0], [1, 2, 3, 4]]),
        (True, [[0, 0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 5, 6, 7]]),
    ):
        features = []
        for record in TRACES:
            rows = np.arange(record.num_generated + with_prompt * record.num_prompt) + 1
            features.append((rows[:, None].astype(np.float32), rows.astype(np.int32)))
        batch = collate_states(TRACES, states_at(TRACES, [0, 0]), features=features)
        assert batch.features[..., 0].tolist() == batch.proposals.tolist() == expected


def test_traces_without_a_grader_count_as_those_that_are_not_wrong() -> None:
    records = [
        replace(trace([5], [7], [0]), meta=meta)
        for meta in ({"correct": True}, {"correct": False}, {"correct": None}, {})
    ]
    states = [record.state_at(0) for record in records]
    assert collate_states(records[:3], states[:3]).is_correct.tolist() == [True, False, True]
    assert collate_states(records, states).is_correct is None


def test_fit_is_deterministic_and_sees_response_positions_only() -> None:
    """Reference: the same states one by one, without padding, response rows picked by hand."""
    backbone = small_backbone()
    traces = recorded(backbone, 6)
    one, again, by_hand = fitters = [PCAFitter(CONFIG) for _ in range(3)]
    for batch in trace_states(traces):
        for fitter in (one, again):
            fitter.update(state_snapshots(backbone, batch))
        for ids, real in zip(batch.ids, batch.pad_mask, strict=True):
            hidden = backbone.denoise(ids[real][None], hidden_layers=(-3, -2, -1)).hidden
            by_hand.update(hidden[0, int(real[: batch.start].sum()) :])
    first, second, expected = (fitter.finish() for fitter in fitters)
    assert first.digest() == second.digest()
    # Padding changes the order of float32 sums inside the backbone.
    torch.testing.assert_close(first.hidden_weight, expected.hidden_weight, atol=1e-3, rtol=1e-3)


def test_blocks_may_count_from_the_response() -> None:
    kind = {"decoder": "qwen3", "attention": "block", "block_size": 4, "block_origin": "response"}
    (batch,) = trace_states(recorded(backbone := small_backbone(**kind), 4))
    ids, start = batch.ids[:1, batch.start - 1 :], batch.start  # the prompt has one token
    hidden = backbone.denoise(ids, hidden_layers=(-1,), response_start=1).hidden
    found = state_snapshots(backbone, batch, hidden_layers=(-1,))[: ids.shape[1] - 1]
    assert int(batch.pad_mask[0, :start].sum()) == 1
    torch.testing.assert_close(found, hidden[0, 1:], atol=1e-5, rtol=1e-5)


def test_states_are_spread_over_each_trace() -> None:
    """Eight steps in four parts of two: one state in each, so masks 8-7, 6-5, 4-3 and 2-1."""
    traces = recorded(small_backbone(), 5)
    masks = torch.cat([batch.masked.sum(1) for batch in trace_states(traces)])
    assert [(int(m) + 1) // 2 for m in masks] == [4, 3, 2, 1] * 5


def test_projector_of_a_folder_is_fitted_once(tmp_path: Path) -> None:
    calls = []

    def fit() -> Projector:
        calls.append(len(calls))
        return small_projector()

    first, second = (cached_projector(tmp_path / "projector", fit) for _ in range(2))
    assert calls == [0]
    assert first.digest() == second.digest()
    assert [path.name for path in tmp_path.iterdir()] == ["projector"]
