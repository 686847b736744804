"""A commit policy that takes tokens back: doubt of what stands, and another try.

In the folder of this file::

    policy: {class_path: taking_back.SecondThoughts, init_args: {every: 4}}
    quota: NoQuota

as a decode file for ``lit-dlm generate --config``.
"""

from __future__ import annotations

from torch import Tensor

from lit_dlm.decoding import DecodeState, Proposal, Selection


class SecondThoughts:
    """Writes the surest proposal; every few steps one token that the model would change goes.

    Args:
        every: steps from one second thought to the next, at least 2.
    """

    takes_back = True
    requires = frozenset({"window"})  # proposals for cells that hold a token, too

    def __init__(self, every: int = 4) -> None:
        self.every = every

    def budget(self, num_masks: int) -> int:
        """Every ``every``-th step writes nothing in the end."""
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
    """``(b, L)`` bool: the best allowed cell of each row; of equals the leftmost, in any batch."""
    best = scores.masked_fill(~allowed, -1.0).argmax(1, keepdim=True)
    return allowed & allowed.new_zeros(allowed.shape).scatter(1, best, True)
