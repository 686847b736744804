import json
from pathlib import Path

import pytest
import torch

from lit_dlm.reports import plots
from lit_dlm.tracelock.metrics import CalibrationCurve

POINTS = [
    {"step": 0, "val/reward": 0.3},
    {"step": 1, "rollout/reward": 0.4, "time/rollout": 2.0, "time/train": 1.0},
    {"step": 2, "rollout/reward": 0.5, "time/rollout": 2.0, "time/train": 1.5, "val/reward": 0.6},
]


@pytest.mark.slow
def test_points_survive_a_file_and_are_drawn(tmp_path: Path):
    plots.write_points(POINTS, tmp_path / "run" / "curve.jsonl")
    assert plots.read_points(tmp_path / "run" / "curve.jsonl") == POINTS
    plots.plot_run(POINTS, tmp_path / "run.png")
    plots.plot_run(POINTS[:1], tmp_path / "begin.png")  # nothing but the beginning yet
    assert all(p.stat().st_size > 5000 for p in tmp_path.glob("*.png"))
    assert len(list(tmp_path.iterdir())) == 3  # no drafts are left


def test_file_and_picture_of_a_calibration_with_empty_bins(tmp_path: Path):
    metric = CalibrationCurve(num_bins=4)
    metric.update(torch.tensor([0.1, 0.9, 0.95]), torch.tensor([False, True, False]))
    curve = {name: value.tolist() for name, value in metric.compute().items()}
    plots.write_calibration(tmp_path / "curve.json", curve, step=7)
    plots.plot_calibration(curve, tmp_path / "curve.png")
    record = json.loads((tmp_path / "curve.json").read_text())
    assert (record["count"], record["global_step"]) == ([1, 0, 0, 2], 7)
    assert record["accuracy"] == [0.0, None, None, 0.5]
    assert (tmp_path / "curve.png").stat().st_size > 5_000


def test_curves_of_a_resumed_run_are_one_and_the_later_part_counts(tmp_path: Path):
    for version, text in (
        (9, "epoch,step,train/loss,val/x\n0,0,4,\n0,1,3,nan\n,1,,0.5\n"),
        (10, "epoch,step,train/loss,val/x\n1,1,2.5,\n1,2,2,0.75\n"),
    ):
        folder = tmp_path / "logs" / f"version_{version}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(text)
    assert plots.read_curves(tmp_path) == {
        "train/loss": [(0, 4.0), (1, 2.5), (2, 2.0)],
        "val/x": [(1, 0.5), (2, 0.75)],
    }
    assert plots.read_curves(tmp_path / "nowhere") == {}
