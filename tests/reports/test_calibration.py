import json
from pathlib import Path

import torch

from lit_dlm.metrics.acceptance import CalibrationCurve
from lit_dlm.reports.plots import plot_calibration, write_calibration


def test_file_and_picture_of_a_curve_with_empty_bins(tmp_path: Path) -> None:
    metric = CalibrationCurve(num_bins=4)
    metric.update(torch.tensor([0.1, 0.9, 0.95]), torch.tensor([False, True, False]))
    curve = {name: value.tolist() for name, value in metric.compute().items()}
    write_calibration(tmp_path / "curve.json", curve, step=7)
    plot_calibration(curve, tmp_path / "curve.png")
    record = json.loads((tmp_path / "curve.json").read_text())
    assert record["count"] == [1, 0, 0, 2]
    assert record["accuracy"] == [0.0, None, None, 0.5]
    assert record["global_step"] == 7
    assert (tmp_path / "curve.png").stat().st_size > 5_000
