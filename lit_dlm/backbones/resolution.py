"""From a checkpoint's own ``config.json`` to an :class:`Architecture` and a key map.

No code of a checkpoint is ever run. What the Qwen2, Llama and Qwen3 decoders cannot express is
refused by the option's name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.autoregressive import FromAR, tokenizer_size
from lit_dlm.backbones.base import BackboneSpec
from lit_dlm.backbones.families import FAMILIES, PLAIN_DECODERS, family_of
from lit_dlm.backbones.keys import KeyMap
from lit_dlm.backbones.location import locate, read_json_object
from lit_dlm.backbones.special_tokens import (
    ids_of_family,
    ids_without_table,
    listed,
    read_added_tokens,
)

logger = logging.getLogger(__name__)

EXPORT_KEY = "lit_dlm"
"""Key of our own exports in ``config.json``; its value is the :class:`BackboneSpec`."""

_SPEC_FIELDS = frozenset(field.name for field in fields(BackboneSpec))

# Options whose other values change the computation in a way our decoders do not have.
_ONLY_HF: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "quantization_config": (None,),
}
_ONLY_LLADA: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (None, True),
    "alibi": (None, False),
    "rope": (None, True),
    "attention_layer_norm": (None, False),
    "block_group_size": (None, 1),
    "include_bias": (None, False),
    "bias_for_layer_norm": (None, False),
    "input_emb_norm": (None, False),
    "clip_qkv": (None,),
    "rope_scaling": (None,),
    "num_experts": (None, 0),
    "n_experts": (None, 0),
    "quantization_config": (None,),
}
_UNUSED_DROPOUTS = ("residual_dropout", "embedding_dropout")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A translated checkpoint description."""

    architecture: Architecture
    keys: KeyMap
    """Between the keys of the weight files and ours."""
    config: Mapping[str, Any]
    """The description itself, as the files have it."""
    file_vocab_size: int
    """Rows of the embedding in the weight files; fewer than the architecture's where an
    autoregressive checkpoint gets its mask token."""
    adds_mask: bool = False
    """Whether the mask token has no row of its own in the files."""

    @property
    def spec(self) -> BackboneSpec:
        """What decoding and training need to know."""
        return self.architecture.spec()

    @property
    def hf_config(self) -> PreTrainedConfig:
        """The bidirectional transformers configuration."""
        return self.architecture.hf_config()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Keys and shapes that the weight files should hold, in their own names.

        Returns:
            Key to shape; a tied head is not listed (a file may hold it or not).
        """
        shapes = replace(self.architecture, vocab_size=self.file_vocab_size).parameter_shapes()
        return {self.keys.original(key): shape for key, shape in shapes.items()}


def resolve(
    path_or_config: str | Path | Mapping[str, Any],
    *,
    spec_overrides: Mapping[str, Any] | None = None,
    from_ar: FromAR | None = None,
    source: str = "",
    added_tokens: Mapping[str, int] | None = None,
) -> Resolved:
    """Translates a checkpoint's description; weights are not touched.

    Args:
        path_or_config: an embedded name, a folder, a hub id, or the contents of a ``config.json``.
        spec_overrides: fields of :class:`BackboneSpec` that win over the files and the table.
        from_ar: how to start from an autoregressive checkpoint; it must be one.
        source: of a given mapping, for error texts and family names; a path is its own.
        added_tokens: of a given mapping: added tokens of its tokenizer with their ids.

    Returns:
        The architecture and the key map.

    Raises:
        ValueError: the model type or an option is not supported, an id contradicts the family's
            table or tokenizer, or a plain decoder has no mask token.
    """
    overrides = dict(spec_overrides or {})
    unknown = sorted(set(overrides) - _SPEC_FIELDS)
    if unknown:
        raise ValueError(
            f"spec_overrides: unknown field {unknown[0]!r}, expected some of {sorted(_SPEC_FIELDS)}"
        )
    folder = None
    if isinstance(path_or_config, Mapping):
        config: Mapping[str, Any] = path_or_config
    else:
        folder = locate(str(path_or_config), weights=False)
        config, source = read_config(folder), f"{path_or_config}: "
        added_tokens = read_added_tokens(folder)
    tokens = added_tokens or {}

    plain = config.get("model_type") in PLAIN_DECODERS
    if from_ar is not None and (not plain or EXPORT_KEY in config):
        raise ValueError(
            f"{source}from_ar: expected an autoregressive qwen2, llama or qwen3 checkpoint, got "
            f"model_type {config.get('model_type')!r}"
            + (" that is a diffusion model already" if plain else "")
        )
    if plain:
        return _plain(config, tokens, overrides, from_ar, source=source, folder=folder)

    name = family_of(config, source=source, wanted=overrides.get("family"))
    family = FAMILIES[name]
    if family.layout == "llada":
        facts = _llada_sizes(config, source)
    else:
        facts = {"decoder": family.decoder, **_hf_sizes(config, source, decoder=family.decoder)}
    facts |= {"family": name, "shift": family.shift, "attention": family.attention}
    if family.attention == "block":
        facts["block_size"] = config.get("block_size", 4)
    facts |= ids_of_family(
        config,
        name=name,
        table=family.ids,
        vocab_size=facts["vocab_size"],
        added_tokens=tokens,
        overrides=overrides,
        source=source,
    )
    return Resolved(
        architecture=Architecture(**{**facts, **overrides}),
        keys=KeyMap(layout=family.layout, ignored=family.ignored_keys),
        config=config,
        file_vocab_size=facts["vocab_size"],
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Reads ``config.json`` of a model folder.

    Raises:
        ValueError: the file is absent or no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: expected a model folder with config.json")
    return read_json_object(path)


def _plain(
    config: Mapping[str, Any],
    tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    from_ar: FromAR | None,
    *,
    source: str,
    folder: Path | None,
) -> Resolved:
    """Our own exports, and autoregressive checkpoints under transformers' names."""
    decoder = PLAIN_DECODERS[config["model_type"]]
    facts = {"decoder": decoder, **_hf_sizes(config, source, decoder=decoder)}
    rows = facts["vocab_size"]
    if EXPORT_KEY in config:
        facts |= config[EXPORT_KEY]
    else:
        # The token a sampler stops at is often named only there.
        stops = folder / "generation_config.json" if folder else None
        eos = listed(config.get("eos_token_id"))
        if stops is not None and stops.is_file():
            eos += listed(read_json_object(stops).get("eos_token_id"))
        described = {**config, "eos_token_id": tuple(dict.fromkeys(eos))}
        if from_ar is not None:
            if "mask_id" in overrides:
                raise ValueError("spec_overrides.mask_id: with from_ar use from_ar.mask_id")
            size = None if folder is None else tokenizer_size(folder)
            described["mask_token_id"] = from_ar.find_mask_id(rows, tokens, tokenizer_size=size)
            facts |= from_ar.spec_fields()
        elif described.get("mask_token_id") is None and "mask_id" not in overrides:
            raise ValueError(
                f"{source}config.json names no mask_token_id: this is an autoregressive "
                f"{config['model_type']} checkpoint; start from it with from_ar, or give the id "
                "of its mask token as spec_overrides.mask_id"
            )
        facts |= {
            "family": config["model_type"],
            **ids_without_table(described, added_tokens=tokens, overrides=overrides, source=source),
        }
        if from_ar is not None:
            facts["vocab_size"] = max(rows, facts["mask_id"] + 1)
    return Resolved(
        architecture=Architecture(**{**facts, **overrides}),
        keys=KeyMap(layout="hf"),
        config=config,
        file_vocab_size=rows,
        adds_mask=from_ar is not None and from_ar.mask_token not in tokens,
    )


