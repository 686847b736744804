"""Tells how far the rollouts of an RL step are, which Lightning's own bar does not see."""

from __future__ import annotations

import logging
import time

from lightning.pytorch import Trainer

logger = logging.getLogger(__name__)

_SECONDS = 10.0


class RolloutProgress:
    """Reports phase, share and time left: to callbacks that take it, else to the log.

    A callback takes it by a method ``on_rollout_progress(text, done, total)``, which says whether
    it has shown it.
    """

    def __init__(self, trainer: Trainer, step: int) -> None:
        self.trainer = trainer
        self.step = step
        self._phase = ""
        self._began = self._told = time.monotonic()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Takes a report: the phase, how much of it is done and how much there is."""
        now = time.monotonic()
        if phase != self._phase:
            # The first report comes after the first batch, when the rate is known already.
            self._phase, self._began = phase, self._told
        if not self.trainer.is_global_zero:
            return
        left = (now - self._began) / max(done, 1) * (total - done)
        text = f"RL step {self.step}: {phase} {done}/{total}, {_clock(left)} left"
        takers = [
            taker
            for callback in self.trainer.callbacks  # type: ignore[attr-defined]
            if callable(taker := getattr(callback, "on_rollout_progress", None))
        ]
        shown = [taker(text, done, total) for taker in takers]
        if not any(shown) and now - self._told >= _SECONDS:
            logger.info(text)
            self._told = now
        if done >= total:
            self._told = now


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
