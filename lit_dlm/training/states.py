"""What maskings return: states, weights of targets, groups of cells."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_dlm.config.components import Component
from lit_dlm.system.options import refuse
from lit_dlm.tensors.batches import TensorBatch
from lit_dlm.tensors.sampling import uniform_noise
from lit_dlm.training.batch import SupervisedBatch

LossWeight = Literal["none", "none/t", "1/t", "1/num_targets", "1/length"]
"""How the targets of a state are weighted. ``none``: every target of the batch alike; ``none/t``:
each divided by its noise level. The others average over states: ``1/num_targets`` the mean of each
state that has a target, ``1/length`` its sum divided by the length of the answer, ``1/t`` likewise
with each target divided by its noise level (the bound of MDLM, 2406.07524, and LLaDA, 2502.09992).
In the last two a state whose noise hid nothing counts as 0: without it the others would weigh too
much."""


@dataclass(frozen=True, eq=False, kw_only=True)
class States(TensorBatch):
    """``K`` states of the responses of a batch: what is hidden of each and what is to be predicted.

    A response may have several states, or none. The first three fields are all that a masking of
    your own has to give. Scores come state by state: ``N`` in all, one for each ``True`` of
    ``supervised``, in the order of ``supervised.nonzero()``.
    """

    response: Tensor
    """``(K,)`` int64: the row of the batch that each state belongs to."""
    hidden: Tensor
    """``(K, G)`` bool: seen as a mask; positions behind the answer are, too."""
    supervised: Tensor
    """``(K, G)`` bool: positions to predict."""
    shown: Tensor | None = None
    """``(K, G)`` int64: a wrong token that stands in place of the right one, -1 where none does, as
    in what is hidden; ``None`` if nothing is wrong."""
    weight: Tensor | None = None
    """``(K, G)`` float32 weight of each target; ``None`` for 1."""
    units: Tensor | None = None
    """Scalar that the weighted sum is divided by; ``None`` for the number of targets."""
    sample: Tensor | None = None
    """``(K,)`` int64 ascending from 0: a block model gets states with the same number in one row;
    ``None`` if every state has a row of its own."""
    coefficient: Tensor | None = None
    """``(K, G)`` float32: the states of a response are views of one estimate, in which a position's
    scores are added up with these factors; ``None`` if every state is scored by itself."""
    whole: bool = False
    """Whether the scores of all positions are added up, too, to a score of the response."""
    share: Tensor | None = None
    """``(K,)`` float32: how many states each one represents, if only some were drawn; ``None`` if
    each represents itself."""
    one_copy: bool = False
    """Whether the blocks of a block model see earlier ones as noisy as they are, in one copy, and
    not clean ones (D2F)."""
    causal: bool = False
    """Whether a position sees only what is to its left."""
    cut: Tensor | None = None
    """``(K,)`` int64 cut of a recorded decode, -1 where there is none (TABOM)."""
    prompt_rate: float = 0.0
    """Probability that a prompt token is hidden (diffu-GRPO)."""
    prompt_seeds: Tensor | None = None
    """``(K,)`` int64 seed of that noise, where ``prompt_rate`` is positive."""

    def num_units(self) -> Tensor:
        """Returns the scalar that the weighted sum of a batch is divided by."""
        # Fixed by the states, not by the scores: processes agree on it before any backward.
        return self.supervised.sum() if self.units is None else self.units


class Masking(Component):
    """Turns responses into training states."""

    hides_targets: ClassVar[bool] = True
    """Whether no state shows what it predicts; else rollouts cannot be scored in them."""
    scores_tokens: ClassVar[bool] = True
    """Whether each token has a state of its own, at which a value could be estimated."""
    takes_rewrites: ClassVar[bool] = False
    """Whether its states are right for decodes that took back or replaced tokens."""
    scores_responses: ClassVar[bool] = False
    """Whether all scores of a response become one, a bound on its log-likelihood."""

    @abstractmethod
    def states(self, batch: SupervisedBatch) -> States:
        """Draws the states."""

    def needs(self) -> dict[str, str]:
        """Returns fields that no example may lack, each with what to say of one that does."""
        return {}

    def check(self, batches: Iterable[SupervisedBatch]) -> None:
        """Refuses, before training, responses of which nothing could be learnt; read lazily."""


def weighted_states(
    weight: LossWeight,
    response: Tensor,
    *,
    hidden: Tensor,
    supervised: Tensor,
    maskable: Tensor,
    t: Tensor | None = None,
    **more: Any,
) -> States:
    """Makes states with targets weighted by a rule.

    Args:
        maskable: ``(K, G)`` bool, positions of the answer.
        t: ``(K, G)`` noise levels; ``None`` where there are none.
        more: further fields of the states.
    """
    value, units = None, None
    if weight == "1/num_targets":
        value = supervised / supervised.sum(1, keepdim=True).clamp_min(1)
        units = supervised.any(1).sum()
    elif weight in ("1/t", "1/length"):
        value = supervised / maskable.sum(1, keepdim=True).clamp_min(1)
        # In a bound, a state of an answer counts even if its noise hid nothing.
        units = maskable.any(1).sum()
    if weight in ("1/t", "none/t"):
        if t is None:
            refuse("weight", "a rule without t, since these states have no noise level", weight)
        # A level of 0 hides nothing, so the limit never changes a target.
        value = (supervised if value is None else value) / t.clamp_min(1e-6).float()
    return States(
        response=response, hidden=hidden, supervised=supervised, weight=value, units=units, **more
    )


NEVER = torch.iinfo(torch.long).max
"""Group of positions that belong to none: after all others, so that they stay hidden."""


def step_groups(
    steps: Tensor, members: Tensor, *, shrink: int = 1, segments: Tensor | None = None
) -> Tensor:
    """Returns ``(B, G)`` int64 groups of each row from 0, :data:`NEVER` for cells without one.

    Args:
        steps: ``(B, G)`` integer step of each cell, -1 for none.
        members: ``(B, G)`` bool, cells that take part.
        shrink: consecutive distinct steps that form a group (TraceRL's shrinkage).
        segments: ``(B, G)`` integer; if given, groups are counted from 0 in each segment.
    """
    G = steps.shape[1]
    steps = steps.long()
    members = members & (steps >= 0)
    # Others get a key above all steps and sort last; their group is replaced at the end anyway.
    key = torch.where(members, steps, G + steps.amax() + 1)
    order = key.argsort(dim=1, stable=True)
    starts = torch.zeros_like(members)
    starts[:, 0] = True
    if segments is not None:
        segments = torch.where(members, segments, NEVER)
        # Stable sorts by step, then by segment: cells of a segment lie together, by step.
        order = order.gather(1, segments.gather(1, order).argsort(dim=1, stable=True))
        starts |= _changes(segments.gather(1, order))
    # Numbered through the row, less the number at the start of each segment: no loop over them.
    number = (_changes(key.gather(1, order)) | starts).long().cumsum(1)
    first = torch.where(starts, number, 0).cummax(1).values
    groups = torch.empty_like(steps)
    groups.scatter_(1, order, torch.div(number - first, shrink, rounding_mode="floor"))
    return torch.where(members, groups, NEVER)


def _changes(values: Tensor) -> Tensor:
    """``(B, G)`` bool, where a value differs from the one to its left; never in column 0."""
    return F.pad(values[:, 1:] != values[:, :-1], (1, 0))


def group_rows(
    groups: Tensor,
    rows_per_sample: int | None,
    seeds: Tensor,
    *,
    stream: int,
    targets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lists the groups of every sample, or ``rows_per_sample`` of them at random.

    Args:
        groups: ``(B, G)`` int64 from :func:`step_groups`.
        seeds: ``(B,)`` int64 sample seeds.
        targets: ``(B, G)`` bool; groups without such a cell are left out. All are taken by default.

    Returns:
        ``sample`` and ``group``, ``(R,)`` int64 each, and ``share``, ``(R,)`` float32: the number
        of the sample's groups divided by the number drawn. If there is no group at all, one row of
        sample 0 with a group without cells.
    """
    count = torch.where(groups == NEVER, -1, groups).amax(1) + 1  # (B,)
    numbers = torch.arange(int(count.max()), device=groups.device).expand(len(groups), -1)
    chosen = groups != NEVER if targets is None else targets & (groups != NEVER)
    cells = torch.where(chosen, groups, numbers.shape[1])  # all others mark a column to drop
    exists = F.pad(torch.zeros_like(numbers, dtype=torch.bool), (0, 1)).scatter_(1, cells, True)
    exists = exists[:, :-1]
    total = exists.sum(1)
    if rows_per_sample is not None:
        # The groups with the smallest noise, of which each has its own, whatever the others are.
        # Groups that do not exist come last: noise is below 1.
        noise = uniform_noise(seeds, 0, numbers, stream=stream).masked_fill(~exists, 2.0)
        exists = exists & (noise.argsort(1).argsort(1) < rows_per_sample)
    sample, group = exists.nonzero(as_tuple=True)
    if not len(sample):
        # A forward must run all the same: other processes wait for its backward.
        return sample.new_zeros(1), group.new_full((1,), NEVER - 1), total.new_ones(1).float()
    return sample, group, (total.float() / exists.sum(1).clamp_min(1))[sample]
