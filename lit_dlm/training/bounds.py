"""States from which bounds on the log-likelihood of a whole response are estimated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_dlm.system.options import at_least, refuse
from lit_dlm.tensors.sampling import uniform_noise
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.states import NEVER, Masking, States, step_groups

_LEVEL, _CELL, _BLOCK = 22, 23, 24
"""Streams of noise; dParallel, which is never used in the same run, uses 24 as well."""


@dataclass(eq=False, kw_only=True)
class BoundViews(Masking):
    """States of one estimate of a response's evidence lower bound, in nats per token.

    Each state has a noise level and one mask of its own: ``l`` of the ``L`` cells are hidden, ``l``
    uniform from 1, and each counts ``L / l`` times (LLaDA, arXiv:2502.09992, eq. 14). This is the
    optimal allocation of a budget (VRPO, arXiv:2505.19223, section 3). With a block model every
    block has a level of its own, and one state holds all blocks.

    Args:
        num_states: levels per response.
        coupled: every state comes with its complement. ``l`` is uniform from 0, and the two halves
            count ``(L + 1) / l`` and ``(L + 1) / (L - l)`` times, halved (ESPO's code,
            arXiv:2512.03759), so that every token is predicted once per pair.
        block_size: hides cells of one block of the answer and all cells after it, as in decoding
            block by block (SPG, arXiv:2510.09541); blocks differ between the states. For models
            with full attention. This is an estimate for such decodes, not a bound.
    """

    scores_tokens: ClassVar[bool] = False
    scores_responses: ClassVar[bool] = True
    takes_rewrites: ClassVar[bool] = True

    num_states: int = 4
    coupled: bool = False
    block_size: int | None = None

    def __post_init__(self) -> None:
        at_least(1, num_states=self.num_states, block_size=self.block_size)
        if self.coupled and self.block_size is not None:
            why = "since the complement would show blocks behind hidden ones"
            refuse("BoundViews.block_size", f"null with coupled, {why}", self.block_size)

    def states(self, batch: SupervisedBatch) -> States:
        maskable, n = batch.maskable, self.num_states
        B = len(maskable)
        response = torch.arange(B, device=maskable.device).repeat_interleave(n)
        copy = torch.arange(B * n, device=maskable.device)[:, None] % n
        maskable, seeds = maskable[response], batch.seeds[response]
        segments, behind = self._segments(batch, response, copy)
        members = maskable & (segments >= 0)
        # A count and then that many positions, not an independent draw for each: exact-count masks
        # have the same expectation and less variance.
        rank, size = _ranks(members, segments.clamp_min(0), seeds, copy, n)
        level = uniform_noise(seeds, 0, segments.clamp_min(0) * n + copy, stream=_LEVEL)
        # A state that hides nothing has no score; of a pair, the other half then has all of them.
        least = 0 if self.coupled else 1
        count = least + (level * (size + 1 - least)).floor()  # per segment, (R, G)
        hidden = members & (rank < count)
        length = maskable.sum(1, keepdim=True).clamp_min(1)
        if self.block_size is not None:
            # Hidden positions behind the block are scored as well, at the level that all of them
            # have together: the share that is hidden now.
            hidden |= behind
            factor = length / hidden.sum(1, keepdim=True).clamp_min(1)
        else:
            factor = (size + 1 - least) / count.clamp_min(1) if self.coupled else size / count
            factor = torch.where(members, factor, 0.0)
        supervised, coefficient = hidden, factor / (n * length)
        if self.coupled:
            rest = (size + 1) / (size - count).clamp_min(1) / (n * length)
            supervised = torch.stack([hidden, members & ~hidden], 1).flatten(0, 1)
            coefficient = torch.stack([coefficient, rest], 1).flatten(0, 1) / 2
            response, maskable = (one.repeat_interleave(2, 0) for one in (response, maskable))
        return States(
            response=response,
            hidden=supervised | ~maskable,
            supervised=supervised,
            coefficient=torch.where(supervised, coefficient, 0.0).float(),
            whole=True,
        )

    def _segments(
        self, batch: SupervisedBatch, response: Tensor, copy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns ``(R, G)`` int64 parts with a level each, -1 for none, and bool cells to hide."""
        maskable, blocks = batch.maskable[response], batch.blocks
        nowhere = torch.zeros_like(maskable)
        if self.block_size is None:
            if blocks is None:
                return nowhere.long(), nowhere
            return (blocks - blocks.amin(1, keepdim=True))[response], nowhere
        if blocks is not None:
            raise ValueError("BoundViews.block_size: a block model has blocks of its own; use null")
        block = (maskable.cumsum(1) - 1).div(self.block_size, rounding_mode="floor")
        num_blocks = (block.amax(1, keepdim=True) + 1).clamp_min(1)
        first = uniform_noise(batch.seeds[response], 0, torch.zeros_like(copy), stream=_BLOCK)
        chosen = ((first * num_blocks).long() + copy) % num_blocks
        return torch.where(block == chosen, 0, -1), maskable & (block > chosen)


