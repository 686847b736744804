"""Lockstep decoding: the regions of a response are filled together, each by its own rules.

The idea is that of the Dream-7B Lockstep R/A release, defined anew (``docs/how-to/lockstep.md``).
In a row, a region with ``m`` masks commits those of its candidates that reach its threshold
``tau``, at most ``max(1, floor(max_fill_frac * m))``, the most probable ones first.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.regions import RegionMap
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.system.options import within
from lit_dlm.tensors.sampling import rank_descending, top_quota


@dataclass(frozen=True)
class RegionPass:
    """What a pass over all regions would commit from one forward."""

    regions: RegionMap
    candidates: Tensor  # (b, L) bool
    prob: Tensor  # (b, L) floating point
    tau: Tensor  # (b, L) in the dtype of prob: threshold of each column's region
    in_cap: Tensor  # (b, L) bool: candidates within their region's cap

    def commit(self, bonus: Tensor | float = 0.0) -> Tensor:
        """``(b, L)`` bool: what the pass commits, with a bonus on every probability."""
        return self.in_cap & (self.prob + bonus >= self.tau)


class LockstepPolicy(CommitPolicy):
    """Base of the lockstep policies; subclasses say which regions a forward commits."""

    needs_layout = True

    def __init__(self, *, tau: float | None = None) -> None:
        """Sets one threshold ``tau`` for all regions instead of the layout's, for sweeps."""
        within("[0, 1]", tau=tau)
        self.tau = tau

    @abstractmethod
    def choose(self, state: DecodeState, one_pass: RegionPass) -> Tensor:
        """``(b, L)`` bool: which cells a forward commits."""

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Commits by region; with a quota (a budget of steps), at least that many."""
        assert state.regions is not None
        regions, prob = state.regions, proposal.prob
        # float64, so that the product is the one that Python computes.
        caps = (regions.max_fill_frac * regions.counts(state.masked)).floor().long().clamp_min(1)
        rank = _rank_in_region(prob, candidates, regions)
        one_pass = RegionPass(
            regions=regions,
            candidates=candidates,
            prob=prob,
            tau=self.limit(state).to(prob.dtype),
            # The cells of a region share one threshold, so the best candidates are the best of
            # those that reach it.
            in_cap=candidates & (rank < caps.gather(1, regions.ids)),
        )
        commit = self.choose(state, one_pass)
        if quota is not None:
            # What is committed anyway counts first, then the row's most probable cells, whatever
            # their region; float64 keeps the order of the probabilities.
            order = prob.double() + 2.0 * commit.double()
            commit = commit | top_quota(order, candidates, quota)
        return Selection(commit, prob)

    def limit(self, state: DecodeState) -> Tensor:
        """``(b, L)`` float64: the threshold of every column's region, without any bonus."""
        assert state.regions is not None
        tau = state.regions.tau
        if self.tau is not None:
            tau = torch.full_like(tau, self.tau)
        return tau[state.regions.ids]


class JacobiPolicy(LockstepPolicy):
    """All regions from one forward."""

    def choose(self, state: DecodeState, one_pass: RegionPass) -> Tensor:
        return one_pass.commit()


class GaussSeidelPolicy(LockstepPolicy):
    """Region by region, each from a forward that has read the commits of the one before it.

    A sweep takes one step for each region that commits. A region that commits nothing takes none:
    the canvas has not changed, so the next region reads the same forward. If a whole sweep would
    commit nothing, the stall rule commits the row's most probable candidate, and the sweep
    continues after that candidate's region.

    A row's place in the sweep is after the region that the last step wrote, or after the last of
    these if a budget made it write several.
    """

    def choose(self, state: DecodeState, one_pass: RegionPass) -> Tensor:
        regions, commit = one_pass.regions, one_pass.commit()
        # The region after the last one written; before the first step nothing is, so the first.
        begin = torch.where(state.written, regions.ids + 1, 0).amax(1).remainder(len(regions))
        is_open = regions.counts(commit) > 0  # (b, R)
        numbers = torch.arange(len(regions), device=begin.device)
        # The first open region from ``begin`` on, cyclically; any if none is open.
        away = (numbers - begin[:, None]).remainder(len(regions))
        chosen = away.masked_fill(~is_open, len(regions)).argmin(1)
        return commit & (regions.ids == chosen[:, None])


class LaggedPolicy(LockstepPolicy):
    """The regions take turns, one forward each, whether the region's pass commits or not.

    The step number decides whose turn it is among the row's regions that still have candidates. A
    region thus reads what the other wrote one forward ago.
    """

    def choose(self, state: DecodeState, one_pass: RegionPass) -> Tensor:
        regions = one_pass.regions
        is_open = regions.counts(one_pass.candidates) > 0  # (b, R)
        turn = state.step % is_open.sum(1).clamp_min(1)
        place = is_open.long().cumsum(1) - 1
        active = (is_open & (place == turn[:, None])).to(torch.uint8).argmax(1)
        return one_pass.commit() & (regions.ids == active[:, None])


_COUPLING = 0.1


class BonusPolicy(LockstepPolicy):
    """All regions from one forward; the commits of a region lower the thresholds of later ones.

    The release's "Gauss-Seidel": every probability of a later region gains ``0.1 * f``, where
    ``f`` is the share of cells that the earlier regions commit in this step.

    Args:
        batch_wide: take the share over all cells of the batch, prompts and padding included,
            as the release does; a row then depends on its batch. By default it is the share of
            the row's own response.
        tau: see :class:`LockstepPolicy`.
    """

    def __init__(self, *, batch_wide: bool = False, tau: float | None = None) -> None:
        super().__init__(tau=tau)
        self.batch_wide = batch_wide

    @property
    def graph_safe(self) -> bool:  # type: ignore[override]
        return not self.batch_wide  # rows that have ended stay in a graph's batch

    def choose(self, state: DecodeState, one_pass: RegionPass) -> Tensor:
        # One region after the other: the bonus of each needs the commits of those before it.
        commit = torch.zeros_like(one_pass.candidates)
        for number in range(len(one_pass.regions)):
            if self.batch_wide:
                share = commit.to(one_pass.prob.dtype).mean()
            else:
                share = commit[:, state.start :].to(one_pass.prob.dtype).mean(1, keepdim=True)
            here = one_pass.regions.ids == number
            commit = commit | (one_pass.commit(_COUPLING * share) & here)
        return commit


def _rank_in_region(scores: Tensor, candidates: Tensor, regions: RegionMap) -> Tensor:
    """``(b, L)`` int64 rank of each candidate in its region, best first, the leftmost of equals.

    Columns that are not candidates come after the candidates of their region.
    """
    ranks = rank_descending(scores, candidates)
    # Regions in the order of the ranks, and how often each has come up so far.
    ordered = torch.empty_like(regions.ids).scatter_(1, ranks, regions.ids)
    numbers = torch.arange(len(regions), device=ordered.device)
    seen = (ordered[..., None] == numbers).cumsum(1) - 1  # (b, L, R)
    return seen.gather(2, ordered[..., None])[..., 0].gather(1, ranks)
