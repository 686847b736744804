"""States of the other policy objectives of masked diffusion: complements, views, masked prompts."""

from __future__ import annotations

from typing import Literal

import torch

from lit_dlm.losses.corruption import RandomMasking
from lit_dlm.losses.states import Corruption, NoisyStates, Responses, weighted_states
from lit_dlm.ops.sampling import uniform_noise

_CELL, _PAIR, _PROMPT = 17, 20, 21
"""Streams of noise, apart from those of decoding; the first one is that of RandomMasking."""


class CoupledMasking(Corruption):
    """Random states and their complements: every target is predicted exactly once per pair.

    The coupled objective that TraceRL is compared with (arXiv:2509.06949). Of a block model the
    complement is taken in every block at once, since a state holds them all.

    Args:
        level: what shares a noise level, 0.1 to 0.9: ``row``, ``block`` or ``token``.
        pairs: per sample.
    """

    def __init__(self, *, level: Literal["row", "block", "token"] = "row", pairs: int = 1) -> None:
        self.noise = RandomMasking(min_t=0.1, max_t=0.9, level=level, copies=pairs)

    def states(self, responses: Responses) -> NoisyStates:
        first = self.noise.states(responses)
        maskable = responses.maskable[first.sample]
        other = maskable & ~first.supervised
        supervised = torch.stack([first.supervised, other], 1).flatten(0, 1)
        sample = first.sample.repeat_interleave(2)
        maskable = responses.maskable[sample]
        return weighted_states(
            "1/num_targets",
            sample,
            hidden=supervised | ~maskable,
            supervised=supervised,
            maskable=maskable,
        )


class CoupledViews(Corruption):
    """Coupled-GRPO's estimate of token log-probabilities (DiffuCoder, arXiv:2506.20639).

    Three views of a response: all of it hidden, a random part hidden at noise level ``t``, and the
    complement of that part. A token's log-probability is the mean of the one in the first view and
    the one in the view that hides it, the latter weighted by ``1 / t`` or ``1 / (1 - t)``.
    """

    min_t, max_t = 0.2, 0.8  # of the release

    def states(self, responses: Responses) -> NoisyStates:
        maskable = responses.maskable
        B, G = maskable.shape
        device = maskable.device
        zero = torch.zeros(B, 1, dtype=torch.long, device=device)
        t = self.min_t + (self.max_t - self.min_t) * uniform_noise(
            responses.seeds, 0, zero, stream=_PAIR
        )
        cells = torch.arange(G, device=device).expand(B, -1)
        part = (uniform_noise(responses.seeds, 0, cells, stream=_CELL) < t) & maskable
        supervised = torch.stack([maskable, part, maskable & ~part], 1)  # (B, 3, G)
        factor = torch.stack([torch.ones_like(t), 1 / t, 1 / (1 - t)], 1)  # (B, 3, 1)
        coefficient = (supervised * factor / 2).float().flatten(0, 1)
        supervised = supervised.flatten(0, 1)
        sample = torch.arange(B, device=device).repeat_interleave(3)
        return NoisyStates(
            sample=sample,
            hidden=supervised | ~maskable[sample],
            supervised=supervised,
            weight=supervised.float(),
            per_row=False,
            view_of=sample,
            coefficient=coefficient,
        )


class MaskedPrompt(Corruption):
    """diffu-GRPO's one-step estimate (d1, arXiv:2504.12216): the whole response is hidden.

    Prompt tokens are hidden at random as well, anew in every pass over the rollouts, which lets
    one set of rollouts be used for many updates.
    """

    rate = 0.15  # of the paper

    def states(self, responses: Responses) -> NoisyStates:
        maskable = responses.maskable
        return NoisyStates(
            sample=torch.arange(len(maskable), device=maskable.device),
            hidden=torch.ones_like(maskable),
            supervised=maskable,
            weight=maskable.float(),
            per_row=False,
            prompt_rate=self.rate,
            seeds=responses.seeds,
        )


def hidden_prompt(states: NoisyStates, positions: torch.Tensor) -> torch.Tensor | None:
    """``(R, P)`` bool prompt tokens that a state hides, ``None`` where prompts are shown whole.

    Args:
        positions: ``(R, P)`` int64 position of each prompt column within its sample, negative on
            padding.
    """
    if states.prompt_rate <= 0.0:
        return None
    assert states.seeds is not None
    noise = uniform_noise(states.seeds, 0, positions.clamp_min(0), stream=_PROMPT)
    return (noise < states.prompt_rate) & (positions >= 0)
