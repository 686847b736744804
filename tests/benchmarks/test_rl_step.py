"""The RL benchmark compares forms that compute the same."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import run_script

# Starts a step with graded code and four forms of training.
pytestmark = pytest.mark.slow

SIZES = {
    "prompts": 1, "responses": 2, "length": 12, "block": 4, "vocab": 500, "width": 64,
    "layers": 2, "batch": 2, "repeats": 1, "threads": 1,
}  # fmt: skip


def test_all_forms_have_the_same_gradient_and_everything_asked_for_is_reported(
    tmp_path: Path,
) -> None:
    """Packed rows scored at targets, and plain rows with logits everywhere: no straw man."""
    # A process of its own: it forks, which waits for ever behind threads of other tests.
    flags = [f"--{name}={size}" for name, size in SIZES.items()]
    report = json.loads(run_script(tmp_path, "rl_step.py", "--json", *flags))
    assert report["gradient_difference"] < 1e-5
    phases = ("rollout_seconds", "reward_seconds", "train_seconds")
    for name in ("memory_ratio", "time_ratio", *phases):
        assert isinstance(report[name], float), name
    for form in ("ours", "unpacked", "naive", "rowwise"):
        assert report[f"{form}_train_seconds"] > 0
        assert report[f"{form}_train_megabytes"] >= 0
