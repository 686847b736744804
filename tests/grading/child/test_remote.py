"""The trusted side's view of a worker."""

from __future__ import annotations

from typing import Any

import pytest

from lit_dlm.grading.child import remote
from lit_dlm.grading.child.remote import Remote


def test_the_time_to_put_the_walls_up_is_not_the_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ready after 8 s of 10 at clock 100: the limit of half a second ends at 108.5."""
    clock = [100.0]
    deadlines: list[float] = []

    class Channel:
        def receive(self) -> str:
            clock[0] += 8.0
            return "ready"

        def send(self, message: dict[str, Any], *, deadline: float) -> None:
            deadlines.append(deadline)

        def receive_bytes(self, *, deadline: float) -> bytes:
            deadlines.append(deadline)
            return b'{"id":1,"value":["f"]}'

    monkeypatch.setattr(remote.time, "monotonic", lambda: clock[0])
    worker = Remote(
        Channel(),  # type: ignore[arg-type]
        wall_seconds=0.5,
        value_bytes=1 << 10,
        explain_end=lambda: ("", ""),
    )
    worker.wait_until_ready()
    assert worker.load("def f(): pass") == ["f"]
    assert deadlines == [108.5, 108.5]
