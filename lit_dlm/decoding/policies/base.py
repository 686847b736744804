"""The base class of policies, and untrained ones: best scores, thresholds, joint entropy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone, Denoised
from lit_dlm.config.components import Component
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.system.options import at_least, within
from lit_dlm.tensors.batches import DeviceTable
from lit_dlm.tensors.sampling import rank_descending, top_quota, uniform_noise


class CommitPolicy(Component):
    """Chooses which candidates become final. It never writes the canvas.

    Any class with a method ``select`` is one; see ``examples/commit_policy.py``.
    """

    requires: frozenset[str] = frozenset()
    """What it needs besides proposed tokens and their probabilities: ``hidden``, ``entropy``,
    ``margin``, ``drawn``, ``raw_prob``, ``raw_entropy``, ``raw_margin``, ``window`` (proposals for
    all cells of the window, not only for masked ones), or ``region`` (for the whole response).
    A policy that requires ``hidden`` also has an attribute ``hidden_layers: tuple[int, ...]``."""
    needs_quota: bool = False
    """Whether a decoder without a quota is refused."""
    takes_quota: bool = True
    """Whether it may have a quota; else a decoder with one is refused."""
    needs_layout: bool = False
    """Whether a decoder without a layout of regions is refused."""
    takes_back: bool = False
    """Whether it may take tokens back or replace them (``Selection.rewritten``)."""
    forwards_per_step: int = 0
    """Forwards of a learned head in one step: 0 for heuristics."""
    graph_safe = False
    denoise: Callable[[Backbone, DecodeState, Tensor, tuple[int, ...]], Denoised] | None = None
    """Its own forward of a step, for ``(b, K)`` int64 columns, with those hidden layers; excludes
    caches and guidance. ``None``: the backbone's."""

    @property
    def draws(self) -> bool:
        """Whether its choice depends on the seed."""
        return False

    @property
    def trained_on(self) -> Sequence[str]:
        """Names of tasks that a learned policy was trained on, if known; empty for heuristics."""
        return ()

    def new_memory(self, state: DecodeState, vocab_size: int, dtype: torch.dtype) -> Tensor | None:
        """Returns what it remembers before a row's first step, ``(b, ...)`` zeros, if anything.

        ``dtype`` is that of the sampler's scores.
        """
        return None

    def budget(self, num_masks: int) -> int:
        """Returns the most steps of a row with so many masks, if ``max_steps`` is not set."""
        return num_masks

    def check_backbone(self, backbone: Backbone) -> None:
        """Raises ``ValueError`` for a backbone that it cannot decide for."""

    def remember(
        self, state: DecodeState, candidates: Tensor, denoised: Denoised
    ) -> tuple[DecodeState, Denoised]:
        """Reads a forward before tokens are proposed.

        A policy that remembers earlier steps returns the state with a new ``memory``, which the
        next step receives. The policy itself stores nothing, since it decodes several batches.
        Before a row's first step, the memory is what :meth:`new_memory` returned.

        Args:
            candidates: ``(b, L)`` bool, those of the window.

        Returns:
            The state, and the logits that tokens are proposed from.
        """
        return state, denoised

    def limit(self, state: DecodeState) -> Tensor | float | None:
        """The scaled score that commits a candidate, one number or ``(b, L)``, if there is one.

        Verification reads from it how near a commit was to being decided the other way. By default
        it is the attribute ``threshold``, if the policy has one.
        """
        return getattr(self, "threshold", None)

    def scale(self, scores: Tensor) -> Tensor:
        """Returns the scores of :meth:`select` in float64, on the scale of :meth:`limit`."""
        return scores.double()

    @abstractmethod
    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Chooses among the candidates.

        Args:
            candidates: ``(b, L)`` bool cells that may be committed.
            quota: ``(b,)`` int64 how many to commit, or ``None``.

        Returns:
            The commits and the scores that rank all candidates. A row without a commit is left
            to the stall rule of the loop, which uses the scores.
        """


class ThresholdPolicy(CommitPolicy):
    """Commits every candidate whose probability reaches a threshold (Fast-dLLM, arXiv 2505.22618).

    A row in which none does is left to the stall rule, which commits its best one. With a quota,
    a row in which fewer do commits its best ``quota`` instead (the dynamic remasking of dLLM-RL's
    block sampler), so it is never slower than the quota alone.
    """

    def __init__(self, threshold: float = 0.9) -> None:
        within("[0, 1]", threshold=threshold)
        self.threshold = threshold

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        commit = candidates & self.is_sure(proposal.prob)
        if quota is not None:
            # Those above the threshold are among the best: this only adds where they are too few.
            commit = commit | top_quota(proposal.prob, candidates, quota)
        return Selection(commit, proposal.prob)

    def is_sure(self, prob: Tensor) -> Tensor:
        return prob >= self.threshold


class DynamicPolicy(ThresholdPolicy):
    """Dynamic remasking of dLLM-RL's block sampler (``low_confidence_dynamic``, arXiv 2509.06949).

    As the base class, but a candidate must be *above* the threshold, and there must be a quota: so
    it is never slower than static remasking, which is ``ConfidencePolicy`` with the same quota.
    """

    needs_quota = True

    def is_sure(self, prob: Tensor) -> Tensor:
        return prob > self.threshold


class FactorPolicy(CommitPolicy):
    """Commits as many of the surest candidates as a factor allows (Fast-dLLM, arXiv 2505.22618).

    They are the ``n`` most probable ones for the largest ``n`` with ``(n + 1) (1 - c_n) < factor``,
    where ``c_n`` is the n-th largest probability; at least ``quota`` if there is one. The release
    also allows equality, and commits the last candidate of a block even if only that one fails.
    """

    def __init__(self, factor: float = 1.0) -> None:
        within("(0, inf)", factor=factor)
        self.factor = factor

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        ranks = rank_descending(proposal.prob, candidates)
        # The product grows with the rank, so those that meet the rule are the first ones.
        commit = candidates & ((ranks + 2) * (1.0 - proposal.prob) < self.factor)
        if quota is not None:
            commit = commit | (candidates & (ranks < quota[:, None]))
        return Selection(commit, proposal.prob)


class EntropyBoundedPolicy(CommitPolicy):
    """Commits the surest candidates while the sum of their entropies stays under a bound.

    Tokens that are committed together are drawn as if they were independent; the resulting error is
    bounded by their joint entropy. This is the rule ``entropy_bounded`` of dLLM-RL's engine: the
    plain sum is under the bound, with at least one commit. The paper's is :class:`EBSamplerPolicy`.
    """

    requires = frozenset({"entropy"})

    def __init__(self, bound: float = 0.35) -> None:
        """Sets the bound in nats; 0.35 is dLLM-RL's."""
        within("(0, inf)", bound=bound)
        self.bound = bound

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        assert proposal.entropy is not None
        ranks = rank_descending(-proposal.entropy, candidates)
        entropy = proposal.entropy.masked_fill(~candidates, 0.0)
        # Column ``r`` of the sorted row holds the sum of the ``r + 1`` smallest entropies.
        ordered = torch.zeros_like(entropy).scatter_(1, ranks, entropy)
        total = ordered.cumsum(1).gather(1, ranks)
        least = 1 if quota is None else quota.clamp_min(1)[:, None]
        commit = candidates & (self.allows(total, entropy) | (ranks < least))
        return Selection(commit, -proposal.entropy)

    def allows(self, total: Tensor, largest: Tensor) -> Tensor:
        """``(b, L)`` bool: whether a set may be committed, by its sum and its largest entropy."""
        return total < self.bound


