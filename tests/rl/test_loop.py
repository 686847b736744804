"""One RL step after the other, and what a checkpoint says about them."""

import logging
from contextlib import nullcontext
from unittest.mock import Mock, patch

import pytest

from lit_dlm.rl import loop as loops
from lit_dlm.rl.loop import RLLoop
from lit_dlm.rl.step import RLProgress, RLStep


def steps_of(loop: RLLoop, *numbers: int) -> list[RLStep]:
    """The steps that it makes; whatever they are given, they only count."""
    found = []

    def counted(*given: object, **_: object) -> RLStep:
        progress = given[3]
        assert isinstance(progress, RLProgress)
        after = RLProgress(step=progress.step + 1, cursor=progress.cursor + 4)
        return Mock(number=progress.step, progress=after)

    with patch.object(loops, "rl_step", side_effect=counted):
        for number in numbers:
            found.append(loop.next_step(accumulate=1, version=0, report=Mock()))
            assert found[-1].number == number
    return found


def new_loop() -> RLLoop:
    return RLLoop(Mock(**{"evaluation.side_effect": nullcontext}), Mock(), Mock(), Mock())


def test_a_step_is_made_once_until_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint within it counts the steps before; resumed there, it begins anew."""
    loop = new_loop()
    first, again = steps_of(loop, 0, 0)
    assert first is again is loop.current
    assert loop.state_dict() == {**loops.asdict(RLProgress()), "is_within": True}
    loop.finish()
    (second,) = steps_of(loop, 1)
    assert second is not first
    assert (loop.progress.cursor, loop.steps_begun) == (4, 2)
    within, loop = loop.state_dict(), new_loop()
    assert loop.load_state_dict(within)
    assert "taken within RL step 1: its rollouts are drawn anew" in caplog.text
    assert (loop.progress.step, loop.steps_begun) == (1, 1)
    steps_of(loop, 1)
    loop.finish()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert not new_loop().load_state_dict(loop.state_dict())
        assert not new_loop().load_state_dict({})  # of a checkpoint from before RL
    assert not caplog.messages
