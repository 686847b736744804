"""Several noisy copies of a response beside one clean copy, in one training row.

``K`` states of one response share their prompt and clean half: ``[prompt | clean | noisy 1 | ... |
noisy K]`` costs ``1 + K`` response segments, ``K`` rows of
:class:`~lit_dlm.ops.masking.TwoCopyLayout` cost ``2 K``. Every noisy copy sees clean earlier blocks
and its own block only, so all predictions are those of separate rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lit_dlm.ops.masking import TwoCopyLayout, copies_block_mask, with_own_key


@dataclass(frozen=True)
class PackedLayout:
    """A training row of one clean and ``K`` noisy copies. ``N`` slots; ``S`` as in two copies."""

    source: Tensor
    """``(N,)`` int64 canvas column that each slot holds."""
    copy: Tensor
    """``(N,)`` int64 number of the noisy copy from 0, -1 on the clean one."""
    blocks: Tensor
    """``(S, N)`` int64 block numbers; a noisy slot has that of its clean twin."""
    real: Tensor | None
    """``(S or B, N)`` bool, ``True`` on slots that take part; ``None`` when all do."""

    @classmethod
    def of(cls, layout: TwoCopyLayout, copies: int) -> PackedLayout:
        """Repeats the noisy half of ``[prompt | clean | noisy]`` (:meth:`TwoCopyLayout.trace`).

        Raises:
            ValueError: fewer than one copy.
        """
        if copies < 1:
            raise ValueError(f"copies: expected at least 1, got {copies}")
        noisy, clean = layout.is_noisy.nonzero()[:, 0], (~layout.is_noisy).nonzero()[:, 0]
        slots = torch.cat([clean, noisy.repeat(copies)])
        number = torch.arange(copies, device=slots.device).repeat_interleave(len(noisy))
        return cls(
            source=layout.source[slots],
            copy=torch.cat([torch.full_like(clean, -1), number]),
            blocks=layout.blocks[:, slots],
            real=None if layout.real is None else layout.real[:, slots],
        )

    @property
    def is_noisy(self) -> Tensor:
        """``(N,)`` bool: slots of noisy copies."""
        return self.copy >= 0

    def visibility(self, num_copies: Tensor | None = None) -> Tensor:
        """The attention mask of the training rows.

        Args:
            num_copies: ``(B,)`` int64 copies that each row uses, the first ones; ``None``: all.

        Returns:
            ``(S or B, 1, N, N)`` bool, ``True`` where the query (third axis) may see the key. A
            slot that takes no part is seen by nobody but itself.
        """
        query, key = self.blocks[:, None, :, None], self.blocks[:, None, None, :]
        noisy_query, noisy_key = self.is_noisy[:, None], self.is_noisy[None, :]
        sees_clean = torch.where(noisy_query, query > key, query >= key)
        sees_noisy = (self.copy[:, None] == self.copy[None, :]) & (query == key)
        visible = torch.where(noisy_key, sees_noisy, sees_clean)
        real = self.real
        if num_copies is not None:
            used = self.copy < num_copies[:, None]  # (B, N)
            real = used if real is None else real & used
        return visible if real is None else with_own_key(visible & real[:, None, None, :])

    def block_mask(self, num_copies: Tensor) -> BlockMask:
        """The same for FlexAttention, see :func:`~lit_dlm.ops.masking.copies_block_mask`.

        Args:
            num_copies: ``(B,)`` int64 copies that each row uses, the first ones.
        """
        used = self.copy < num_copies[:, None]
        real = used if self.real is None else self.real & used
        return copies_block_mask(self.blocks, self.copy, real, num_rows=len(num_copies))

    def positions(self, canvas_positions: Tensor) -> Tensor:
        """``(B, N)`` position ids from ``(B, length)``; a noisy slot has those of its twin."""
        return canvas_positions[:, self.source]
