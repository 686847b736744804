"""Groups of response cells that are learnt together, and which of them become training rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_dlm.ops.noise import uniform_noise

NEVER = torch.iinfo(torch.long).max
"""Group of a cell that belongs to none: after all others, so it stays hidden."""


def step_groups(
    steps: Tensor, members: Tensor, *, shrink: int = 1, segments: Tensor | None = None
) -> Tensor:
    """``(B, G)`` int64 groups of each row from 0, :data:`NEVER` outside of members and steps.

    Args:
        steps: ``(B, G)`` integer step of each cell, -1 for none.
        members: ``(B, G)`` bool, cells that take part.
        shrink: consecutive distinct steps that form a group (TraceRL's shrinkage).
        segments: ``(B, G)`` integer; groups are counted anew in each segment, where given.
    """
    G = steps.shape[1]
    steps = steps.long()
    members = members & (steps >= 0)
    key = torch.where(members, steps, G + steps.amax() + 1)
    order = key.argsort(dim=1, stable=True)
    starts = torch.zeros_like(members)
    starts[:, 0] = True
    if segments is not None:
        segments = torch.where(members, segments, NEVER)
        # Stable sorts by step, then by segment: cells of a segment lie together, by step.
        order = order.gather(1, segments.gather(1, order).argsort(dim=1, stable=True))
        starts |= _changes(segments.gather(1, order))
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
        ``sample`` and ``group``, ``(R,)`` int64 each, and ``share``, ``(R,)`` float32: the groups
        of the sample over those drawn of it. Without any group one row of sample 0 whose group
        has no cells.
    """
    count = torch.where(groups == NEVER, -1, groups).amax(1) + 1  # (B,)
    numbers = torch.arange(int(count.max()), device=groups.device).expand(len(groups), -1)
    chosen = groups != NEVER if targets is None else targets & (groups != NEVER)
    cells = torch.where(chosen, groups, numbers.shape[1])  # all others mark a column to drop
    exists = F.pad(torch.zeros_like(numbers, dtype=torch.bool), (0, 1)).scatter_(1, cells, True)
    exists = exists[:, :-1]
    total = exists.sum(1)
    if rows_per_sample is not None:
        noise = uniform_noise(seeds, 0, numbers, stream=stream).masked_fill(~exists, 2.0)
        exists = exists & (noise.argsort(1).argsort(1) < rows_per_sample)
    sample, group = exists.nonzero(as_tuple=True)
    if not len(sample):
        # A forward must run all the same: other processes wait for its backward.
        return sample.new_zeros(1), group.new_full((1,), NEVER - 1), total.new_ones(1).float()
    return sample, group, (total.float() / exists.sum(1).clamp_min(1))[sample]