class EBSamplerPolicy(EntropyBoundedPolicy):
    """EB-Sampler (arXiv 2505.24857), with candidates in the order of their entropies.

    The sum leaves out the largest entropy of the set, as the bound on the error of the joint draw
    does, and may equal ``bound`` (gamma in the paper).
    """

    def __init__(self, bound: float = 0.1) -> None:
        super().__init__(bound)

    def allows(self, total: Tensor, largest: Tensor) -> Tensor:
        return total - largest <= self.bound


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

    draws = True

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        return uniform_noise(state.seeds, state.step, state.positions, stream=1)


class ConfidencePolicy(TopQuotaPolicy):
    """Highest probability of the proposed token first (MaskGIT, arXiv 2202.04200; LLaDA)."""

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        return proposal.prob


class NoisyConfidencePolicy(TopQuotaPolicy):
    """Highest log-probability first, with Gumbel noise that dies down (MaskGIT, arXiv 2202.04200).

    As in the release of MMaDA, each step multiplies the remaining temperature by
    ``1 - (s + 1) / S``, so the noise is gone sooner than with MaskGIT's own ``1 - s / S``.
    """

    def __init__(self, steps: int, temperature: float = 1.0) -> None:
        """Sets the steps of a block and the factor of the noise before its first step."""
        at_least(1, steps=steps)
        at_least(0, temperature=temperature)
        self.steps = steps
        self.temperature = temperature
        shares = 1.0 - torch.arange(1, steps + 1, dtype=torch.float64) / steps
        self._left = DeviceTable(temperature * shares.cumprod(0))

    @property
    def draws(self) -> bool:
        return self.temperature > 0.0

    def score(self, state: DecodeState, proposal: Proposal) -> Tensor:
        uniform = uniform_noise(state.seeds, state.step, state.positions, stream=1)
        left = self._left[state.block_step.clamp_max(self.steps - 1)][:, None]
        # Without the bound, noise could not change the order of candidates of probability 0.
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
