"""A commit policy as somebody outside of the package would write it."""

import torch
from torch import Tensor

from lit_dlm.decoding import DecodeState, Proposal, Selection


class AlternatePolicy:
    """Commits the leftmost candidate on even steps and the rightmost on odd ones."""

    requires: frozenset[str] = frozenset()
    forwards_per_step = 0

    def __init__(self, first: int = 0) -> None:
        """Begins on the left with 0, on the right with 1."""
        self.first = first

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """One candidate per row."""
        columns = torch.arange(candidates.shape[1], device=candidates.device).float()
        from_right = ((state.step + self.first) % 2).bool()[:, None]
        scores = torch.where(from_right, columns, -columns)
        scores = scores.masked_fill(~candidates, -torch.inf)
        commit = torch.zeros_like(candidates)
        return Selection(commit.scatter(1, scores.argmax(1, keepdim=True), True), scores)
