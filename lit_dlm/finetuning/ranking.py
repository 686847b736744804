"""Ranking of predictive entropies by the order of a recorded decode (TABOM, arXiv:2605.11854).

Of two positions that were written one after the other, the earlier one should have the lower
entropy; otherwise the pair costs the difference.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Ties = Literal["strict", "position", "rank"]


class RankingTerms(NamedTuple):
    """The ranking loss row by row; its mean is over rows with pairs."""

    row_terms: Tensor  # (B,) mean hinge over the pairs of each row, differentiable; 0 without any
    num_pairs: Tensor  # (B,) int64 pairs of each row
    num_ordered: Tensor  # Scalar: pairs of the batch whose earlier member has the lower entropy


def entropy_ranking(
    entropy: Tensor,
    steps: Tensor,
    supervised: Tensor,
    cut: Tensor,
    *,
    window: int | None,
    margin: float = 0.0,
    ties: Ties = "strict",
    decode_entropy: Tensor | None = None,
    blocks: Tensor | None = None,
) -> RankingTerms:
    """``mean over pairs of max(0, h_earlier - h_later + margin)`` of each row.

    The members of a pair are supervised and were written at steps in ``[cut, cut + window)``, one
    of them earlier than the other. Gradients flow into both entropies.

    Args:
        entropy: ``(B, L)`` floating point, predictive entropies in nats. Entries outside the pairs
            may hold anything, NaN included, and get no gradient.
        steps: ``(B, L)`` integer, the step that wrote each position, or -1.
        supervised: ``(B, L)`` bool.
        cut: ``(B,)`` int64, the step at which the decode was cut; -1 in a row without one.
        window: ranked steps from the cut on; ``None`` ranks everything supervised from the cut on.
        margin: by how much a later entropy should be larger, in nats.
        ties: what becomes of two positions of the same step. ``strict``: no pair. ``position``: the
            left one counts as earlier. ``rank``: the one with the lower ``decode_entropy`` does, or
            the left one if these are equal (the paper's order).
        decode_entropy: ``(B, L)`` floating point, entropies recorded at decoding; for ``rank``.
        blocks: ``(B, L)`` int64 blocks; if given, the members of a pair are of one block.
    """
    at = cut[:, None]
    usable = supervised & (steps >= 0) & (at >= 0) & (steps >= at)
    if window is not None:
        usable = usable & (steps < at + window)

    # Usable positions first, in the order of decoding: then a pair is any (i, j) with i < j.
    order = _decoding_order(steps, usable, decode_entropy if ties == "rank" else None)
    width = int(usable.sum(1).max()) if len(usable) else 0
    order = order[:, :width]  # (B, n)
    usable, steps = usable.gather(1, order), steps.gather(1, order)
    h = torch.where(usable, entropy.gather(1, order), 0.0)
    pair = usable[:, :, None] & usable[:, None, :]
    pair &= torch.ones(width, width, dtype=torch.bool, device=h.device).triu_(1)
    if ties == "strict":
        pair &= steps[:, :, None] < steps[:, None, :]
    if blocks is not None:
        blocks = blocks.gather(1, order)
        pair &= blocks[:, :, None] == blocks[:, None, :]
    gap = h[:, :, None] - h[:, None, :]  # (B, n, n), earlier less later
    num_pairs = pair.sum((1, 2))
    hinge = (gap + margin).relu() * pair
    row_terms = hinge.sum((1, 2)) / num_pairs.clamp_min(1)
    return RankingTerms(row_terms, num_pairs, ((gap.detach() < 0.0) & pair).sum())


def _decoding_order(steps: Tensor, usable: Tensor, decode_entropy: Tensor | None) -> Tensor:
    """``(B, L)`` positions by step, then recorded entropy, then column; unusable ones last."""
    key = torch.where(usable, steps.long(), torch.iinfo(torch.long).max)
    if decode_entropy is None:
        return key.argsort(dim=1, stable=True)
    by_entropy = decode_entropy.argsort(dim=1, stable=True)
    return by_entropy.gather(1, key.gather(1, by_entropy).argsort(dim=1, stable=True))
