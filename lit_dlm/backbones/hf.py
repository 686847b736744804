"""Masked diffusion denoiser on transformers' Qwen2, Llama and Qwen3 decoders, made bidirectional.

The decoders run unchanged: only the causal flag is off and the masks are ours. This file holds the
forward; sizes come from :mod:`~lit_dlm.backbones.architecture`, checkpoints are translated in
:mod:`~lit_dlm.backbones.families`. Caches, adapters and block attention are built on top, not here.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.base import Backbone, Denoised
from lit_dlm.backbones.families import EXPORT_KEY, read_added_tokens, read_config, resolve
from lit_dlm.backbones.location import locate
from lit_dlm.backbones.visibility import key_visibility, mask_for, position_ids_for
from lit_dlm.backbones.weights import files_digest, load_weights, save_weights, weight_files
from lit_dlm.ops.alignment import aligned, first_real_columns, gather_aligned

logger = logging.getLogger(__name__)

_MODEL_CLASSES: dict[str, type[PreTrainedModel]] = {
    "qwen2": Qwen2ForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HEAD_KEY = "lm_head.weight"

DType = Literal["float32", "bfloat16", "float16"]
AttentionRoute = Literal["sdpa", "eager"]


class HFBackbone(nn.Module, Backbone):
    """A bidirectional decoder with aligned outputs (the :class:`~lit_dlm.backbones.base.Backbone`).

    Args:
        path: an embedded model (``tiny``), a local folder, or a hub id ``owner/name``. Folders of
            Dream, DiffuCoder, LLaDA, MMaDA, SDAR and TraDo work as released; so does what
            :meth:`save` wrote. Only a hub id may use the network; no code is ever loaded.
        architecture: sizes for random weights, instead of ``path``. Seed torch before.
        dtype: of the weights and activations.
        attn_implementation: ``sdpa`` (fast), or ``eager`` as a reference.
        trainable: whether parameters require gradients; frozen otherwise.
        spec_overrides: fields of :class:`~lit_dlm.backbones.base.BackboneSpec` that win over the
            files, such as ``{"positions": "arange"}``. Only with ``path``.

    Raises:
        ValueError: not exactly one of ``path`` and ``architecture``, or the folder is unusable.
    """

    _forbidden: Tensor

    def __init__(
        self,
        path: str | None = None,
        *,
        architecture: Architecture | None = None,
        dtype: DType = "float32",
        attn_implementation: AttentionRoute = "sdpa",
        trainable: bool = False,
        spec_overrides: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if (path is None) == (architecture is None):
            given = "neither" if path is None else "both"
            raise ValueError(
                f"HFBackbone: expected exactly one of path and architecture, got {given}"
            )
        if dtype not in _DTYPES:
            raise ValueError(f"HFBackbone.dtype: expected one of {list(_DTYPES)}, got {dtype!r}")
        if attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                "HFBackbone.attn_implementation: expected 'sdpa' or 'eager', "
                f"got {attn_implementation!r}"
            )
        self._weight_files: list[Path] = []
        self._weights_digest: str | None = None
        self.attn_implementation = attn_implementation
        if architecture is not None:
            if spec_overrides:
                raise ValueError(
                    "HFBackbone.spec_overrides: only with path; with architecture set its fields"
                )
            self.architecture = architecture
            model = _build(architecture, attn_implementation, _DTYPES[dtype])
        else:
            assert path is not None
            folder = locate(path)
            resolved = resolve(
                read_config(folder),
                source=f"{path}: ",
                added_tokens=read_added_tokens(folder),
                spec_overrides=spec_overrides,
            )
            self.architecture = resolved.architecture
            self._weight_files = weight_files(folder)
            model = _build_empty(self.architecture, attn_implementation, _DTYPES[dtype])
            load_weights(
                self._weight_files,
                _own_parameters(model, self.architecture),
                rename=resolved.rename,
                optional=frozenset([_HEAD_KEY] if self.architecture.tie_embeddings else []),
            )
        for layer in model.model.layers:
            # The module constant would make a mask-free SDPA call causal.
            layer.self_attn.is_causal = False
        self.model = model
        self._keep_rotary_in_float32()
        self.requires_grad_(trainable)

        self.spec = self.architecture.spec()
        self.hidden_size = self.architecture.hidden_size
        self.num_layers = self.architecture.num_layers
        self.vocab_size = self.architecture.vocab_size
        self.register_buffer(
            "_forbidden", torch.tensor(self.spec.forbidden_ids, dtype=torch.long), persistent=False
        )
        if self.spec.attention == "block":
            logger.warning(
                "%s was trained with block attention; this backbone lets every token see all",
                self.spec.family,
            )

    @property
    def dtype(self) -> torch.dtype:
        """Floating dtype of the weights."""
        return self.model.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.lm_head.weight.device

    def denoise(
        self,
        ids: Tensor,
        *,
        pad_mask: Tensor | None = None,
        columns: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> Denoised:
        """Runs one forward; only the rows at ``columns`` pass through the head.

        Args:
            ids: ``(B, L)`` int64 canvas.
            pad_mask: ``(B, L)`` bool, ``True`` on real tokens, or ``None`` without padding (the
                fast route: no mask is built and the flash kernel stays available).
            columns: ``(B, K)`` int64 canvas columns to predict; ``None`` means all.
            hidden_layers: indices among ``num_layers + 1`` hidden states: 0 is the embedding, the
                last one follows the final norm; negative ones count from the end.

        Returns:
            ``logits`` ``(B, K, V)`` in the model's dtype, scaled, ``-inf`` at forbidden ids; and
            ``hidden`` ``(B, L, H, D)`` in the order asked, or ``None``. Both are aligned: row
            ``i`` speaks of token ``i``. Differentiable.

        Raises:
            ValueError: a hidden layer does not exist.
        """
        layers = [self._hidden_index(index) for index in hidden_layers]
        starts = self._starts(pad_mask)
        visible, position_ids = self._attention_inputs(pad_mask)
        last, snapshots = self._encode(ids, visible, position_ids, layers=layers)
        if columns is None:
            batch, length = ids.shape
            columns = torch.arange(length, device=ids.device).expand(batch, -1)
            rows = aligned(last, self.spec.shift, starts=starts)
        else:
            rows = gather_aligned(last, columns, self.spec.shift, starts=starts)
        # In place: one copy of the logits less, and the head's backward does not need them.
        logits = self._head(rows).index_fill_(-1, self._forbidden, float("-inf"))
        hidden = None
        if layers:
            stacked = torch.stack([snapshots[index] for index in layers], dim=2)  # (B, L, H, D)
            hidden = aligned(stacked, self.spec.shift, starts=starts)
        return Denoised(logits=logits, columns=columns, hidden=hidden)

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Aligned logits of the whole canvas, with no id forbidden.

        Args:
            input_ids: ``(B, L)`` int64.
            mask: ``(B, L)`` bool or 0/1 integers, nonzero on real tokens; or ``(B, 1, L, L)`` bool,
                ``True`` where the query (third axis) may see the key (``B`` may be 1).
            position_ids: ``(B, L)`` int64; by default the spec's rule for a two-dimensional mask,
                else column numbers.

        Returns:
            ``(B, L, V)`` in the model's dtype; row ``i`` predicts token ``i``.

        Raises:
            ValueError: the mask has another number of dimensions, or a 4-D one is not boolean.
        """
        starts = None
        if mask is None or mask.ndim == 2:
            starts = self._starts(mask)
            visible, default_positions = self._attention_inputs(mask)
            position_ids = default_positions if position_ids is None else position_ids
        elif mask.ndim == 4 and mask.dtype == torch.bool:
            visible = mask
        else:
            raise ValueError(
                "mask: expected (B, L), or a boolean (B, 1, L, L), "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        last, _ = self._encode(input_ids, visible, position_ids)
        return self._head(aligned(last, self.spec.shift, starts=starts))

    def save(self, folder: str | Path, *, dtype: DType | None = None) -> None:
        """Writes ``config.json`` and ``model.safetensors`` for ``HFBackbone(path=folder)``.

        Equal weights give equal bytes. Tokenizer files are not known here: copy them beside.

        Args:
            folder: created when absent; files of the same name are replaced.
            dtype: of the stored weights; ``None`` keeps the current one.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stored = self.dtype if dtype is None else _DTYPES[dtype]
        parameters = _own_parameters(self.model, self.architecture)
        save_weights(
            {key: value.to(stored) for key, value in parameters.items()},
            folder / "model.safetensors",
        )
        config = self.architecture.config_fields() | {
            "dtype": str(stored).removeprefix("torch."),
            EXPORT_KEY: self.architecture.spec_fields(),
        }
        partial = folder / "config.json.partial"
        partial.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(partial, folder / "config.json")

    def describe(self) -> dict[str, Any]:
        """Provenance as plain JSON values.

        Returns:
            ``family``, ``decoder``, ``num_parameters``, ``dtype``, ``attn_implementation``,
            ``config_sha256``, and ``weights_sha256`` of the files the weights came from (``None``
            for random ones). The latter reads all files on the first call and says nothing about
            training since.
        """
        if self._weight_files and self._weights_digest is None:
            self._weights_digest = files_digest(self._weight_files)
        return {
            "family": self.spec.family,
            "decoder": self.architecture.decoder,
            "num_parameters": sum(p.numel() for p in self.parameters()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn_implementation": self.attn_implementation,
            "config_sha256": self.architecture.digest(),
            "weights_sha256": self._weights_digest,
        }

    def _hidden_index(self, index: int) -> int:
        count = self.num_layers + 1
        if not -count <= index < count:
            raise ValueError(
                f"hidden_layers: expected indices from {-count} to {count - 1}, got {index}"
            )
        return index % count

    def _starts(self, pad_mask: Tensor | None) -> Tensor | None:
        if pad_mask is None or self.spec.shift == 0:
            return None
        return first_real_columns(pad_mask)

    def _attention_inputs(self, pad_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if pad_mask is None:
            return None, None
        return key_visibility(pad_mask), position_ids_for(pad_mask, self.spec.positions)

    def _encode(
        self,
        ids: Tensor,
        visible: Tensor | None,
        position_ids: Tensor | None,
        *,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Raw last hidden rows ``(B, L, D)`` after the final norm, and raw snapshots by index."""
        decoder = self.model.model
        snapshots: dict[int, Tensor] = {}

        def keep(index: int) -> Callable[[nn.Module, Any, Tensor], None]:
            def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
                snapshots[index] = output

            return hook

        # Hooks rather than transformers' own capture: only the asked layers stay in memory.
        handles = [
            (
                decoder.embed_tokens if index == 0 else decoder.layers[index - 1]
            ).register_forward_hook(keep(index))
            for index in set(layers) - {self.num_layers}
        ]
        try:
            last = decoder(
                input_ids=ids,
                attention_mask=None
                if visible is None
                else mask_for(self.attn_implementation, visible, self.dtype),
                position_ids=position_ids,
                use_cache=False,
            ).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        snapshots[self.num_layers] = last
        return last, snapshots

    def _head(self, rows: Tensor) -> Tensor:
        logits = self.model.lm_head(rows)
        return logits if self.spec.logit_scale == 1.0 else logits * self.spec.logit_scale

    def _keep_rotary_in_float32(self) -> None:
        """Rebuilds the rotary frequencies, which lose positions when rounded to half precision."""
        decoder = self.model.model
        decoder.rotary_emb = type(decoder.rotary_emb)(self.model.config).to(self.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # ``.to(bfloat16)`` (also Lightning's true half precision) casts every buffer.
        super()._apply(fn, recurse)
        if "model" in self._modules and self.device.type != "meta":
            self._keep_rotary_in_float32()
        return self


def _build(
    architecture: Architecture, attn_implementation: str, dtype: torch.dtype
) -> PreTrainedModel:
    config = architecture.hf_config()
    config._attn_implementation = attn_implementation
    model = _MODEL_CLASSES[architecture.decoder](config)
    nn.Module.to(model, dtype)  # in place
    return model


def _build_empty(
    architecture: Architecture, attn_implementation: str, dtype: torch.dtype
) -> PreTrainedModel:
    """A model with uninitialised memory: random weights of billions of parameters take minutes."""
    with torch.device("meta"):
        model = _build(architecture, attn_implementation, dtype)
    model.to_empty(device="cpu")
    if architecture.tie_embeddings:  # leaving the meta device gave each its own memory
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _own_parameters(model: PreTrainedModel, architecture: Architecture) -> Mapping[str, Tensor]:
    """Parameters by key; a tied head is listed once, under the embedding."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if architecture.tie_embeddings:
        del named[_HEAD_KEY]
    return named
