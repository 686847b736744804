"""Policies that remember earlier steps: stable distributions, credit for earlier proposals.

Their memory is in ``state.memory``, so that it moves with its rows, and verification, which goes
through the steps of a record in order, decides with the same memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lit_dlm.backbones.base import Denoised
from lit_dlm.decoding.policies.base import CommitPolicy, ThresholdPolicy
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.system.options import at_least, within
from lit_dlm.tensors.sampling import top_quota


class KLASSPolicy(CommitPolicy):
    """Commits confident candidates whose distributions have settled (KLASS, arXiv 2511.05664).

    A candidate is ready if its probability is above the threshold and the KL divergence of its
    distribution from that of the previous step was under ``max_kl`` in each of the last ``history``
    steps; step 0 has none. As in the release, steps before a cell's own block count, but no cell is
    ready before step ``history - 1`` of its block. A row in which none is ready is left to the
    stall rule; with a quota, ready candidates come first, the most probable others fill it up.
    """

    requires = frozenset({"region"})

    def __init__(self, threshold: float = 0.9, *, max_kl: float = 0.01, history: int = 2) -> None:
        """Sets the rule; ``max_kl`` is in nats."""
        within("[0, 1]", threshold=threshold)
        within("(0, inf)", max_kl=max_kl)
        at_least(1, history=history)
        self.threshold = threshold
        self.max_kl = max_kl
        self.history = history

    def new_memory(self, state: DecodeState, vocab_size: int, dtype: torch.dtype) -> Tensor:
        b, G = len(state.ids), state.ids.shape[1] - state.start
        return torch.zeros(b, G, vocab_size + self.history, device=state.ids.device)

    def remember(
        self, state: DecodeState, candidates: Tensor, denoised: Denoised
    ) -> tuple[DecodeState, Denoised]:
        """Stores distributions and the last divergences: ``(b, G, V + history)`` float32."""
        probs = denoised.logits.float().softmax(-1)  # (b, G, V): see requires
        assert state.memory is not None
        before, kls = state.memory.split([probs.shape[2], self.history], -1)
        # From the zeros of a new row it is some 20 nats, so that the row has to wait.
        kl = (probs * ((probs + 1e-12).log() - (before + 1e-12).log())).sum(-1, keepdim=True)
        memory = torch.cat([probs, kls[..., 1:], kl], -1)
        return replace(state, memory=memory), denoised

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        assert state.memory is not None
        worst = state.memory[..., -self.history :].amax(-1)  # (b, G)
        spare = self.max_kl - torch.nn.functional.pad(worst, (state.start, 0))
        has_settled = (spare > 0.0) & (state.block_step >= self.history - 1)[:, None]
        prob = proposal.prob
        ready = candidates & has_settled & (prob > self.threshold)
        commit = ready
        if quota is not None:
            commit = ready | top_quota(prob.double() + 2.0 * ready, candidates, quota)
        # Above the threshold where ready, by the smaller margin of the two rules.
        scores = torch.minimum(prob, self.threshold + spare)
        return Selection(commit, torch.where(ready.any(1, keepdim=True), scores, prob))


class CreditPolicy(ThresholdPolicy):
    """A threshold on logits to which credit was added (CreditDecoding, arXiv 2510.06133).

    In every step, all credit of a candidate is multiplied by ``beta``, then its most probable token
    gains its probability to the power of ``gamma``. Tokens are proposed and scored by the logits
    plus ``alpha log(1 + credit)``, so a token that was proposed repeatedly can be committed sooner,
    even if another one is now more probable. Cells outside the window have no credit, so every
    block starts anew. Rule and values are those of the authors' dInfer (arXiv 2510.08666).
    """

    def __init__(
        self, threshold: float = 0.9, *, alpha: float = 0.7, beta: float = 0.8, gamma: float = 0.2
    ) -> None:
        """Sets the threshold, and how much credit weighs, lasts and follows probability."""
        super().__init__(threshold)
        at_least(0, alpha=alpha, gamma=gamma)
        within("[0, 1]", beta=beta)
        self.alpha = alpha
        self.beta = beta
        self.gamma = gamma

    def new_memory(self, state: DecodeState, vocab_size: int, dtype: torch.dtype) -> Tensor:
        cells = 1 + state.ids.shape[1] - state.start
        return torch.zeros(len(state.ids), cells, vocab_size, device=state.ids.device)

    def remember(
        self, state: DecodeState, candidates: Tensor, denoised: Denoised
    ) -> tuple[DecodeState, Denoised]:
        """Stores the credit of every token: ``(b, 1 + G, V)`` float32, entry 0 for prompt cells."""
        logits, columns, memory = denoised.logits.float(), denoised.columns, state.memory
        assert memory is not None
        # One entry in front takes all columns of prompts, which a window may begin with.
        row = torch.arange(len(columns), device=columns.device)[:, None]
        cell = (columns - state.start + 1).clamp_min(0)
        prob, token = logits.softmax(-1).max(-1, keepdim=True)
        credit = (self.beta * memory[row, cell]).scatter_add_(2, token, prob**self.gamma)
        credit = credit.masked_fill(~candidates.gather(1, columns)[..., None], 0.0)
        memory = memory.index_put((row, cell), credit)
        fused = replace(denoised, logits=logits + self.alpha * credit.log1p())
        return replace(state, memory=memory), fused
