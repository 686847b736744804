"""The sampler: which token is proposed for a cell, and which probability scores it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lit_dlm.backbones.base import Denoised
from lit_dlm.decoding.state import DecodeState, Proposal
from lit_dlm.decoding.windows import masks_first
from lit_dlm.ops.greedy import greedy
from lit_dlm.ops.noise import gumbel_noise
from lit_dlm.ops.sampling import keep_top_k, keep_top_p
from lit_dlm.ops.scores import confidence, entropy, margin


class Sampler:
    """Greedy or Gumbel-max proposals, scored on the raw or on the filtered distribution.

    The two families differ in what a confidence is: LLaDA reads it from the raw softmax even when
    the token was drawn with noise, Dream from the distribution after temperature, top-k and top-p.
    Filtering therefore changes the order of positions and not only the tokens, which is why every
    filter is explicit here and off by default.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        score_on: Literal["raw", "filtered"] = "raw",
        score_dtype: Literal["float32", "float64"] = "float32",
    ) -> None:
        """Sets how tokens are proposed.

        Args:
            temperature: 0 takes the most probable token; above 0 draws.
            top_k: keep the ``k`` most probable tokens.
            top_p: keep the nucleus of this probability.
            score_on: distribution that confidence, entropy and margin are read from.
            score_dtype: precision of these; LLaDA's release uses float64.
        """
        if temperature < 0.0:
            raise ValueError(f"temperature: expected 0 or more, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {top_k}")
        if top_p is not None and not 0.0 < top_p <= 1.0:
            raise ValueError(f"top_p: expected a number in (0, 1], got {top_p}")
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.score_on = score_on
        self.score_dtype = score_dtype

    def _filtered(self, logits: Tensor) -> Tensor:
        if self.temperature not in (0.0, 1.0):
            logits = logits / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        return logits

    def perturbed(self, state: DecodeState, denoised: Denoised) -> Tensor:
        """The values whose largest entry is the proposal: filtered logits, plus noise if drawn.

        Args:
            state: the state before the step.
            denoised: aligned logits at some columns.

        Returns:
            ``(b, K, V)`` floating point.
        """
        raw = denoised.logits.to(getattr(torch, self.score_dtype))
        return self._perturbed(self._filtered(raw), state, denoised)

    def _perturbed(self, filtered: Tensor, state: DecodeState, denoised: Denoised) -> Tensor:
        if self.temperature == 0.0:
            return filtered
        positions = state.positions.gather(1, denoised.columns)
        noise = gumbel_noise(state.seeds, state.step, positions, filtered.shape[-1])
        return filtered.double() + noise

    def propose(self, state: DecodeState, denoised: Denoised, requires: frozenset[str]) -> Proposal:
        """Proposes a token for the masked columns that were denoised, with ``region`` for all.

        Args:
            state: the state before the step.
            denoised: aligned logits at some columns.
            requires: which of ``entropy``, ``margin`` and ``drawn`` to compute, and ``region``.

        Returns:
            Proposals spread over the canvas, 0 where nothing was looked at (on a GPU columns
            without a mask may be looked at too).
        """
        if "region" not in requires and denoised.logits.device.type == "cpu":
            denoised = _at_masks(state, denoised)
        raw = denoised.logits.to(getattr(torch, self.score_dtype))
        filtered = self._filtered(raw)
        scored = filtered if self.score_on == "filtered" else raw
        if self.temperature == 0.0 and scored is filtered:
            ids, prob = greedy(scored)
        else:
            ids = self._perturbed(filtered, state, denoised).argmax(-1)
            prob = confidence(scored, ids)
        drawn = None
        if "drawn" in requires:
            drawn = prob if scored is filtered else confidence(filtered, ids)

        def spread(values: Tensor) -> Tensor:
            canvas = values.new_zeros(state.ids.shape)
            return canvas.scatter_(1, denoised.columns, values)

        return Proposal(
            ids=spread(ids),
            prob=spread(prob),
            entropy=spread(entropy(scored)) if "entropy" in requires else None,
            margin=spread(margin(scored)) if "margin" in requires else None,
            hidden=denoised.hidden,
            drawn=None if drawn is None else spread(drawn),
        )


def _at_masks(state: DecodeState, denoised: Denoised) -> Denoised:
    """Leaves out columns without a mask: each would cost a softmax over the vocabulary."""
    order = masks_first(state, denoised.columns)
    b, K, V = denoised.logits.shape
    if order.shape[1] == K:
        return denoised
    flat = (order + K * torch.arange(b)[:, None]).flatten()
    logits = denoised.logits.reshape(-1, V).index_select(0, flat).view(*order.shape, V)
    return replace(denoised, logits=logits, columns=denoised.columns.gather(1, order))
