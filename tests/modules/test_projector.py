from pathlib import Path

import torch

from lit_dlm.heads.projection import PCAFitter, Projector, ProjectorConfig
from lit_dlm.modules.state_batch import cached_projector, state_snapshots, trace_states
from tests.traces import recorded, small_backbone

CONFIG = ProjectorConfig(hidden_size=16, hidden_rank=6, delta_rank=3)


def test_fit_is_deterministic_and_sees_response_positions_only() -> None:
    """Reference: the same states one by one, without padding, response rows picked by hand."""
    backbone = small_backbone()
    traces = recorded(backbone, 6)
    fitters = PCAFitter(CONFIG), PCAFitter(CONFIG)
    for fitter in fitters:
        for batch in trace_states(traces):
            fitter.update(state_snapshots(backbone, batch))
    one, again = (fitter.finish() for fitter in fitters)
    assert one.digest() == again.digest()
    fitter = PCAFitter(CONFIG)
    for batch in trace_states(traces):
        for row in range(len(batch.ids)):
            real = batch.pad_mask[row]
            hidden = backbone.denoise(batch.ids[row, real][None], hidden_layers=(-3, -2, -1)).hidden
            assert hidden is not None
            prompt = int(real[: batch.start].sum())
            fitter.update(hidden[0, prompt:])
    # Padding changes the order of float32 sums inside the backbone.
    torch.testing.assert_close(
        one.hidden_weight, fitter.finish().hidden_weight, atol=1e-3, rtol=1e-3
    )


def test_states_are_spread_over_each_trace() -> None:
    """Eight steps in four parts of two: one state in each, so masks 8-7, 6-5, 4-3 and 2-1."""
    traces = recorded(small_backbone(), 5)
    masks = torch.cat([batch.masked.sum(1) for batch in trace_states(traces)])
    assert len(masks) == 20
    for number in range(5):
        assert [(int(m) + 1) // 2 for m in masks[4 * number : 4 * number + 4]] == [4, 3, 2, 1]


def test_projector_of_a_folder_is_fitted_once(tmp_path: Path) -> None:
    calls = []

    def fit() -> Projector:
        calls.append(len(calls))
        config = ProjectorConfig(
            hidden_size=16, hidden_rank=4, delta_rank=2, kind="random_orthogonal"
        )
        return Projector.random_orthogonal(config, seed=len(calls))

    first = cached_projector(tmp_path / "projector", fit)
    second = cached_projector(tmp_path / "projector", fit)
    assert calls == [0]
    assert first.digest() == second.digest()
    assert [path.name for path in tmp_path.iterdir()] == ["projector"]
