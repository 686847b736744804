"""A commit policy that takes tokens back: it doubts what it committed, and tries again.

In the folder of this file, these lines are a decode file for ``lit-dlm generate --config FILE``::

    policy: {class_path: taking_back.SecondThoughts, init_args: {every: 4}}
    quota: NoQuota
"""

from __future__ import annotations

from torch import Tensor

from lit_dlm.decoding import DecodeState, Proposal, Selection


class SecondThoughts:
    """Commits the surest proposal, and every few steps removes a token that the model would change.

    Args:
        every: period of second thoughts in steps, at least 2.
    """

    takes_back = True
    graph_safe = True  # nothing in select asks for the value of a tensor
    requires = frozenset({"window"})  # proposals also for cells that hold a token

    def __init__(self, every: int = 4) -> None:
        self.every = every

    def budget(self, num_masks: int) -> int:
        """Returns the most steps of a row: every ``every``-th step may gain nothing."""
        return 2 * num_masks * self.every

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        due = (state.step % self.every == self.every - 1)[:, None]
        changed = state.standing & due & (proposal.ids != state.ids)
        undone = surest(proposal.prob, changed)
        return Selection(
            commit=surest(proposal.prob, candidates),
            scores=proposal.prob,
            rewritten=state.ids.masked_fill(undone, state.mask_id),
        )


def surest(scores: Tensor, allowed: Tensor) -> Tensor:
    """Returns ``(b, L)`` bool: each row's best allowed cell; ties go to the left, in any batch."""
    best = scores.masked_fill(~allowed, -1.0).argmax(1, keepdim=True)
    return allowed & allowed.new_zeros(allowed.shape).scatter(1, best, True)
