"""WINO: drafts many tokens and verifies written ones in the same forward (arXiv 2507.18578)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone, Denoised
from lit_dlm.backbones.visibility import position_ids_for
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.system.options import within
from lit_dlm.tensors.sampling import top_quota

_SHARE, _LEAST, _MOST = 0.7, 5, 20
"""A step drafts at most this share of the masks of the window, within these bounds: a rule of the
release that the paper does not mention."""


class WINOPolicy(CommitPolicy):
    """Wide in, narrow out: a low threshold drafts tokens, a high one takes doubtful ones back.

    The canvas is followed by a shadow of every cell of the window: a mask at the cell's position
    that sees the canvas without that cell, and all shadows; the canvas sees no shadow. So one
    forward proposes tokens for masks and says how probable each written token is when it is hidden.
    A step takes back fewer tokens than the previous step wrote, the least probable ones, and none
    if it writes only one; so a window of ``n`` masks is full within ``n`` steps.
    """

    requires = frozenset({"window"})
    takes_back = True
    takes_quota = False

    def __init__(self, threshold: float = 0.6, *, threshold_back: float = 0.9) -> None:
        """Sets the probabilities above which tokens are drafted, and below which taken back.

        The defaults are those of the release (tau 1 and tau 2 in the paper).
        """
        within("[0, 1]", threshold=threshold, threshold_back=threshold_back)
        self.threshold = threshold
        self.threshold_back = threshold_back

    def check_backbone(self, backbone: Backbone) -> None:
        spec = backbone.spec
        if spec.attention != "full" or spec.shift:
            raise ValueError(
                "policy: WINOPolicy is for models with full attention and without a right shift, "
                f"got {spec.family} with {spec.attention} attention and shift {spec.shift}"
            )

    def denoise(
        self,
        backbone: Backbone,
        state: DecodeState,
        columns: Tensor,
        hidden_layers: tuple[int, ...],
    ) -> Denoised:
        """Runs the forward with shadows; entries of written cells are those of their shadows."""
        window, (b, L) = state.window, state.ids.shape
        assert window is not None
        K = window.shape[1]
        cells = torch.arange(L, device=window.device)
        real = torch.ones_like(state.masked) if state.pad_mask is None else state.pad_mask
        visible = torch.zeros(b, L + K, L + K, dtype=torch.bool, device=window.device)
        visible[:, :, :L] = real[:, None]
        visible[:, L:, :L] &= window[:, :, None] != cells
        # A window that is cut short repeats its last column: only one shadow per cell is seen.
        visible[:, L:, L:] = window.diff(dim=1, prepend=window[:, :1] - 1)[:, None] != 0
        places = position_ids_for(real, backbone.spec.positions)
        # For each column its own row, or that of its shadow if it is written.
        numbers = torch.arange(K, device=window.device).expand_as(window)
        shadows = torch.zeros_like(state.ids)
        shadows = shadows.scatter_reduce(1, window, numbers, "amin", include_self=False)
        rows = torch.where(state.standing, shadows + L, cells)
        denoised = backbone.denoise(
            torch.cat([state.ids, torch.full_like(window, state.mask_id)], 1),
            pad_mask=visible[:, None],
            position_ids=torch.cat([places, places.gather(1, window)], 1),
            columns=rows.gather(1, columns),
            hidden_layers=hidden_layers,
        )
        hidden = None if denoised.hidden is None else denoised.hidden[:, :L]
        return Denoised(logits=denoised.logits, columns=columns, hidden=hidden)

    def new_memory(self, state: DecodeState, vocab_size: int, dtype: torch.dtype) -> Tensor:
        length = state.ids.shape[1] - state.start
        return torch.zeros(len(state.ids), length, device=state.ids.device)

    def remember(
        self, state: DecodeState, candidates: Tensor, denoised: Denoised
    ) -> tuple[DecodeState, Denoised]:
        """Stores how probable the written tokens are: ``(b, G)`` float32."""
        columns = denoised.columns
        tokens = state.ids.gather(1, columns)[..., None]
        prob = denoised.logits.float().softmax(-1).gather(-1, tokens)[..., 0]
        memory = torch.zeros(state.ids.shape, device=columns.device).scatter(1, columns, prob)
        return replace(state, memory=memory[:, state.start :]), denoised

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        assert state.memory is not None
        prob, standing = proposal.prob, state.standing
        most = (_SHARE * candidates.sum(1)).long().clamp(_LEAST, _MOST)
        draft = top_quota(prob, candidates & (prob > self.threshold), most)
        best = top_quota(prob, candidates, 1)
        commit = torch.where(draft.any(1, keepdim=True), draft, best)
        backing = torch.nn.functional.pad(state.memory, (state.start, 0))
        doubted = standing & (backing < self.threshold_back)
        # Before its first step a row has written nothing: what stands was given to it.
        is_first = (state.step == 0)[:, None]
        before = torch.where(is_first, standing, state.written & ~state.masked)
        # Fewer than the step before wrote, and none beside a single commit: so the window fills.
        fewer = (before.sum(1) - 1).clamp_min(0) * (commit.sum(1) > 1)
        back = top_quota(-backing, doubted, fewer)
        return Selection(
            commit,
            torch.where(standing, backing - self.threshold_back, prob),
            rewritten=state.ids.masked_fill(back, state.mask_id),
        )
