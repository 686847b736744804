"""The example of an advantage, through the command line, by one line of configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

import cli
from lit_dlm.trajectories.store import TrajectoryShardReader

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_an_advantage_outside_the_packages_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right answers are worth 1, wrong ones 0: each differs from the other kind by one rank."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    cli.main(
        [
            "fit",
            "--config=configs/exp/tracerl_tiny.yaml",
            f"--run_dir={tmp_path}",
            "--trainer.max_epochs=1",
            "--trainer.enable_progress_bar=false",
            "--data.val_tasks=null",
            "--data.filters=null",
            "--data.prompts_per_step=8",
            "--data.responses_per_prompt=4",
            '--data.advantage={"class_path": "advantage.RankAdvantage", "init_args": {"scale": 2}}',
        ]
    )
    records = list(TrajectoryShardReader(tmp_path / "rollouts"))
    assert len(records) == 32
    found = set()
    for record in records:
        group = [
            one.meta["reward"] for one in records if one.meta["prompt"] == record.meta["prompt"]
        ]
        above = sum(record.meta["reward"] > other for other in group)
        below = sum(record.meta["reward"] < other for other in group)
        advantages = record.signals["commit_advantage"]
        expected = 2.0 * (above - below) / 3
        assert advantages[0] == pytest.approx(expected, abs=1e-3)  # signals are float16
        found.add(round(expected, 3))
    assert len(found) > 2
