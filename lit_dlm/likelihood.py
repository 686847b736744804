"""Log-likelihood of a text under a masked diffusion model: a bound, by Monte Carlo."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lit_dlm.backbones.base import Rows
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.tensors.sampling import uniform_noise

_COUNT, _ORDER = 0, 1
"""Steps of the noise: for the offset of the numbers of masks, and for the order of the cells."""


@torch.no_grad()
def log_likelihood_bound(
    backbone: HFBackbone,
    prompt_ids: Sequence[int],
    target_ids: Sequence[int],
    *,
    num_draws: int = 128,
    antithetic: bool = True,
    seed: int = 0,
    batch_size: int = 32,
) -> float:
    r"""Estimates a lower bound of the log-likelihood of a target after a prompt.

    For a target of ``n`` tokens it is that of LLaDA (arXiv 2502.09992, eq. 6) and its evaluation::

        log p(x | prompt) >= E_k E_S [ n / k * sum_{i in S} log p(x_i | prompt, x without S) ]

    with ``k`` uniform on ``1..n``, spread evenly over the draws as in LLaDA, and ``S`` uniform
    among the sets of ``k`` cells. With ``antithetic``, draws come in pairs: the second one hides
    ``n + 1 - k`` cells from the *other* end of the same random order.

    A block model (``spec.attention`` is ``block``) never sees what comes after a block, and earlier
    blocks are clean while it writes one: its bound is the sum of the bounds of the blocks, each
    given all that precedes it (arXiv 2503.09573), with ``num_draws`` draws each.

    Equal seeds yield equal draws for targets of equal length. The bound is in nats, at most 0.
    """
    if not prompt_ids or not target_ids or num_draws < 1 or (antithetic and num_draws % 2):
        raise ValueError(
            "log_likelihood: expected at least one token of prompt and target each and a positive "
            f"number of draws, even where antithetic; got {len(prompt_ids)} and "
            f"{len(target_ids)} tokens, num_draws {num_draws}"
        )
    ids = torch.tensor([*prompt_ids, *target_ids], device=backbone.device)
    total = 0.0
    for begin, end in _spans(backbone, len(prompt_ids), len(ids)):
        hidden = masked_draws(end - begin, num_draws=num_draws, antithetic=antithetic, seed=seed)
        for part in hidden.to(ids.device).split(batch_size):
            rows = torch.nn.functional.pad(part, (begin, 0))  # (b, L)
            clean = ids[:end].expand(len(part), -1)
            shown = clean.masked_fill(rows, backbone.spec.mask_id)
            scored = backbone.score_tokens(Rows(shown, clean, rows, response_start=len(prompt_ids)))
            # In float64: rare draws that hide few tokens have large weights.
            weight = (end - begin) / part.sum(1, dtype=torch.float64)  # (b,)
            total -= float((scored.ce.double() * weight[rows.nonzero()[:, 0]]).sum())
    return total / num_draws


def masked_draws(length: int, *, num_draws: int, antithetic: bool, seed: int) -> Tensor:
    """``(num_draws, length)`` bool, at least one true per row: the cells that each draw hides."""
    num_orders = num_draws // 2 if antithetic else num_draws
    number = torch.arange(num_orders)
    seeds = torch.tensor([seed])
    offset = uniform_noise(seeds, _COUNT, torch.zeros(1, 1, dtype=torch.long))[0, 0]
    # (number + offset) / num_orders is uniform on a stratum of its own; counts are 1..n.
    count = ((number + offset) / num_orders * length).long().clamp(max=length - 1) + 1
    cells = number[:, None] * length + torch.arange(length)
    # Twice argsort gives ranks: a draw hides the first ones of a random order.
    rank = uniform_noise(seeds.expand(num_orders), _ORDER, cells).argsort(1).argsort(1)  # (N, n)
    first = rank < count[:, None]
    if not antithetic:
        return first
    return torch.cat([first, rank >= count[:, None] - 1])


def _spans(backbone: HFBackbone, begin: int, end: int) -> list[tuple[int, int]]:
    """Returns the spans that are scored together: the whole target, or its part in each block."""
    spec = backbone.spec
    if spec.attention != "block":
        return [(begin, end)]
    assert spec.block_size is not None
    origin = begin if spec.block_origin == "response" else 0
    first = begin + spec.block_size - (begin - origin) % spec.block_size
    edges = [begin, *range(first, end, spec.block_size), end]
    return list(pairwise(edges))
