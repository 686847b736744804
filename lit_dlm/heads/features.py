"""The features of the acceptance policy: one function, used at capture and while decoding.

So training and decoding cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dlm.heads.projection import Projector, ProjectorConfig

LOG_ODDS_LIMIT = 10.0
"""Bound of the log-odds feature: a probability within 4.5e-5 of 0 or 1 saturates it."""


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """Which scalars of the proposal follow the projected hidden snapshots."""

    entropy: bool = True
    """Append the entropy of the proposal distribution, in nats."""
    margin: bool = True
    """Append the log-odds of the proposal's margin over the second-best token."""

    @property
    def num_scalars(self) -> int:
        """Scalars per position: the confidence log-odds and the extras."""
        return 1 + int(self.entropy) + int(self.margin)


def feature_groups(projector: ProjectorConfig, settings: FeatureSettings) -> tuple[int, ...]:
    """``H`` times ``k_h``, ``H - 1`` times ``k_d``, 1 per scalar: one scale each under int8."""
    return projector.groups + (1,) * settings.num_scalars


def num_features(projector: ProjectorConfig, settings: FeatureSettings) -> int:
    """Features ``F`` per position: 833 for the widths of arXiv 2605.24697 and no extras."""
    return sum(feature_groups(projector, settings))


def log_odds(prob: Tensor) -> Tensor:
    """Clipped log-odds ``log p - log(1 - p)`` in float32, of any shape."""
    # A probability near 1 saturates in half precision (0.9998 and 1 are neighbours there).
    return torch.logit(prob.float()).clamp(-LOG_ODDS_LIMIT, LOG_ODDS_LIMIT)


def acceptance_features(
    projector: Projector,
    hidden: Tensor,
    prob: Tensor,
    *,
    settings: FeatureSettings,
    entropy: Tensor | None = None,
    margin: Tensor | None = None,
) -> Tensor:
    """Features of each position of a state before anything is committed to it.

    Args:
        hidden: ``(..., H, D)`` aligned snapshots: entry ``i`` belongs to token ``i``.
        prob: ``(...)`` probability of the proposed token at temperature 1, unfiltered.
        entropy: ``(...)`` nats; needed when ``settings.entropy``.
        margin: ``(...)`` best minus second-best probability; needed when ``settings.margin``.

    Returns:
        ``(..., F)`` float32: projected snapshots, projected deltas, log-odds of ``prob``, then
        the extras. Scalars that are not finite (positions without a proposal) become 0.
    """
    scalars = [log_odds(prob)]
    if settings.entropy:
        assert entropy is not None
        scalars.append(entropy.float())
    if settings.margin:
        assert margin is not None
        scalars.append(log_odds(margin))
    stacked = torch.nan_to_num(torch.stack(scalars, dim=-1), nan=0.0, posinf=0.0, neginf=0.0)
    return torch.cat([projector(hidden), stacked], dim=-1)
