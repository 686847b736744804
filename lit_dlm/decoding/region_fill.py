"""How far each region of a response is filled after every step, and how evenly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dlm.decoding.regions import RegionMap
from lit_dlm.decoding.state import DecodeResult, DecodeState, StepRecord


@dataclass(frozen=True, eq=False)
class FillCurves:
    """The fill of one response over the steps of its decode."""

    names: tuple[str, ...]
    """Regions that had cells to fill, in their order; the rest only where it had some."""
    share: Tensor
    """``(T + 1, R)`` float64: filled share of each region's cells before step 0, 1, ... and at the
    end. Given cells, such as a template's markers, do not count."""

    def by_name(self, digits: int = 3) -> dict[str, list[float]]:
        """The curves as rounded numbers, for results."""
        columns = self.share.T.tolist()
        return {
            name: [round(value, digits) for value in column]
            for name, column in zip(self.names, columns, strict=True)
        }

    def lockstep_score(self) -> float:
        """How closely the regions kept step, see :func:`lockstep_score`."""
        return lockstep_score(self.share)


def lockstep_score(share: Tensor) -> float:
    """One minus the gap between the fullest and the emptiest region, averaged over the steps.

    For two regions the value after a step is ``1 - |R - A|``, the score of the Dream-7B Lockstep
    R/A release. There it is taken once; after the last step of a finished decode it is always 1.

    Args:
        share: ``(T + 1, R)`` filled shares before each step and at the end.

    Returns:
        0 to 1; 1 with fewer than two regions or without a step.
    """
    if share.shape[1] < 2 or len(share) < 2:
        return 1.0
    after = share[1:]
    return float((1.0 - (after.amax(1) - after.amin(1))).mean())


def fill_curves(masked: Tensor, regions: Tensor, names: tuple[str, ...]) -> FillCurves:
    """Curves from the masks of every step.

    Args:
        masked: ``(T + 1, G)`` bool: cells to fill before step 0, 1, ... and at the end.
        regions: ``(G,)`` int64 region of each cell, as ``BlockLayout.region_ids`` numbers them.
        names: of all regions, the rest's last.

    Returns:
        The curves of the regions that had cells to fill.
    """
    zeros = torch.zeros(len(masked), len(names), dtype=torch.long)
    left = zeros.scatter_add_(1, regions.expand(len(masked), -1), masked.long())
    return _curves(left, names)


def _curves(left: Tensor, names: tuple[str, ...]) -> FillCurves:
    """Curves from ``(T + 1, R)`` int64 masks that are left in each region."""
    kept = [number for number, total in enumerate(left[0].tolist()) if total]
    share = 1.0 - left[:, kept].double() / left[0, kept]
    return FillCurves(tuple(names[number] for number in kept), share)


class RegionFill:
    """Observer that follows the fill of every region; nothing waits for the device before the end.

    Needs a decode with a layout.
    """

    requires: frozenset[str] = frozenset()

    def __init__(self) -> None:
        """Starts empty."""
        self._regions: RegionMap | None = None
        self._left: list[tuple[Tensor, Tensor]] = []
        self._curves: list[FillCurves] = []

    def on_start(self, state: DecodeState) -> None:
        """Counts the masks of every region.

        Raises:
            ValueError: the decode has no layout.
        """
        if state.regions is None:
            raise ValueError("layout: RegionFill needs a decode with one, got none")
        self._regions, self._curves = state.regions, []
        self._left = [(state.rows, state.regions.counts(state.masked))]

    def on_step(self, record: StepRecord) -> None:
        """Counts them again."""
        state = record.state
        assert state.regions is not None
        masked = state.editable & (record.new_ids == state.mask_id)
        self._left.append((state.rows, state.regions.counts(masked)))

    def on_end(self, result: DecodeResult) -> None:
        """Makes one set of curves per row of the starting canvas."""
        assert self._regions is not None
        names = tuple(rule.name for rule in self._regions.rules)
        left = torch.stack([self._left[0][1]] * len(self._left))  # (T + 1, B, R)
        for step, (rows, counts) in enumerate(self._left[1:], start=1):
            left[step].index_copy_(0, rows, counts)
        left = left.cpu()
        steps = result.num_steps.tolist()
        self._curves = [_curves(left[: count + 1, row], names) for row, count in enumerate(steps)]
        self._regions, self._left = None, []

    def curves(self) -> list[FillCurves]:
        """The curves of the last decode, one per row of its canvas.

        Raises:
            ValueError: no decode has ended yet.
        """
        if not self._curves:
            raise ValueError("RegionFill: no decode has ended yet")
        return self._curves
