"""The Trajectory Discrimination Score of decodes (TABOM, arXiv:2605.11854).

At every step it is the population variance of the predictive entropies of positions still masked,
excluding those after the first end of text already written, averaged over the decodes that have at
least two such positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_dlm.decoding.state import DecodeResult, DecodeState, StepRecord
from lit_dlm.ops.sampling import entropy_variance


@dataclass
class DiscriminationObserver:
    """Sums the variance of entropies over the rows of every step; watches any number of decodes."""

    requires: frozenset[str] = frozenset({"raw_entropy", "region"})
    """Entropies of the whole response, also outside the decoder's window, under the model's own
    distribution, whatever the sampler scores."""
    sums: list[Tensor] = field(default_factory=list)  # Scalar sum of variances of each step
    counts: list[Tensor] = field(default_factory=list)
    """Scalar number of rows that were averaged in each step."""

    def on_start(self, state: DecodeState) -> None:
        """Restarts the count of steps."""
        self._step = 0

    def on_step(self, record: StepRecord) -> None:
        """Adds one step of a batch."""
        state, entropy = record.state, record.proposal.raw_entropy
        assert entropy is not None
        is_end = state.editable & torch.isin(state.ids, state.eos_ids)
        behind_end = is_end.cumsum(1) > 0
        variance, counts = entropy_variance(entropy, state.masked & ~behind_end)
        step, self._step = self._step, self._step + 1
        if step == len(self.sums):
            zero = torch.zeros((), dtype=torch.float32, device=variance.device)
            self.sums.append(zero)
            self.counts.append(zero.long())
        self.sums[step] = self.sums[step] + variance.float().sum()
        self.counts[step] = self.counts[step] + counts.sum()

    def on_end(self, result: DecodeResult) -> None:
        """Does nothing."""

    def totals(self) -> tuple[Tensor, Tensor]:
        """``(T,)`` float64 sums and int64 counts, on the CPU."""
        if not self.sums:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
        return torch.stack(self.sums).double().cpu(), torch.stack(self.counts).cpu()


def score_curve(sums: Tensor, counts: Tensor) -> tuple[float, list[float]]:
    """Returns the score and its curve over steps.

    Args:
        sums: ``(T,)`` floating point sums of variances.
        counts: ``(T,)`` rows in each step.

    Returns:
        The mean over all steps that count, and the mean of each step (0 where none counts).
    """
    curve = sums / counts.clamp_min(1)
    counted = counts > 0
    score = float(curve[counted].mean()) if bool(counted.any()) else 0.0
    return score, curve.tolist()
