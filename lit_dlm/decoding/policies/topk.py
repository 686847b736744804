"""Policies that commit the best-scored candidates, as many as the quota says."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.ops.noise import uniform_noise
from lit_dlm.ops.options import at_least
from lit_dlm.ops.scores import top_quota


class TopQuotaPolicy(CommitPolicy):
    """Commits the ``quota`` best candidates; subclasses say what "best" means."""

    needs_quota = True

    @abstractmethod
    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        """``(b, L)`` floating point, higher is committed first."""

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        assert quota is not None
        scores = self.score(state, proposal)
        return Selection(top_quota(scores, candidates, quota), scores)


class RandomPolicy(TopQuotaPolicy):
    """Uniformly random order, seeded per sample."""

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        return uniform_noise(state.seeds, state.step, state.positions, stream=1)


class ConfidencePolicy(TopQuotaPolicy):
    """Highest probability of the proposed token first (MaskGIT, arXiv 2202.04200; LLaDA)."""

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        return proposal.prob


class NoisyConfidencePolicy(TopQuotaPolicy):
    """Highest log-probability first, with Gumbel noise that dies down (MaskGIT, arXiv 2202.04200).

    As in the release of MMaDA, each step multiplies the temperature that is left by
    ``1 - (s + 1) / S``, so the noise is gone sooner than by MaskGIT's own ``1 - s / S``.
    """

    def __init__(self, steps: int, temperature: float = 1.0) -> None:
        """Sets the steps of the decode and the factor of the noise before the first of them."""
        at_least(1, steps=steps)
        at_least(0, temperature=temperature)
        self.steps = steps
        self.temperature = temperature
        shares = 1.0 - torch.arange(1, steps + 1, dtype=torch.float64) / steps
        self._left = temperature * shares.cumprod(0)

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        uniform = uniform_noise(state.seeds, state.step, state.positions, stream=1)
        step = state.block_step.clamp_max(self.steps - 1)
        left = self._left.to(step.device, non_blocking=True)[step][:, None]
        return proposal.prob.clamp_min(1e-20).log() - left * uniform.log().neg().log()


class EntropyPolicy(TopQuotaPolicy):
    """Lowest entropy first (Dream's ``entropy`` order)."""

    requires = frozenset({"entropy"})

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        assert proposal.entropy is not None
        return -proposal.entropy


class MarginPolicy(TopQuotaPolicy):
    """Largest gap between the two best tokens first (arXiv 2502.06768)."""

    requires = frozenset({"margin"})

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        assert proposal.margin is not None
        return proposal.margin


class SequentialPolicy(TopQuotaPolicy):
    """Leftmost mask first (``sequential`` in dLLM-RL's block sampler)."""

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        columns = torch.arange(state.ids.shape[1], device=state.ids.device)
        return -columns.to(proposal.prob.dtype).expand_as(proposal.prob)