def _refuse(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], source: str) -> None:
    for option, values in allowed.items():
        value = config.get(option)
        if value not in values:
            raise ValueError(
                f"{source}config.json: option {option}={value!r} is not supported, "
                f"expected one of {[v for v in values if v is not None]}"
            )
    for option in _UNUSED_DROPOUTS:
        if config.get(option):
            logger.warning(
                "%soption %s=%s takes no effect here", source, option, config.get(option)
            )


def _need(config: Mapping[str, Any], option: str, source: str) -> Any:
    value = config.get(option)
    if value is None:
        raise ValueError(f"{source}config.json: option {option} is absent")
    return value


def _hf_sizes(config: Mapping[str, Any], source: str, *, decoder: str) -> dict[str, Any]:
    """Sizes under transformers' own names (Dream, SDAR, LLaDA-V, plain decoders, our exports)."""
    biases = {
        "attention_bias": (None, False) if decoder == "qwen2" else (None, False, True),
        "mlp_bias": (None, False, True) if decoder == "llama" else (None, False),
    }
    _refuse(config, {**_ONLY_HF, **biases}, source)
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ValueError(
            f"{source}config.json: option layer_types={sorted(kinds)} is not supported, "
            "expected 'full_attention' only"
        )
    rope = dict(config.get("rope_parameters") or {})
    scaling = {**rope, **(config.get("rope_scaling") or {})}
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta")
    if theta is None and config.get("model_type") in PLAIN_DECODERS:
        theta = 10000.0  # what transformers' classes take where older files say nothing
    if theta is None:
        theta = _need(config, "rope_theta", source)
    if "type" in scaling:  # the older spelling
        scaling.setdefault("rope_type", scaling.pop("type"))
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        scaling = {}
    elif kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"{source}config.json: option rope_scaling.rope_type={kind!r} is not supported, "
            f"expected one of {sorted(['default', *ROPE_INIT_FUNCTIONS])}"
        )
    return {
        "vocab_size": _need(config, "vocab_size", source),
        "hidden_size": _need(config, "hidden_size", source),
        "intermediate_size": _need(config, "intermediate_size", source),
        "num_layers": _need(config, "num_hidden_layers", source),
        "num_heads": _need(config, "num_attention_heads", source),
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "rope_theta": float(theta),
        "rope_scaling": scaling or None,
        "max_positions": config.get("max_position_embeddings", 4096),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "initializer_range": config.get("initializer_range", 0.02),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
    }


def _llada_sizes(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Sizes under LLaDA's names (arXiv:2502.09992, released configuration class)."""
    _refuse(config, _ONLY_LLADA, source)
    width = _need(config, "d_model", source)
    heads = _need(config, "n_heads", source)
    kv_heads = config.get("n_kv_heads")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query_attention") else heads
    inner = config.get("mlp_hidden_size")
    return {
        "decoder": "qwen2" if config.get("include_qkv_bias") else "llama",
        # The embedding matrix may be padded beyond the vocabulary; logits have its height.
        "vocab_size": config.get("embedding_size") or _need(config, "vocab_size", source),
        "hidden_size": width,
        "intermediate_size": int(_need(config, "mlp_ratio", source) * width)
        if inner is None
        else inner,
        "num_layers": _need(config, "n_layers", source),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "rope_theta": float(config.get("rope_theta", 10000.0)),
        "max_positions": config.get("max_sequence_length", 4096),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "initializer_range": config.get("init_std") or 0.02,
        "tie_embeddings": bool(_need(config, "weight_tying", source)),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "logit_scale": width**-0.5 if config.get("scale_logits") else 1.0,
    }
