"""ReMDM: masks come back while a response is nearly full (arXiv 2503.00307)."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.system.options import at_least, within
from lit_dlm.tensors.sampling import top_quota


class ReMDMPolicy(CommitPolicy):
    """Confidence order with ReMDM's loop, in the form that its authors gave LLaDA.

    Each step commits the most probable proposals of its quota until a share of the block is written
    (``alpha(t_on)`` of ReMDM-loop); then, for some steps, as many tokens are taken back as the next
    step writes, so that the share stays (``alpha_s = alpha_t``); then the rest is written. The
    tokens taken back are those least probable when they were written; as in the release, nothing is
    drawn. A token that is taken back in the step that would have written it is not written at all.

    Args:
        remasked: tokens that a step of the loop takes back; the release uses 1 and 4.
        loop_steps: steps of the loop in every block; in the release as many as without a loop.
        loop_from: share of a block that is written during the loop.
    """

    needs_quota = True
    takes_back = True

    def __init__(
        self, remasked: int = 1, *, loop_steps: int = 32, loop_from: float = 0.875
    ) -> None:
        at_least(1, remasked=remasked, loop_steps=loop_steps)
        within("[0, 1]", loop_from=loop_from)
        self.remasked = remasked
        self.loop_steps = loop_steps
        self.loop_from = loop_from

    def budget(self, num_masks: int) -> int:
        # Every mask may be a block of its own, with a loop.
        return num_masks * (1 + self.loop_steps)

    def new_memory(self, state: DecodeState, vocab_size: int, dtype: torch.dtype) -> Tensor:
        cells = 1 + state.ids.shape[1] - state.start
        return torch.zeros(len(state.ids), cells, dtype=dtype, device=state.ids.device)

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Selects; memory ``(b, G + 1)`` has probabilities when written, then the loop's steps."""
        assert quota is not None
        pad, memory = (state.start, 0), state.memory
        assert memory is not None
        written, looped = torch.nn.functional.pad(memory[:, :-1], pad), memory[:, -1].long()
        looped = looped.masked_fill(state.block_step == 0, 0)
        was_in = (looped > 0) & (looped <= self.loop_steps)
        # After the loop a schedule's steps are over, while some blocks still have masks.
        counts = torch.where(was_in, self.remasked, quota.clamp_min(1))
        commit = top_quota(proposal.prob, candidates, counts)
        # Tokens leave by the probability with which they were written: that of a token which the
        # model sees says little about it.
        written = torch.where(state.masked, proposal.prob, written)
        # The loop begins after the step that reaches its share.
        kept = (self.loop_from * state.block_masks).long()
        left = (state.masked & state.inside).sum(1) - commit.sum(1)  # a gate hides candidates
        begins = (looped == 0) & (left <= state.block_masks - kept)
        looped = looped + ((looped > 0) | begins)
        is_in = (looped > 0) & (looped <= self.loop_steps)
        standing = state.standing
        # What this step writes may itself be the least probable: then it stays a mask.
        back = top_quota(-written, standing | commit, self.remasked * is_in)
        boundary = written.masked_fill(~back, -torch.inf).amax(1, keepdim=True)
        return Selection(
            commit & ~back,
            torch.where(standing, written - boundary.clamp_min(0.0), proposal.prob),
            rewritten=state.ids.masked_fill(back & standing, state.mask_id),
            memory=torch.cat([written[:, state.start :], looped[:, None].to(written)], 1),
        )
