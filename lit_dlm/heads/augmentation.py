"""Noise on the features of the acceptance network in training.

Two kinds, options of the TraceLock release and off in its recipe: Gaussian noise in proportion to
the spread of every feature, and, at some response positions, the centred features of another
position of the batch at a fixed signal-to-noise ratio, which keeps the noise inside the space that
real features fill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FeatureNoise:
    """How much noise; by default none."""

    gaussian_ratio: float = 0.0
    """Standard deviation of the Gaussian noise, as a share of each feature's own in the batch."""
    swap_prob: float = 0.0
    """Chance of a response position to receive the centred features of another one."""
    swap_snr_db: float = 10.0
    """Signal-to-noise ratio of these positions in decibels."""

    def __post_init__(self) -> None:
        if self.gaussian_ratio < 0.0:
            raise ValueError(
                f"FeatureNoise.gaussian_ratio: expected 0 or more, got {self.gaussian_ratio}"
            )
        if not 0.0 <= self.swap_prob <= 1.0:
            raise ValueError(f"FeatureNoise.swap_prob: expected 0..1, got {self.swap_prob}")


def noisy_features(
    features: Tensor, in_response: Tensor, present: Tensor, noise: FeatureNoise
) -> Tensor:
    """Adds noise drawn from torch's global generator.

    Args:
        features: ``(B, R, F)`` float32.
        in_response: ``(B, R)`` bool: the positions that swaps may reach and draw from.
        present: ``(B, R)`` bool: everything but padding; only these give the spread.
        noise: how much.

    Returns:
        ``(B, R, F)`` float32; the input itself where there is nothing to add.
    """
    if noise.gaussian_ratio > 0.0 and bool(present.any()):
        spread = features[present].std(0, correction=0)
        features = features + noise.gaussian_ratio * spread * torch.randn_like(features)
    if noise.swap_prob > 0.0 and bool(in_response.any()):
        pool = features[in_response]  # (N, F)
        centred = pool - pool.mean(0)
        drawn = centred[torch.randint(len(pool), in_response.shape, device=pool.device)]
        factor = 10.0 ** (-noise.swap_snr_db / 20.0)
        scale = factor * features.norm(dim=-1, keepdim=True)
        drawn = drawn * (scale / drawn.norm(dim=-1, keepdim=True).clamp_min(1e-12))
        chance = torch.rand(in_response.shape, dtype=torch.float32, device=pool.device)
        hit = in_response & (chance < noise.swap_prob)
        features = torch.where(hit[..., None], features + drawn, features)
    return features
