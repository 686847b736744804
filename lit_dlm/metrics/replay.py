"""What a policy would do on stored states: wrong commits and implied steps of a decode."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


def f_beta(precision: Tensor, recall: Tensor, beta: float) -> Tensor:
    """``(1 + b^2) P R / (b^2 P + R)``, elementwise in the shape of both, 0 where both are 0."""
    square = beta**2
    denominator = square * precision + recall
    value = (1 + square) * precision * recall / denominator.clamp_min(1e-30)
    return torch.where(denominator > 0, value, torch.zeros_like(value))


class ReplayScore(Metric):
    """False commits and implied steps, from the commits that a policy makes on stored states.

    A state in which a policy commits ``c`` tokens, ``f`` of them wrong, costs ``1 / c`` steps and
    ``f / c`` wrong tokens per token written. Both are averaged over bins of the masked share of the
    response, each bin alike, because a decode passes through all of them whatever the stored
    states are; the number of tokens then turns them into counts per trace. It is an estimate: the
    states are those of the stored traces and not those that the policy's own commits lead to.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    states: Tensor
    steps_per_token: Tensor
    false_per_token: Tensor
    num_tokens: Tensor

    def __init__(self, *, num_bins: int = 16, beta: float = 0.5) -> None:
        """Sets the rule.

        Args:
            num_bins: bins of the masked share.
            beta: weight of saved steps against right commits in the score.
        """
        super().__init__()
        if num_bins < 1:
            raise ValueError(f"num_bins: expected at least 1, got {num_bins}")
        if beta <= 0.0:
            raise ValueError(f"beta: expected a positive number, got {beta}")
        self.num_bins = num_bins
        self.beta = beta
        for name in ("states", "steps_per_token", "false_per_token"):
            zeros = torch.zeros(num_bins, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")
        zero = torch.tensor(0.0, dtype=torch.float64)
        self.add_state("num_tokens", zero, dist_reduce_fx="sum")

    def update(self, commit: Tensor, label: Tensor, masked: Tensor, length: Tensor) -> None:
        """Adds states.

        Args:
            commit: ``(B, R)`` bool: what the policy commits; rows without a commit do not count.
            label: ``(B, R)`` bool: the proposal is the trace's final token.
            masked: ``(B, R)`` bool: masked positions.
            length: ``(B,)`` response positions of each row.
        """
        num_commits = commit.sum(1)
        chosen = num_commits > 0
        num_commits = num_commits[chosen].double()
        num_false = (commit & ~label).sum(1)[chosen].double()
        length = length[chosen]
        share = masked.sum(1)[chosen] / length.clamp_min(1)
        # A share of 1 / num_bins is the upper end of the first bin.
        bins = ((share * self.num_bins).ceil().long() - 1).clamp(0, self.num_bins - 1)
        self.states.index_add_(0, bins, torch.ones_like(num_commits))
        self.steps_per_token.index_add_(0, bins, 1.0 / num_commits)
        self.false_per_token.index_add_(0, bins, num_false / num_commits)
        self.num_tokens += length.double().sum()

    def compute(self) -> dict[str, Tensor]:
        """Scalars over everything seen.

        Returns:
            ``steps`` and ``false_commits`` per trace, ``speedup`` over one token per step,
            ``false_rate`` (wrong share of the commits), and ``score``: F-beta of ``1 - false_rate``
            and of the saved share of the steps. All 0 without data.
        """
        seen = self.states > 0
        count = self.states.clamp_min(1)
        num_seen = seen.sum().clamp_min(1)
        steps_ratio = (self.steps_per_token / count)[seen].sum() / num_seen
        false_rate = (self.false_per_token / count)[seen].sum() / num_seen
        length = self.num_tokens / self.states.sum().clamp_min(1)
        saved = torch.where(seen.any(), 1.0 - steps_ratio, 0.0)
        right = torch.where(seen.any(), 1.0 - false_rate, 0.0)
        return {
            "score": f_beta(right, saved, self.beta).float(),
            "steps": (length * steps_ratio).float(),
            "speedup": torch.where(seen.any(), 1.0 / steps_ratio.clamp_min(1e-12), 0.0).float(),
            "false_commits": (length * false_rate).float(),
            "false_rate": false_rate.float(),
        }
