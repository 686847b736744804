"""What is visible: tokens before a step, and keys to a query under block attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def block_numbers(
    length_or_pad_mask: int | Tensor,
    block_size: int,
    *,
    origin: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """``(1, L)`` or ``(B, L)`` int64: the block number of every column, negative before block 0.

    Takes ``L``, or a ``(B, L)`` bool mask of real tokens. Block 0 starts at column ``origin`` of
    every row, or at each row's first real token.
    """
    if isinstance(length_or_pad_mask, Tensor):
        length, device = length_or_pad_mask.shape[1], length_or_pad_mask.device
    else:
        length = length_or_pad_mask
    columns = torch.arange(length, device=device)[None]  # (1, L)
    if origin is not None:
        columns = columns - origin
    elif isinstance(length_or_pad_mask, Tensor):
        columns = columns - length_or_pad_mask.bool().long().argmax(dim=1, keepdim=True)
    return torch.div(columns, block_size, rounding_mode="floor")


def block_causal_visibility(blocks: Tensor, real: Tensor | None = None) -> Tensor:
    """``(B, 1, L, L)`` bool: queries (third axis) see their own and earlier blocks (SDAR).

    Blocks are ``(B, L)`` or ``(1, L)`` int64; padding, not ``real``, is seen only by itself.
    """
    return _hide_padding(blocks[:, None, :, None] >= blocks[:, None, None, :], real)


def _hide_padding(visible: Tensor, real: Tensor | None) -> Tensor:
    """Hides padded keys; a query that is left with none sees itself."""
    if real is None:
        return visible
    return with_own_key(visible & real.bool()[:, None, None, :])


def with_own_key(visible: Tensor) -> Tensor:
    """Lets a query of ``(B, 1, L, L)`` that sees nothing see itself.

    Some kernels return NaN for a query without keys, which spreads to other rows in the next layer.
    """
    diagonal = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    return visible | (diagonal & ~visible.any(dim=-1, keepdim=True))


@dataclass(frozen=True)
class TwoCopyLayout:
    """A training row with a clean copy of a canvas and a noisy copy of a part, under one mask.

    All blocks are trained in one forward: a noisy block sees itself and the *clean* blocks before
    it, which is exactly what it sees while it is decoded. Clean tokens are block causal among
    themselves and never see a noisy one. Build one with :meth:`trace`, gather tokens with
    ``ids[:, source]``, put masks into the noisy copy. Several noisy copies may share the clean one
    (:meth:`packed`): ``K`` states of one response take ``1 + K`` segments instead of ``2 K``.

    ``N`` is the length of the training row, ``S`` the batch size of its tensors (1 if rows agree).
    """

    source: Tensor  # (N,) int64 canvas column that each slot of the row holds
    copy: Tensor  # (N,) int64 number of the noisy copy from 0, -1 on the clean one
    blocks: Tensor  # (S, N) int64 block numbers; a noisy slot has that of its clean twin
    real: Tensor  # (S or B, N) bool, True on slots that take part

    @classmethod
    def trace(
        cls,
        response_start: int,
        length: int,
        block_size: int,
        *,
        pad_mask: Tensor | None = None,
        origin: Literal["sequence", "response"] = "response",
        device: torch.device | str | None = None,
    ) -> TwoCopyLayout:
        """``[prompt | clean response | noisy response]`` (TraceRL, arXiv:2509.06949).

        If blocks count from the response, the noisy copy is the response, as in the reference. If
        they count from the sequence, the tail of the prompt may share the first response block; the
        noisy copy then starts ``block_size - 1`` columns early, and of these only the cells of that
        shared block take part. They hold prompt tokens and are not targets. Without this copy, the
        tail would have to be read from the clean half, where it has seen the answer.
        """
        if pad_mask is None:
            pad_mask = torch.ones(1, length, dtype=torch.bool, device=device)
        from_response = origin == "response"
        blocks = block_numbers(
            pad_mask, block_size, origin=response_start if from_response else None
        )
        early = 0 if from_response else min(block_size - 1, response_start)
        columns = torch.arange(length, device=blocks.device)
        noisy = columns[response_start - early :]
        source = torch.cat([columns, noisy])
        layout = cls(
            source=source,
            copy=torch.cat([torch.full_like(columns, -1), torch.zeros_like(noisy)]),
            blocks=blocks[:, source],
            real=pad_mask.bool()[:, source],
        )
        if early == 0:
            return layout
        # The early columns of earlier blocks are not part of the noisy copy.
        first_block = blocks[:, response_start : response_start + 1]
        taken = ~layout.is_noisy | (layout.blocks >= first_block)
        return replace(layout, real=taken & layout.real)

    @property
    def is_noisy(self) -> Tensor:
        """``(N,)`` bool: slots of noisy copies."""
        return self.copy >= 0

    def packed(self, copies: int) -> TwoCopyLayout:
        """Returns the layout with several noisy copies, each of which sees what one alone would."""
        noisy, clean = self.is_noisy.nonzero()[:, 0], (~self.is_noisy).nonzero()[:, 0]
        slots = torch.cat([clean, noisy.repeat(copies)])
        number = torch.arange(copies, device=slots.device).repeat_interleave(len(noisy))
        return TwoCopyLayout(
            source=self.source[slots],
            copy=torch.cat([self.copy[clean], number]),
            blocks=self.blocks[:, slots],
            real=self.real[:, slots],
        )

    def in_whole_tiles(self) -> TwoCopyLayout:
        """Returns the layout with unused slots at its end, up to a multiple of :data:`TILE`."""
        extra = (0, -len(self.copy) % TILE)
        parts = (self.source, self.blocks, self.real)
        source, blocks, real = (F.pad(part, extra) for part in parts)
        return TwoCopyLayout(source, F.pad(self.copy, extra, value=-1), blocks, real)

    def _used(self, num_copies: Tensor | None) -> Tensor:
        """Returns the slots that take part if rows use only some of the copies."""
        if num_copies is None:
            return self.real
        return (self.copy < num_copies[:, None]) & self.real  # (B, N)

    def visibility(self, num_copies: Tensor | None = None) -> Tensor:
        """``(S or B, 1, N, N)`` bool, ``True`` where the query (third axis) may see the key.

        A slot that takes no part is seen by no other slot. Each row uses its first ``num_copies``
        ``(B,)`` copies, or all.
        """
        query, key = self.blocks[:, None, :, None], self.blocks[:, None, None, :]
        noisy_query, noisy_key = self.is_noisy[:, None], self.is_noisy[None, :]
        sees_clean = torch.where(noisy_query, query > key, query >= key)
        sees_noisy = (self.copy[:, None] == self.copy[None, :]) & (query == key)
        visible = torch.where(noisy_key, sees_noisy, sees_clean)
        return _hide_padding(visible, self._used(num_copies))

    def block_mask(self, num_copies: Tensor | None = None) -> BlockMask:
        """Returns the same for FlexAttention (arXiv:2412.05496), without an ``(N, N)`` matrix.

        It differs only for slots that take no part, which always see themselves here.
        """
        copy, length, device = self.copy, len(self.copy), self.copy.device
        real = self._used(num_copies)
        blocks = self.blocks.expand(len(real), -1)
        own = copy * 2**32 + blocks  # noisy slots with equal numbers see each other

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            del head
            at = row % len(real)
            later = blocks[at, query] > blocks[at, key]
            same = own[at, query] == own[at, key]
            return (later & (copy[key] < 0) | same) & real[at, key] | (query == key)

        # The smallest and largest number in each tile decide which to visit; some may be empty.
        last = torch.arange(-(-length // TILE) * TILE, device=device).clamp_max(length - 1)
        clean, noisy = real & (copy < 0), real & (copy >= 0)

        def in_tiles(values: Tensor) -> Tensor:
            return values[:, last.view(-1, TILE)]  # (S or B, T, TILE)

        def least(values: Tensor, among: Tensor) -> Tensor:
            return in_tiles(torch.where(among, values, _FAR)).amin(-1)

        low, high = least(own, noisy), -least(-own, noisy)
        sees_noisy = (low[..., None] <= high[:, None]) & (low[:, None] <= high[..., None])
        sees_clean = -least(-blocks, real)[..., None] >= least(blocks, clean)[:, None]
        later = least(blocks, real)[..., None] > -least(-blocks, clean)[:, None]
        every = sees_clean & later & in_tiles(clean).all(-1)[:, None]
        some = (sees_clean | sees_noisy) & ~every
        some |= torch.eye(some.shape[-1], dtype=torch.bool, device=device)

        def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
            order = tiles.int().argsort(dim=-1, descending=True, stable=True)
            return tiles.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]

        return BlockMask.from_kv_blocks(
            *listed(some), *listed(every), TILE, sees, seq_lengths=(length, length)
        )

    def predictors(self) -> Tensor:
        """``(S, N)`` int64: the slot that predicts each slot in a model with shift 1.

        It is the slot before; for the first cell of a noisy block, it is the clean token before the
        block, as in a decode, where earlier blocks are final.
        """
        before = (torch.arange(len(self.copy), device=self.copy.device) - 1).clamp_min(0)
        same = (self.copy[before] == self.copy) & (self.blocks[:, before] == self.blocks)
        # Slots of the clean copy are numbered like columns.
        return torch.where(same | ~self.is_noisy, before, (self.source - 1).clamp_min(0))

    def positions(self, canvas_positions: Tensor) -> Tensor:
        """``(B, N)`` position ids from ``(B, length)``; a noisy slot has that of its clean twin."""
        return canvas_positions[:, self.source]


TILE = 128
"""Number of queries and of keys in a tile of FlexAttention."""
_FAR = 2**62
FLEX_LENGTH = 512
"""Fewest slots of a training row for which a GPU uses FlexAttention instead of a mask matrix. Tiles
save little in shorter rows, see ``benchmarks/block_attention.py --count``."""


def wants_block_mask(length: int, device: torch.device) -> bool:
    """Whether rows of clean and noisy copies use :meth:`TwoCopyLayout.block_mask`."""
    return device.type == "cuda" and length >= FLEX_LENGTH


class TimeDelayMask(NamedTuple):
    """What a state of a recorded decode shows, and what is learnt from it."""

    hidden: Tensor  # (B, L) bool: positions that the model sees as mask
    supervised: Tensor  # (B, L) bool: positions whose token is to be predicted, all of them hidden


def time_delay_mask(steps: Tensor, maskable: Tensor, cut: Tensor, *, window: int) -> TimeDelayMask:
    """Time-delay masking of TABOM (arXiv:2605.11854): a recorded decode, cut at a step.

    What was written before the cut is shown, everything else is hidden. What was written in the
    next ``window`` steps (the cut's own included) is supervised; what came later, or never, is
    hidden but not learnt.

    Args:
        steps: ``(B, L)`` integer, the step that wrote each response position; -1 where none did.
        maskable: ``(B, L)`` bool, positions that may be supervised.
        cut: ``(B,)`` int64 steps; -1 for a row without a cut: all of it is hidden.
    """
    at = cut[:, None]
    hidden = (steps < 0) | (steps >= at)
    later = maskable & (steps >= 0) & (steps >= at) & (at >= 0)
    return TimeDelayMask(hidden, later & (steps < at + window))
