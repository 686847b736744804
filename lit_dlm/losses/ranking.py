"""Ranking of predictive entropies by the order of a recorded decode (TABOM, arXiv:2605.11854).

A decode goes from certain to uncertain positions. Of two positions that were written one after the
other, the earlier one should therefore have the lower entropy; where it has not, by a margin, the
pair costs the difference. Comparing sets that differ in one member makes the partition function of
the paper's Boltzmann distribution cancel, which leaves exactly these pairs.

All entropies come from one forward at the cut, as in the release; the paper takes each from the
state just before its position was written, at the price of one forward per position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_dlm.losses.terms import LossTerms
from lit_dlm.ops.masking import per_row, positive_integer

Ties = Literal["strict", "position", "rank"]


@dataclass(frozen=True, kw_only=True)
class RankingTerms(LossTerms):
    """The ranking loss and what it is made of, row by row."""

    row_terms: Tensor
    """``(B,)`` mean hinge over the pairs of each row, differentiable; 0 for a row without pairs."""
    num_pairs: Tensor
    """``(B,)`` int64 pairs of each row."""


def entropy_ranking(
    entropy: Tensor,
    steps: Tensor,
    supervised: Tensor,
    cut: int | Sequence[int | None] | Tensor | None,
    *,
    window: int | None,
    margin: float = 0.0,
    ties: Ties = "strict",
    decode_entropy: Tensor | None = None,
) -> RankingTerms:
    """``mean over pairs of max(0, h_earlier - h_later + margin)``, averaged over rows with pairs.

    The members of a pair are supervised, were written at a step in ``[cut, cut + window)``, and one
    of them earlier than the other. Rows without a pair do not count; without any pair the loss is
    0 with a gradient of 0. Gradients flow into both entropies.

    Memory grows with the pairs: rows are cut down to their usable positions first.

    Args:
        entropy: ``(L,)`` or ``(B, L)`` floating point, predictive entropies in nats. Entries
            outside the pairs may hold anything, NaN included, and get no gradient. Those of a
            backbone leave out forbidden ids (the mask), see ``HFBackbone.score_tokens``.
        steps: integer of the same shape, the step that wrote each position, or -1.
        cut: the step at which the decode was cut, a number or ``(B,)`` integers; -1 or ``None`` for
            a row without one, in which nothing counts as supervised.
        window: ranked steps from the cut on; ``None`` ranks everything supervised from the cut on.
        margin: by how much a later entropy should be larger, in nats.
        ties: what becomes of two positions of the same step. ``strict``: no pair. ``position``: the
            left one counts as earlier. ``rank``: the one of lower ``decode_entropy`` does, of equal
            ones the left (the paper's order).
        decode_entropy: floating point of the same shape, entropies recorded at decoding; read
            with ``rank`` only.

    Returns:
        ``total``; in ``parts`` and ``sums`` the ``pair_accuracy`` (share of pairs whose earlier
        entropy is lower; 0 without pairs); and the terms of each row.
    """
    if ties not in ("strict", "position", "rank"):
        raise ValueError(f"ties: expected 'strict', 'position' or 'rank', got {ties!r}")
    if (ties == "rank") and decode_entropy is None:
        raise ValueError("decode_entropy: expected the recorded entropies with ties 'rank'")
    if window is not None:
        window = positive_integer(window, name="window")
    if not math.isfinite(margin):
        raise ValueError(f"margin: expected a finite number, got {margin}")
    given = [entropy, steps, supervised, *([] if decode_entropy is None else [decode_entropy])]
    if entropy.ndim not in (1, 2) or any(tensor.shape != entropy.shape for tensor in given):
        raise ValueError(
            "entropy_ranking: expected tensors of one shape (L,) or (B, L), got "
            f"{[tuple(tensor.shape) for tensor in given]}"
        )
    if entropy.ndim == 1:
        entropy, steps, supervised = entropy[None], steps[None], supervised[None]
        decode_entropy = None if decode_entropy is None else decode_entropy[None]
    at = per_row(cut, steps, name="cut", missing=-1)
    usable = supervised.bool() & (steps >= 0) & (at >= 0) & (steps >= at)
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
    gap = h[:, :, None] - h[:, None, :]  # (B, n, n), earlier less later
    num_pairs = pair.sum((1, 2))
    hinge = (gap + margin).relu() * pair
    row_terms = hinge.sum((1, 2)) / num_pairs.clamp_min(1)
    total = row_terms.sum() / (num_pairs > 0).sum().clamp_min(1)
    ordered, count = ((gap.detach() < 0.0) & pair).sum(), num_pairs.sum()
    return RankingTerms(
        total,
        {"pair_accuracy": ordered / count.clamp_min(1)},
        {"pair_accuracy": (ordered, count)},
        row_terms=row_terms,
        num_pairs=num_pairs,
    )


def _decoding_order(steps: Tensor, usable: Tensor, decode_entropy: Tensor | None) -> Tensor:
    """``(B, L)`` positions by step, then recorded entropy, then column; unusable ones last."""
    key = torch.where(usable, steps.long(), torch.iinfo(torch.long).max)
    if decode_entropy is None:
        return key.argsort(dim=1, stable=True)
    by_entropy = decode_entropy.argsort(dim=1, stable=True)
    return by_entropy.gather(1, key.gather(1, by_entropy).argsort(dim=1, stable=True))
