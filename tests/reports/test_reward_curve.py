"""Reward curves: files and plots."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_dlm.reports.reward_curve import plot_run, read_points, write_points

POINTS = [
    {"step": 0, "val/reward": 0.3},
    {"step": 1, "rollout/reward": 0.4, "time/rollout": 2.0, "time/train": 1.0},
    {"step": 2, "rollout/reward": 0.5, "time/rollout": 2.0, "time/train": 1.5, "val/reward": 0.6},
]


@pytest.mark.slow
def test_points_survive_a_file_and_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run" / "curve.jsonl"
    write_points(POINTS, path)
    assert read_points(path) == POINTS
    plot_run(POINTS, tmp_path / "run.png")
    plot_run(POINTS[:1], tmp_path / "begin.png")  # nothing but the beginning yet
    assert all(p.stat().st_size > 5000 for p in tmp_path.glob("*.png"))
    assert len(list(tmp_path.iterdir())) == 3  # no drafts are left