@dataclass(eq=False, kw_only=True)
class DecodedViews(Masking):
    """States that a decode went through, as one estimate of its response's log-likelihood.

    Each shows what stood there then, tokens that were replaced later included, and predicts all
    that was not final yet: masks (M2T) and such tokens (T2T). State ``n`` of ``N`` is the one
    before step ``floor(n S / N)`` of the ``S`` steps of a response or, with a block model, of each
    block at once. The estimate is the mean over states of the mean over what each has left to
    predict: in nats per token, as a bound's weight ``1 / t`` for a share ``t`` makes it.

    These are the composite inputs ``z_n`` of EBPO (LLaDA2.1, arXiv:2602.08676, eq. 5). Its report
    leaves the states ``y_t`` and their weights open; in its figure 2 the policy is updated on the
    trajectories of rollouts in both modes.

    Args:
        num_states: states per response.
    """

    scores_tokens: ClassVar[bool] = False
    scores_responses: ClassVar[bool] = True
    takes_rewrites: ClassVar[bool] = True

    num_states: int = 4

    def __post_init__(self) -> None:
        at_least(1, num_states=self.num_states)

    def needs(self) -> dict[str, str]:
        return {"steps": "DecodedViews needs trajectories"}

    def states(self, batch: SupervisedBatch) -> States:
        final, n = batch.ids[:, batch.start :], self.num_states
        B, G = final.shape
        segments = torch.zeros_like(final) if batch.blocks is None else batch.blocks
        segments = segments - segments.amin(1, keepdim=True)
        # All writes of each cell, the last one at the end: (B, G, W + 1).
        steps, tokens = batch.steps[..., None], final[..., None]
        if batch.early is not None:
            steps = torch.cat([batch.early[..., 0], steps], -1)
            tokens = torch.cat([batch.early[..., 1], tokens], -1)
        writes = steps.shape[-1]
        flat, own = steps.flatten(1), segments.repeat_interleave(writes, 1)
        step = step_groups(flat, flat >= 0, segments=own)  # in its segment, from 0
        last = torch.zeros(B, G, dtype=torch.long, device=final.device)  # of each segment
        last.scatter_reduce_(1, own, torch.where(step == NEVER, 0, step), "amax")
        num_steps = last.gather(1, segments) + 1
        # The last write before the state's step, if there is one.
        number = torch.arange(n, device=final.device)[:, None]
        cut = torch.div(number * num_steps[:, None], n, rounding_mode="floor")  # (B, n, G)
        before = step.view(B, 1, G, writes) < cut[..., None]
        place = torch.arange(1, writes + 1, device=final.device)
        found = (before * place).amax(-1)  # (B, n, G), 0 for none
        there = F.pad(tokens, (1, 0), value=-1)[:, None].expand(-1, n, -1, -1)
        there = there.gather(-1, found[..., None])[..., 0].flatten(0, 1)
        response = torch.arange(B, device=final.device).repeat_interleave(n)
        is_right = there == final[response]
        supervised = batch.maskable[response] & ~is_right
        return States(
            response=response,
            hidden=there < 0,
            supervised=supervised,
            shown=torch.where(is_right, -1, there),
            coefficient=supervised / (n * supervised.sum(1, keepdim=True).clamp_min(1)),
            whole=True,
        )


def _ranks(
    members: Tensor, segments: Tensor, seeds: Tensor, copy: Tensor, n: int
) -> tuple[Tensor, Tensor]:
    """Returns each member's random rank in its segment and the segment's size, ``(R, G)`` int64."""
    G = members.shape[1]
    cells = torch.arange(G, device=members.device)
    noise = uniform_noise(seeds, 0, cells * n + copy, stream=_CELL)
    segments = torch.where(members, segments, G)  # all others form a segment after the last
    # Sorted by noise, then stably by segment: members of a segment lie together, in random order.
    order = noise.argsort(1)
    order = order.gather(1, segments.gather(1, order).argsort(dim=1, stable=True))
    size = torch.zeros(len(members), G + 1, dtype=torch.long, device=members.device)
    size.scatter_add_(1, segments, torch.ones_like(segments))
    start = (size.cumsum(1) - size).gather(1, segments)
    return order.argsort(1) - start, size.gather(1, segments)
