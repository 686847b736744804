"""GRPO on lockstep rollouts through the command line; profiles are in tests/profile."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, run

pytestmark = pytest.mark.slow


def test_the_shipped_experiment_learns_from_lockstep_rollouts(tmp_path: Path):
    """One RL step of 4 problems: fewer forwards than cells, and both rewards are paid."""
    run(
        *("fit", "--config", str(ROOT / "configs" / "exp" / "tracerl_lockstep_tiny.yaml")),
        *("--run_dir", str(tmp_path), "--trainer.enable_progress_bar", "false"),
        *("--trainer.max_epochs", "1", "--data.init_args.prompts_per_step", "4"),
        *("--data.init_args.filters", "null", "--data.init_args.val_tasks", "null"),
    )
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    logged = {name: float(value) for row in rows for name, value in row.items() if value}
    assert 1 <= logged["rollout/num_steps"] < 32
    assert 0 < logged["rollout/reward/lockstep"] <= 1
    total = logged["rollout/reward/graded"] + 0.1 * logged["rollout/reward/lockstep"]
    assert logged["rollout/reward"] == pytest.approx(total, abs=1e-5)
    assert (tmp_path / "policy").is_dir()
