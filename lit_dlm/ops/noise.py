"""Stateless noise: a hash of (sample seed, step, position, token) instead of a generator's state.

A counter-based draw depends on nothing but its key. So a sample's noise is the same in any batch,
on any number of processes and at any step that is looked at alone, and eight bytes per sample
record all of it. The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), in wrapping 64-bit arithmetic.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def sample_seed(seed: int, uid: str) -> int:
    """Seed of one sample in ``[0, 2**63)``: 63 bits of SHA-256 over ``"{seed}:{uid}"``."""
    digest = hashlib.sha256(f"{seed}:{uid}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (not arithmetic) right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _counter(n: int) -> int:
    """``n`` golden-ratio increments as a signed 64-bit integer."""
    return (_GOLDEN * n + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    """Mixes in place: of a vocabulary's keys every copy would cost as much as the arithmetic."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31))


def uniform_noise(
    seeds: Tensor,
    step: int | Tensor,
    positions: Tensor,
    *,
    stream: int = 0,
    tokens: Tensor | None = None,
) -> Tensor:
    """``(B, K)`` or ``(B, K, T)`` float64 uniform draws in the open interval (0, 1).

    Args:
        seeds: ``(B,)`` int64 sample seeds.
        step: decode step; ``(B,)`` int64 where rows are in different ones.
        positions: ``(B, K)`` int64 positions *within the sample* (not canvas columns, which
            depend on the padding of the batch).
        stream: separates uses of the same key (0 proposals, 1 commit order, ...).
        tokens: ``(T,)`` or ``(B, K, T)`` int64 ids, one draw for each, whatever the others are.
    """
    key = _mix(seeds + _counter(stream + 1))
    key = _mix(key + (_counter(step + 1) if isinstance(step, int) else _GOLDEN * (step + 1)))
    key = _mix(key[:, None] + _GOLDEN * (positions + 1))
    if tokens is not None:
        key = _mix(key[..., None] + _GOLDEN * (tokens + 1))
    return _uniform(key)


def _uniform(key: Tensor) -> Tensor:
    return _shift_right(key, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)


def gumbel_noise(seeds: Tensor, step: int | Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """``(B, K, T)`` float64 standard Gumbel draws of ids; arguments of :func:`uniform_noise`.

    Adding them to logits and taking the arg-max draws from their softmax.
    """
    return uniform_noise(seeds, step, positions, tokens=tokens).log_().neg_().log_().neg_()


def cell_gumbel_noise(seeds: Tensor, steps: Tensor, positions: Tensor, size: int) -> Tensor:
    """``(n, size)`` float64 standard Gumbel draws of cells, by one round of mixing instead of four.

    A GPU waits for the launches of small rounds. No two sums that a sample mixes are equal, for
    steps and positions below 2**20 and draws below 2**11. Seeds, steps and positions are ``(n,)``
    int64; the draws are other ones than those of :func:`gumbel_noise`.
    """
    key = torch.add(seeds, steps, alpha=_MIX_1).add_(positions, alpha=_MIX_2)
    numbers = torch.arange(1, size + 1, device=seeds.device)
    key = _mix(torch.add(key[:, None], numbers, alpha=_GOLDEN))
    return _uniform(key).log_().neg_().log_().neg_()
