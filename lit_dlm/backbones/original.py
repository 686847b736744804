"""Configurations in a family's own words: the way back from an :class:`Architecture`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.base import UNKNOWN_ID
from lit_dlm.backbones.families import FAMILIES, Family


def original_config(
    architecture: Architecture, *, source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes a configuration that the family's own code would read.

    Args:
        architecture: of a family in :data:`~lit_dlm.backbones.families.FAMILIES`, or of a plain
            decoder, whose own words are transformers'.
        source: configuration of the files it came from, in the same words. What it says beyond the
            architecture is kept.

    Returns:
        Contents of ``config.json``.

    Raises:
        ValueError: the family's configuration has no words for an option.
    """
    family = FAMILIES.get(architecture.family)
    implied = {
        "shift": family.shift if family else 0,
        "attention": family.attention if family else "full",
    }
    for name, expected in implied.items():
        if getattr(architecture, name) != expected:
            raise ValueError(
                f"export: {name} is {getattr(architecture, name)!r}, which the layout of "
                f"{architecture.family} cannot express (it means {expected!r}); use layout 'hf'"
            )
    if family is None:
        mask = {"mask_token_id": architecture.mask_id}
        return {**(source or {}), **architecture.config_fields(), **mask}
    words = (_llada_words if family.layout == "llada" else _hf_words)(architecture, family)
    if source is None:
        return {**words, **_ids(architecture, family, {})}
    words["model_type"] = source["model_type"]  # a family may answer to several
    if source.get("embedding_size") == architecture.vocab_size:
        del words["vocab_size"]  # rows of padding are no vocabulary
    return {**source, **words, **_ids(architecture, family, source)}


def _ids(architecture: Architecture, family: Family, source: Mapping[str, Any]) -> dict[str, Any]:
    eos = tuple(architecture.eos_ids)
    first_only = eos == family.ids.eos or len(eos) == 1
    ids = {
        "eos_token_id": eos[0] if first_only else list(eos),
        "pad_token_id": architecture.pad_id,
        "bos_token_id": architecture.bos_id,
    }
    # The files' own spelling wins: a release may name one of several ends only.
    kept = {option: value for option, value in ids.items() if source.get(option) is None}
    kept["mask_token_id"] = architecture.mask_id
    return {option: value for option, value in kept.items() if value not in (None, UNKNOWN_ID)}


def _hf_words(architecture: Architecture, family: Family) -> dict[str, Any]:
    if architecture.logit_scale != 1.0:
        raise ValueError(
            f"export: logit_scale {architecture.logit_scale} has no option in the layout of "
            f"{architecture.family}; use layout 'hf'"
        )
    if architecture.decoder != family.decoder:
        raise ValueError(
            f"export: a {architecture.decoder} decoder is no {architecture.family} model; "
            "use layout 'hf'"
        )
    config = architecture.config_fields()
    for name in ("model_type", "architectures", "rope_parameters", "is_causal", "head_dim"):
        del config[name]
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        del config[name]
    config |= {
        "model_type": family.model_types[0],
        "rope_theta": architecture.rope_theta,
        "rope_scaling": architecture.rope_scaling,
        "use_sliding_window": False,
    }
    # Qwen2 and Llama releases leave the width of a head to the division.
    divided = architecture.head_width * architecture.num_heads == architecture.hidden_size
    if architecture.decoder == "qwen3" or not divided:
        config["head_dim"] = architecture.head_width
    if architecture.attention == "block":
        config["block_size"] = architecture.block_size
    return config


def _llada_words(architecture: Architecture, family: Family) -> dict[str, Any]:
    scaled = architecture.hidden_size**-0.5
    impossible = {
        "logit_scale": architecture.logit_scale not in (1.0, scaled),
        "head_dim": architecture.head_width * architecture.num_heads != architecture.hidden_size,
        "rope_scaling": architecture.rope_scaling is not None,
        "attention_bias": architecture.attention_bias,
        "mlp_bias": architecture.mlp_bias,
        "decoder": architecture.decoder not in ("llama", "qwen2"),
    }
    for name, cannot in impossible.items():
        if cannot:
            raise ValueError(
                f"export: {name} {getattr(architecture, name)!r} has no option in the layout of "
                f"{architecture.family}; use layout 'hf'"
            )
    return {
        "model_type": family.model_types[0],
        "d_model": architecture.hidden_size,
        "n_layers": architecture.num_layers,
        "n_heads": architecture.num_heads,
        "n_kv_heads": architecture.kv_heads,
        "multi_query_attention": architecture.kv_heads == 1,
        "mlp_hidden_size": architecture.intermediate_size,
        "embedding_size": architecture.vocab_size,
        "vocab_size": architecture.vocab_size,
        "max_sequence_length": architecture.max_positions,
        "rms_norm_eps": architecture.rms_norm_eps,
        "rope_theta": architecture.rope_theta,
        "init_std": architecture.initializer_range,
        "weight_tying": architecture.tie_embeddings,
        "attention_dropout": architecture.attention_dropout,
        "scale_logits": architecture.logit_scale != 1.0,
        "include_qkv_bias": architecture.decoder == "qwen2",
        "include_bias": False,
        "block_type": "llama",
        "block_group_size": 1,
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "attention_layer_norm": False,
        "input_emb_norm": False,
        "alibi": False,
        "rope": True,
        "rope_full_precision": True,
    }
