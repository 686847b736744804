"""How far each region of a response is filled after every step, and how evenly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dlm.decoding.state import DecodeResult, DecodeState, StepRecord


@dataclass(frozen=True, eq=False)
class FillCurves:
    """The fill of one response over the steps of its decode."""

    # Regions that had cells to fill, in their order; the rest only if it had some
    names: tuple[str, ...]
    # (T + 1, R) float64: filled share of each region's cells before step 0, 1, ... and at the
    # end. Given cells, such as a template's markers, do not count
    share: Tensor

    def by_name(self) -> dict[str, list[float]]:
        columns = self.share.T.tolist()
        return {
            name: [round(value, 3) for value in column]
            for name, column in zip(self.names, columns, strict=True)
        }

    def lockstep_score(self) -> float:
        """One minus the gap between the fullest and the emptiest region, averaged over the steps.

        For two regions the value after a step is ``1 - |R - A|``, the score that the Dream-7B
        Lockstep R/A release takes once. With fewer than two regions or without a step, the score
        is 1.
        """
        after = self.share[1:]
        if self.share.shape[1] < 2 or not len(after):
            return 1.0
        return float((1.0 - (after.amax(1) - after.amin(1))).mean())


def fill_curves(masked: Tensor, regions: Tensor, names: tuple[str, ...]) -> FillCurves:
    """Returns curves from ``(T + 1, G)`` masks and ``(G,)`` region indices of ``PlacedRegions``."""
    return _curves(masked.long() @ torch.nn.functional.one_hot(regions, len(names)), names)


def _curves(left: Tensor, names: tuple[str, ...]) -> FillCurves:
    """Returns curves from the ``(T + 1, R)`` int64 numbers of masks left in each region."""
    kept = [number for number, total in enumerate(left[0].tolist()) if total]
    share = 1.0 - left[:, kept].double() / left[0, kept]
    return FillCurves(tuple(names[number] for number in kept), share)


class RegionFill:
    """Observer that follows the fill of a layout's regions; no step waits for the device."""

    requires: frozenset[str] = frozenset()

    def on_start(self, state: DecodeState) -> None:
        assert state.regions is not None
        self._names = tuple(rule.name for rule in state.regions.rules)
        self._last = state.regions.counts(state.masked)  # (B, R), by slot
        self._left: list[Tensor] = []
        self._ended: list[tuple[Tensor, int, int, int]] = []
        self._begun = {slot: (first, 0) for slot, first in enumerate(self._last)}

    def on_step(self, record: StepRecord) -> None:
        state = record.state
        assert state.regions is not None
        masked = state.editable & (record.new_ids == state.mask_id)
        # Kept on the device for all steps: a transfer for each would make the step wait.
        self._last = self._last.index_copy(0, state.rows, state.regions.counts(masked))
        self._left.append(self._last)

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        self.on_end(result)
        assert state.regions is not None
        counts = state.regions.counts(state.masked)
        for slot, first in zip(state.rows.tolist(), counts, strict=True):
            self._begun[slot] = (first, len(self._left))

    def on_end(self, result: DecodeResult) -> None:
        for slot, num_steps in zip(result.rows, result.num_steps.tolist(), strict=True):
            first, begin = self._begun[slot]
            self._ended.append((first, slot, begin, num_steps))

    def curves(self) -> list[FillCurves]:
        """Returns the curves of the rows that have ended since the last call."""
        ended, self._ended = self._ended, []
        left = torch.stack(self._left or [self._last]).cpu()  # (T, B, R)
        firsts = torch.stack([first for first, _, _, _ in ended]).cpu()
        return [
            _curves(torch.cat([first[None], left[begin : begin + num_steps, slot]]), self._names)
            for first, (_, slot, begin, num_steps) in zip(firsts, ended, strict=True)
        ]
