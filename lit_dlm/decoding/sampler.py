"""The sampler: which token is proposed for a cell, and which probability scores it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_dlm.backbones.base import Denoised
from lit_dlm.decoding.state import DecodeState, Proposal
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
        if self.temperature > 0.0:
            logits = logits / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        return logits

    def propose(self, state: DecodeState, denoised: Denoised, requires: frozenset[str]) -> Proposal:
        """Proposes a token for every column that was denoised.

        Args:
            state: the state before the step.
            denoised: aligned logits at some columns.
            requires: which of ``entropy`` and ``margin`` to compute.

        Returns:
            Proposals spread over the canvas, 0 where nothing was looked at.
        """
        raw = denoised.logits.to(getattr(torch, self.score_dtype))
        filtered = self._filtered(raw)
        if self.temperature > 0.0:
            positions = state.positions.gather(1, denoised.columns)
            noise = gumbel_noise(state.seeds, state.step, positions, raw.shape[-1])
            ids = (filtered.double() + noise).argmax(-1)
        else:
            ids = filtered.argmax(-1)
        scored = filtered if self.score_on == "filtered" else raw

        def spread(values: Tensor) -> Tensor:
            canvas = values.new_zeros(state.ids.shape)
            return canvas.scatter_(1, denoised.columns, values)

        return Proposal(
            ids=spread(ids),
            prob=spread(confidence(scored, ids)),
            entropy=spread(entropy(scored)) if "entropy" in requires else None,
            margin=spread(margin(scored)) if "margin" in requires else None,
            hidden=denoised.hidden,
        )
