"""The sampler: which token is proposed for a cell, and which probability scores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dlm.backbones.base import BackboneSpec, Denoised
from lit_dlm.decoding.state import DecodeState, Proposal
from lit_dlm.system.options import at_least, within
from lit_dlm.tensors.sampling import (
    RUN,
    arg_max,
    cell_gumbel_noise,
    confidence,
    draw_by_runs,
    entropy,
    gumbel_noise,
    margin,
    perturbed_by_runs,
    survivors,
)

Keys = tuple[Tensor, Tensor, Tensor]
"""Seeds and steps ``(n,)`` and positions ``(n, 1)``: what the noise of cells depends on."""
CHUNK_ELEMENTS = 1_000_000
"""Logits scored at a time: few enough to stay in a CPU's cache, and negligible beside the logits
of a window with a large vocabulary."""

_GPU_CHUNK_ELEMENTS = 40_000_000
"""256 cells of the largest vocabularies at once: float32 logits and a softmax take 320 MB."""
_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prob": confidence,
    "entropy": lambda logits, _: entropy(logits),
    "margin": lambda logits, _: margin(logits),
}


class Sampler:
    """Greedy or Gumbel-max proposals, scored on the raw or on the filtered distribution.

    The two families differ in what a confidence is: LLaDA reads it from the raw softmax even when
    the token was drawn with noise, Dream from the distribution after temperature, top-p and top-k.
    Filtering therefore changes the order of positions and not only the tokens, which is why every
    filter is explicit here and off by default.

    Args:
        temperature: 0 takes the most probable token; above 0 draws.
        top_k: keep the ``k`` most probable tokens.
        top_p: keep the nucleus of this probability.
        score_on: distribution that confidence, entropy and margin are read from.
        score_dtype: precision of these; LLaDA's release uses float64.
        allowed_ids: first id that may be proposed and the first one after the last, such as
            those of picture tokens; by default the model's words.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        score_on: Literal["raw", "filtered"] = "raw",
        score_dtype: Literal["float32", "float64"] = "float32",
        allowed_ids: tuple[int, int] | None = None,
    ) -> None:
        at_least(0, temperature=temperature)
        at_least(1, top_k=top_k)
        within("(0, 1]", top_p=top_p)
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.score_on = score_on
        self.score_dtype = score_dtype
        self.allowed_ids = None if allowed_ids is None else (allowed_ids[0], allowed_ids[1])
        if self.allowed_ids is not None and not 0 <= self.allowed_ids[0] < self.allowed_ids[1]:
            raise ValueError(f"allowed_ids: expected two rising ids, got {allowed_ids}")

    def describe(self) -> dict[str, Any]:
        """Returns the settings as JSON types; ``allowed_ids`` only where given."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name != "allowed_ids" or value is not None
        }

    @property
    def is_filtered(self) -> bool:
        """Whether some ids are left out: a look at the largest logits may have to be repeated."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1.0)

    def id_range(self, spec: BackboneSpec) -> tuple[int, int | None]:
        """Returns the first id that may be proposed and the end of the range, or ``None``."""
        return self.allowed_ids or (0, spec.text_vocab_size)

    def restrict(self, denoised: Denoised, spec: BackboneSpec) -> None:
        """Sets the logits of ids that may not be proposed to ``-inf``, in place."""
        first, end = self.id_range(spec)
        if first > 0:
            denoised.logits[..., :first].fill_(-torch.inf)
        if end is not None:
            denoised.logits[..., end:].fill_(-torch.inf)

    def perturbed(self, state: DecodeState, denoised: Denoised) -> Tensor:
        """``(b, K, V)`` filtered logits plus any noise: the largest entry is the proposal."""
        parts = []
        for raw, keys in self._chunks(state, denoised.logits, denoised.columns):
            values, names = self._filtered(raw)
            values = self._perturbed(values, names, keys)
            if names is not None:
                values = torch.full_like(raw, -torch.inf, dtype=values.dtype).scatter(
                    1, names, values
                )
            parts.append(values)
        return torch.cat(parts).view(denoised.logits.shape)

    def propose(self, state: DecodeState, denoised: Denoised, requires: frozenset[str]) -> Proposal:
        """Proposes a token for each denoised column; 0 elsewhere on the canvas.

        Cells are scored in chunks, so that this takes little memory beside the logits.
        ``requires`` names what is scored: ``entropy``, ``margin``, ``drawn``, ``raw_prob``, ...
        """
        columns = denoised.columns
        scores: dict[str, Tensor] = {}
        first = 0
        for raw, keys in self._chunks(state, denoised.logits, columns):
            part = slice(first, first + len(raw))
            first = part.stop
            result = self._scores(raw, keys, requires)
            if len(raw) == columns.numel():
                scores = result
                break
            for name, values in result.items():
                # Filled rather than joined at the end: small tensors that outlive the large ones
                # of a chunk would leave holes in the host's memory.
                scores.setdefault(name, values.new_empty(columns.numel()))[part] = values

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(state.ids.shape).scatter_(1, columns, values.view_as(columns))

        spread_scores = {name: spread(values) for name, values in scores.items()}
        return Proposal(hidden=denoised.hidden, **spread_scores)

    def _chunks(
        self, state: DecodeState, logits: Tensor, columns: Tensor
    ) -> Iterator[tuple[Tensor, Keys]]:
        """Yields logits ``(n, V)`` of cells, and what their noise depends on."""
        V = logits.shape[-1]
        flat, dtype = logits.reshape(-1, V), getattr(torch, self.score_dtype)
        steps = state.step[:, None].expand_as(columns).flatten()
        seeds = state.seeds[:, None].expand_as(columns).flatten()
        positions = seeds
        if self.temperature > 0.0:
            # Of the sample and not of the canvas: padding must not change a draw.
            positions = state.positions.gather(1, columns).flatten()
        # Scores are taken in float32 or float64: a copy of all logits at once would take twice or
        # four times their memory.
        elements = CHUNK_ELEMENTS if logits.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
        size = max(elements // V, 1)
        for first in range(0, len(seeds), size):
            part = slice(first, first + size)
            yield flat[part].to(dtype), (seeds[part], steps[part], positions[part, None])

    def _filtered(self, raw: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the logits to draw proposals from, and their ids; see :func:`survivors`."""
        logits = raw if self.temperature in (0.0, 1.0) else raw / self.temperature
        return survivors(logits, top_k=self.top_k, top_p=self.top_p)

    def _perturbed(self, values: Tensor, names: Tensor | None, keys: Keys) -> Tensor:
        """Adds noise to the logits of the remaining ids, in float64; greedy samplers add none."""
        if self.temperature == 0.0:
            return values
        if self._draws_by_runs(values):
            return perturbed_by_runs(values, _run_noise(values, keys))
        tokens = torch.arange(values.shape[1], device=values.device)
        if names is not None:
            tokens = names[:, None]
        return gumbel_noise(*keys, tokens)[:, 0].add_(values)

    def _draws_by_runs(self, values: Tensor) -> bool:
        # Under a filter a draw would depend on how many ids ``survivors`` looked at.
        return values.shape[1] > RUN and not self.is_filtered

    def _scores(self, raw: Tensor, keys: Keys, requires: frozenset[str]) -> dict[str, Tensor]:
        """Returns proposed ids and the required scores, ``(n,)`` each, from logits ``(n, V)``."""
        values, names = raw, None
        if self.score_on == "filtered" or self.temperature > 0.0 or "drawn" in requires:
            values, names = self._filtered(raw)
        if self.temperature > 0.0 and self._draws_by_runs(values):
            place = draw_by_runs(values, _run_noise(values, keys))
        else:
            place = arg_max(self._perturbed(values, names, keys))
        ids = place if names is None else names.gather(1, place[:, None])[:, 0]
        scored = (raw, ids) if self.score_on == "raw" else (values, place)
        result = {"ids": ids}
        for prefix, (logits, at) in (("", scored), ("raw_", (raw, ids))):
            for name, score in _SCORES.items():
                if prefix + name in requires | {"prob"}:
                    is_known = name in result and logits is scored[0]
                    result[prefix + name] = result[name] if is_known else score(logits, at)
        if "drawn" in requires:
            is_known = values is scored[0]
            result["drawn"] = result["prob"] if is_known else confidence(values, place)
        return result


def _run_noise(values: Tensor, keys: Keys) -> Tensor:
    seeds, steps, positions = keys
    return cell_gumbel_noise(seeds, steps, positions[:, 0], RUN - (-values.shape[1] // RUN))
