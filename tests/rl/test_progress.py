"""What is told about rollouts between two epochs."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lit_dlm.rl.module import RolloutProgress


class Bar:
    def __init__(self, shows: bool) -> None:
        self.shows = shows
        self.texts: list[str] = []

    def on_rollout_progress(self, text: str, done: int, total: int) -> bool:
        self.texts.append(f"{text} ({done} of {total})")
        return self.shows


def trainer(*callbacks: Any, first: bool = True) -> Any:
    return SimpleNamespace(is_global_zero=first, callbacks=[object(), *callbacks])


def test_time_left_follows_from_the_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """30 s for a quarter leave 90 s; the log is used where no bar shows it, at intervals."""
    clock = [100.0]
    monkeypatch.setattr("lit_dlm.rl.module.time.monotonic", lambda: clock[0])
    bar, hidden = Bar(True), Bar(False)
    with caplog.at_level(logging.INFO):
        for callbacks in ((bar,), (hidden,), ()):
            told = RolloutProgress(trainer(*callbacks), 3)
            for done in (1, 2):
                clock[0] += 30.0 if done == 1 else 1.0
                told("rollout", done, 4)
        RolloutProgress(trainer(first=False), 3)("rollout", 1, 2)
    assert bar.texts[0] == "RL step 3: rollout 1/4, 1:30 left (1 of 4)"
    assert len(hidden.texts) == 2
    assert [r.getMessage() for r in caplog.records] == ["RL step 3: rollout 1/4, 1:30 left"] * 2
