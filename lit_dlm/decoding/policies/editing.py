"""Token editing: written tokens are replaced in place (LLaDA2.1, arXiv 2602.08676)."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.system.options import at_least, within
from lit_dlm.tensors.sampling import top_quota


class TokenEditingPolicy(CommitPolicy):
    """Applies one threshold to masks (M2T) and one to written tokens (T2T), in every step.

    Masks whose proposal is above ``threshold`` are written, or the most probable one if none is; a
    token of the block is replaced if another token is the most probable and above
    ``edit_threshold``. A full block gets further steps, which only edit, until one edits nothing,
    at most ``max_post_steps``; so a block of ``n`` masks takes at most ``n + max_post_steps``
    steps.
    """

    takes_back = True
    takes_quota = False
    requires = frozenset({"window"})

    def __init__(
        self, threshold: float = 0.7, *, edit_threshold: float = 0.5, max_post_steps: int = 16
    ) -> None:
        """Sets the rule; the defaults are those of Diffusers' pipeline, SGLang has 0.5 and 0."""
        within("[0, 1]", threshold=threshold, edit_threshold=edit_threshold)
        at_least(0, max_post_steps=max_post_steps)
        self.threshold = threshold
        self.edit_threshold = edit_threshold
        self.max_post_steps = max_post_steps

    def budget(self, num_masks: int) -> int:
        # Every mask may be a block of its own.
        return num_masks * (1 + self.max_post_steps)

    def check_backbone(self, backbone: Backbone) -> None:
        """Refuses models not trained on wrong tokens: their view of a token is worth nothing."""
        if not backbone.spec.edits_tokens:
            raise ValueError(
                "policy: TokenEditingPolicy replaces tokens that stand, which "
                f"{backbone.spec.family} was not trained for; expected a model with "
                "spec.edits_tokens, such as LLaDA2.1 (spec_overrides says it of your own)"
            )

    def new_memory(self, state: DecodeState, vocab_size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(state.ids), 1, dtype=dtype, device=state.ids.device)

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Selects; the memory ``(b, 1)`` holds how many steps found the block full."""
        prob, standing = proposal.prob, state.standing
        sure = candidates & (prob > self.threshold)
        best = top_quota(prob, candidates, 1)
        commit = torch.where(sure.any(1, keepdim=True), sure, best)
        differs = standing & (proposal.ids != state.ids)
        edit = differs & (prob > self.edit_threshold)
        is_full = ~candidates.any(1)
        assert state.memory is not None
        # Back to 0 in a block with masks, which is the next one.
        steps = (state.memory + 1.0) * is_full[:, None]
        goes_on = (~is_full | edit.any(1)) & (steps[:, 0] < self.max_post_steps)
        # For verification: how far a token is from being replaced. One that the model proposes
        # again is kept, however probable it is.
        missing = self.edit_threshold - prob
        missing = torch.where(differs, missing, missing.clamp_min(0.0))
        return Selection(
            commit,
            torch.where(standing, missing, prob),
            rewritten=torch.where(edit, proposal.ids, state.ids),
            keep_block_open=goes_on,
            memory=steps,
        )
