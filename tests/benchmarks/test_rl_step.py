"""The RL benchmark compares forms that compute the same."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

# Starts a step with graded code and four forms of training.
pytestmark = pytest.mark.slow

SIZES = {
    "prompts": 1, "responses": 2, "length": 12, "block": 4, "vocab": 500, "width": 64,
    "layers": 2, "batch": 2, "repeats": 1, "threads": 1,
}  # fmt: skip


def test_all_forms_have_the_same_gradient_and_everything_asked_for_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed rows scored at targets, and plain rows with logits everywhere: no straw man."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import rl_step

    report = rl_step.measure(argparse.Namespace(**SIZES, device="cpu", json=True))
    assert report["gradient_difference"] < 1e-5
    for name in (
        "memory_ratio",
        "time_ratio",
        "rollout_seconds",
        "reward_seconds",
        "train_seconds",
    ):
        assert isinstance(report[name], float), name
    for form in ("ours", "unpacked", "naive", "rowwise"):
        assert report[f"{form}_train_seconds"] > 0
        assert report[f"{form}_train_megabytes"] >= 0
