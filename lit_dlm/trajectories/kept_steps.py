"""Which steps of a decode keep their features: one at random in every stratum of steps.

The number of steps is not known beforehand (a threshold policy ends when it ends), so steps cannot
be drawn from the whole decode. Stratum ``j`` covers the steps from ``ceil(j / ratio)`` up to the
start of the next one, and a hash of (sample seed, ``j``) picks one of them. So every step is kept
with probability about ``ratio``, time is covered evenly, and the choice depends on nothing but the
sample's seed: neither on its batch nor on how long it decodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lit_dlm.ops.noise import uniform_noise

_STREAM = 17  # apart from the draws of samplers and policies
_STRATA = 256  # planned at a time


class KeptSteps:
    """The plan of a batch: for each step, the rows that keep it."""

    def __init__(self, seeds: Sequence[int], *, ratio: float) -> None:
        """Starts a plan.

        Args:
            seeds: one seed per row, as int64.
            ratio: fraction of steps to keep, in (0, 1].
        """
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"step_ratio: expected a number in (0, 1], got {ratio}")
        self.ratio = ratio
        self._seeds = torch.tensor(list(seeds), dtype=torch.int64)
        self._planned = 0
        self._rows: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """The rows that keep ``step``, ascending."""
        while step >= self._start(self._planned):
            self._plan()
        return self._rows.get(step, [])

    def steps(self, row: int, num_steps: int) -> list[int]:
        """The steps below ``num_steps`` that ``row`` keeps, ascending."""
        return [step for step in range(num_steps) if row in self.rows(step)]

    def _start(self, stratum: int) -> int:
        return math.ceil(stratum / self.ratio)

    def _plan(self) -> None:
        strata = torch.arange(self._planned, self._planned + _STRATA)
        starts = [self._start(j) for j in range(self._planned, self._planned + _STRATA + 1)]
        draws = uniform_noise(self._seeds, 0, strata.expand(len(self._seeds), -1), stream=_STREAM)
        first = torch.tensor(starts[:-1])
        width = torch.tensor(starts[1:]) - first
        chosen = first + (draws * width).long()
        for row, steps in enumerate(chosen.tolist()):
            for step in steps:
                self._rows.setdefault(step, []).append(row)
        self._planned += _STRATA
