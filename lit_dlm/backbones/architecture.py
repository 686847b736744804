"""Everything that defines a denoiser except its weights, as one plain dataclass.

A family's own configuration is first translated into an :class:`Architecture`
(:mod:`lit_dlm.backbones.families`); only this file turns it into a transformers configuration.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from lit_dlm.backbones.base import UNKNOWN_ID, BackboneSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DecoderType = Literal["qwen2", "llama", "qwen3"]

_DECODERS = {"qwen2": "Qwen2", "llama": "Llama", "qwen3": "Qwen3"}
"""How transformers' classes begin, which are imported at first use: it takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a bidirectional decoder and the facts of its :class:`BackboneSpec`."""

    decoder: DecoderType = "qwen2"
    """Layer type: Qwen2 (bias on q, k, v), Llama (no bias) or Qwen3 (norms on q and k)."""
    vocab_size: int
    """Rows of the embedding, padding rows included; logits have as many columns."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated SiLU feed-forward."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads; none means as many as query heads."""
    head_dim: int | None = None
    """Width of a head; none means ``hidden_size / num_heads``."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Extra rotary settings in transformers' words (``rope_type``, ``factor``, ...)."""
    max_positions: int = 4096
    """Longest canvas the model was made for (provenance; plain rotary positions do not use it)."""
    rms_norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""
    initializer_range: float = 0.02
    """Standard deviation of random weights."""
    tie_embeddings: bool = False
    """Whether the head shares the embedding matrix."""
    attention_bias: bool = False
    """Bias on q, k, v and o of a Llama or Qwen3 decoder (Qwen2 always has it on q, k, v)."""
    mlp_bias: bool = False
    """Bias in the feed-forward of a Llama decoder."""
    attention_dropout: float = 0.0
    """Dropout on attention weights in training; released models have none."""

    family: str = "custom"
    """See :class:`BackboneSpec`, as for all fields below."""
    mask_id: int
    pad_id: int
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    shift: Literal[0, 1] = 0
    attention: Literal["full", "block"] = "full"
    block_size: int | None = None
    block_origin: Literal["sequence", "response"] = "sequence"
    logit_scale: float = 1.0
    forbidden_ids: tuple[int, ...] = ()
    text_vocab_size: int | None = None
    positions: Literal["cumsum", "arange"] = "cumsum"

    def __post_init__(self) -> None:
        is_divided = self.head_dim is not None or self.hidden_size % self.num_heads == 0
        if not is_divided or self.num_heads % self.kv_heads:
            raise ValueError(
                f"Architecture.num_heads: expected a divisor of hidden_size {self.hidden_size} (or "
                f"head_dim) and a multiple of num_kv_heads {self.kv_heads}, got {self.num_heads}"
            )
        spec = self.spec()
        ids = [spec.mask_id, spec.pad_id, spec.bos_id or 0, *spec.eos_ids, *spec.forbidden_ids]
        if beyond := [i for i in ids if not UNKNOWN_ID <= i < self.vocab_size]:
            raise ValueError(
                f"Architecture: expected ids below vocab_size {self.vocab_size}, got {beyond}"
            )

    @property
    def kv_heads(self) -> int:
        """Key and value heads, filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head, filled in."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    def spec(self) -> BackboneSpec:
        """The part that decoding and training see."""
        values = {field.name: getattr(self, field.name) for field in fields(BackboneSpec)}
        for name in ("eos_ids", "forbidden_ids"):  # YAML and JSON give lists
            values[name] = tuple(values[name])
        return BackboneSpec(**values)

    def config_fields(self) -> dict[str, Any]:
        """The transformers configuration as plain JSON values, without its defaults."""
        # Only where they are on: a configuration without them keeps its digest.
        biases = {name: True for name in ("attention_bias", "mlp_bias") if getattr(self, name)}
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        return {
            "model_type": self.decoder,
            "architectures": [f"{_DECODERS[self.decoder]}ForCausalLM"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": self.attention_dropout,
            **biases,
            "pad_token_id": self.pad_id,
            "eos_token_id": [i for i in self.eos_ids if i != UNKNOWN_ID] or None,
            "bos_token_id": self.bos_id,
            "is_causal": False,
            "use_cache": False,
        }

    def hf_config(self) -> PreTrainedConfig:
        """A bidirectional transformers configuration."""
        # With a padding id transformers would freeze that embedding row at zero gradient; here
        # padding is hidden from attention anyway, and its id is often the end-of-text id.
        dropped = ("model_type", "is_causal", "pad_token_id")
        values = {k: v for k, v in self.config_fields().items() if k not in dropped}
        config = _of_transformers(self.decoder, "Config")(**values)
        # Not a field of these classes: the mask builders and the layers look the attribute up.
        config.is_causal = False
        return config

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """Transformers' class of the decoder with its head."""
        return _of_transformers(self.decoder, "ForCausalLM")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights by transformers' names, none allocated, a tied head left out."""
        import torch

        with torch.device("meta"):
            named = self.model_class(self.hf_config()).named_parameters()
        return {key: tuple(parameter.shape) for key, parameter in named}

    def spec_fields(self) -> dict[str, Any]:
        """The :class:`BackboneSpec` as plain JSON values."""
        fields = asdict(self.spec())
        if self.text_vocab_size is None:  # a model without pictures keeps its digest
            del fields["text_vocab_size"]
        return fields

    def digest(self) -> str:
        """SHA-256 of the configuration and the specification in canonical JSON."""
        document = {"config": self.config_fields(), "spec": self.spec_fields()}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _of_transformers(decoder: str, kind: str) -> Any:
    return getattr(import_module("transformers"), _DECODERS[decoder] + kind)
