"""Classifier-free guidance: away from what the model would write without the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone, BackboneSpec, Denoised
from lit_dlm.system.options import at_least


@dataclass(frozen=True, eq=False)
class Guidance:
    """How far logits move away from those of an empty prompt; a forward takes each row twice.

    ``(1 + scale) * logits - scale * logits_without`` (arXiv:2207.12598, eq. 6, as in the release of
    MMaDA, arXiv:2505.15809).
    """

    scale: float
    prompt_ids: list[int]  # of the prompt without its request

    def __post_init__(self) -> None:
        at_least(0, of="guidance.", scale=self.scale)


class GuidedBackbone(Backbone):
    """A backbone with full attention whose logits are guided; all else is the backbone's own."""

    def __init__(self, backbone: Backbone, guidance: Guidance) -> None:
        if backbone.spec.attention != "full":
            raise ValueError("guidance: expected a model with full attention")
        self.backbone = backbone
        self.guidance = guidance
        self._prompt = torch.tensor(guidance.prompt_ids, dtype=torch.long, device=backbone.device)
        self.spec: BackboneSpec = backbone.spec
        self.hidden_size = backbone.hidden_size
        self.num_layers = backbone.num_layers
        self.vocab_size = backbone.vocab_size
        self.max_positions = backbone.max_positions

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def is_half(self) -> bool:
        return self.backbone.is_half

    @property
    def graph_safe(self) -> bool:
        return self.backbone.graph_safe

    def denoise(
        self,
        ids: Tensor,
        *,
        pad_mask: Tensor | None = None,
        columns: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
        response_start: int | None = None,
        position_ids: Tensor | None = None,
    ) -> Denoised:
        assert position_ids is None, "a policy with a forward of its own excludes guidance"
        # One forward over the rows, followed by the same rows with the other prompt.
        assert response_start is not None, "guidance asks where the response begins"
        prompt = self._prompt  # uploaded once: a CUDA graph cannot
        by = max(len(prompt) - response_start, 0)  # extra columns for the other prompt
        real = torch.ones_like(ids, dtype=torch.bool) if pad_mask is None else pad_mask
        wide = torch.cat([ids.new_full((len(ids), by), self.spec.pad_id), ids], dim=1)
        seen = torch.cat([real.new_zeros(len(ids), by), real], dim=1)
        start = response_start + by
        other, other_seen = wide.clone(), seen.clone()
        other[:, :start].fill_(self.spec.pad_id)
        other_seen[:, :start].fill_(False)
        other[:, start - len(prompt) : start] = prompt
        other_seen[:, start - len(prompt) :].fill_(True)
        if columns is None:
            columns = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        denoised = self.backbone.denoise(
            torch.cat([wide, other]),
            pad_mask=torch.cat([seen, other_seen]),
            columns=(columns + by).repeat(2, 1),
            hidden_layers=hidden_layers,
        )
        logits, without = denoised.logits.chunk(2)
        scale = self.guidance.scale
        guided = (1.0 + scale) * logits - scale * without
        guided = guided.masked_fill(logits.isneginf(), -torch.inf)  # forbidden in both
        hidden = None if denoised.hidden is None else denoised.hidden[: len(ids), by:]
        return Denoised(logits=guided, columns=columns, hidden=hidden)
