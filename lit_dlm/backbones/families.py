"""From a checkpoint's own ``config.json`` to an :class:`Architecture`, and from its keys to ours.

No code of a checkpoint is ever run. Dream and DiffuCoder are Qwen2 decoders, SDAR and TraDo Qwen3
decoders, both under transformers' key names; LLaDA and MMaDA are Llama decoders (Qwen2 with
``include_qkv_bias``) under names of their own. What these decoders cannot express is refused by the
option's name. Released ids of special tokens are listed here and compared with the files, since
one id may mean different tokens in sister vocabularies (151666 is Dream's mask and a tool tag in
SDAR's).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lit_dlm.backbones.architecture import Architecture, Decoder
from lit_dlm.backbones.base import BackboneSpec
from lit_dlm.backbones.location import read_json_object

logger = logging.getLogger(__name__)

EXPORT_KEY = "lit_dlm"
"""Key of our own exports in ``config.json``; its value is the :class:`BackboneSpec`."""

_SPEC_FIELDS = frozenset(field.name for field in fields(BackboneSpec))


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Special tokens of a released vocabulary."""

    mask_token: str
    """How the mask token is written."""
    mask: int
    """Its id."""
    eos: tuple[int, ...]
    """End of text, then end of turn."""
    pad: int
    """Padding id used where the configuration names none."""
    pad_also: tuple[int, ...] = ()
    """Other padding ids that releases of the family use."""
    bos: int | None = None
    """Start of text."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is common to the checkpoints of a family."""

    model_type: str
    """``model_type`` of its ``config.json``."""
    layout: Literal["hf", "llada"]
    """Whose names the options and keys have."""
    ids: SpecialIds
    decoder: Decoder
    shift: Literal[0, 1] = 0
    attention: Literal["full", "block"] = "full"


_DREAM_IDS = SpecialIds(
    mask_token="<|mask|>",
    mask=151666,
    eos=(151643, 151645),
    pad=151643,
    pad_also=(151667,),
    bos=151665,
)
_LLADA_IDS = SpecialIds(
    mask_token="<|mdm_mask|>", mask=126336, eos=(126081, 126348), pad=126081, bos=126080
)
_SDAR_IDS = SpecialIds(mask_token="<MASK>", mask=151669, eos=(151643, 151645), pad=151643)

FAMILIES: dict[str, Family] = {
    "dream": Family(model_type="Dream", layout="hf", decoder="qwen2", shift=1, ids=_DREAM_IDS),
    "diffucoder": Family(model_type="Dream", layout="hf", decoder="qwen2", shift=1, ids=_DREAM_IDS),
    "llada": Family(model_type="llada", layout="llada", decoder="llama", ids=_LLADA_IDS),
    "mmada": Family(model_type="mmada", layout="llada", decoder="llama", ids=_LLADA_IDS),
    "sdar": Family(
        model_type="sdar", layout="hf", decoder="qwen3", attention="block", ids=_SDAR_IDS
    ),
    "trado": Family(
        model_type="sdar", layout="hf", decoder="qwen3", attention="block", ids=_SDAR_IDS
    ),
}

_PLAIN_DECODERS: dict[str, Decoder] = {"qwen2": "qwen2", "llama": "llama", "qwen3": "qwen3"}

# Options whose other values change the computation in a way our decoders do not have.
_ONLY_HF: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
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
    "quantization_config": (None,),
}

_LLADA_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_LLADA_TOP_NAMES = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",
}
_LLADA_BLOCK_KEY = re.compile(r"model\.transformer\.blocks\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A translated checkpoint description."""

    architecture: Architecture
    rename: Callable[[str], str | None]
    """Maps a key of the weight files to ours; ``None`` drops a key that carries no weight."""


def resolve(
    config: Mapping[str, Any],
    *,
    source: str = "",
    added_tokens: Mapping[str, int] | None = None,
    spec_overrides: Mapping[str, Any] | None = None,
) -> Resolved:
    """Translates a checkpoint's configuration.

    Args:
        config: contents of its ``config.json``.
        source: folder or hub id, for error texts and to tell DiffuCoder from Dream and TraDo from
            SDAR, which share a ``model_type``.
        added_tokens: added tokens of its tokenizer with their ids, to check the mask id.
        spec_overrides: fields of :class:`BackboneSpec` that win over the files and the table.

    Returns:
        The architecture and the key map.

    Raises:
        ValueError: the model type or an option is not supported, an id is not given anywhere, or
            an id contradicts the family's table or tokenizer.
    """
    overrides = dict(spec_overrides or {})
    unknown = sorted(set(overrides) - _SPEC_FIELDS)
    if unknown:
        raise ValueError(
            f"spec_overrides: unknown field {unknown[0]!r}, expected some of {sorted(_SPEC_FIELDS)}"
        )
    model_type = config.get("model_type")
    if EXPORT_KEY in config:
        facts = {"decoder": model_type, **_hf_sizes(config, source)}
        return Resolved(
            architecture=Architecture(**{**facts, **config[EXPORT_KEY], **overrides}),
            rename=_hf_key,
        )
    if model_type in _PLAIN_DECODERS:
        facts = {"decoder": _PLAIN_DECODERS[model_type], **_hf_sizes(config, source)}
        ids = _ids_without_table(config, source=source, overrides=overrides)
        merged = {"family": model_type, **facts, **ids, **overrides}
        return Resolved(architecture=Architecture(**merged), rename=_hf_key)

    name = _family_name(model_type, source=source, wanted=overrides.get("family"))
    family = FAMILIES[name]
    if family.layout == "llada":
        facts, rename = _llada_sizes(config, source), _llada_key
    else:
        facts, rename = {"decoder": family.decoder, **_hf_sizes(config, source)}, _hf_key
    facts |= {"family": name, "shift": family.shift, "attention": family.attention}
    if family.attention == "block":
        facts["block_size"] = config.get("block_size", 4)
    facts |= _ids(
        config,
        name=name,
        table=family.ids,
        vocab_size=facts["vocab_size"],
        added_tokens=added_tokens or {},
        overrides=overrides,
        source=source,
    )
    return Resolved(architecture=Architecture(**{**facts, **overrides}), rename=rename)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads ``config.json`` of a model folder.

    Raises:
        ValueError: the file is absent or no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: expected a model folder with config.json")
    return read_json_object(path)


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Collects the added tokens of a folder's tokenizer files without building a tokenizer.

    Args:
        folder: model folder; tokenizer files may be absent.

    Returns:
        Token text to id, from ``tokenizer_config.json``, ``added_tokens.json`` and
        ``tokenizer.json``, the later file winning.
    """
    found: dict[str, int] = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        for token_id, entry in read_json_object(path).get("added_tokens_decoder", {}).items():
            found[entry["content"]] = int(token_id)
    path = folder / "added_tokens.json"
    if path.is_file():
        found |= read_json_object(path)
    path = folder / "tokenizer.json"
    if path.is_file():
        for entry in read_json_object(path).get("added_tokens", []):
            found[entry["content"]] = int(entry["id"])
    return found


def _family_name(model_type: Any, *, source: str, wanted: str | None) -> str:
    names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    if not names:
        known = sorted({f.model_type for f in FAMILIES.values()} | set(_PLAIN_DECODERS))
        raise ValueError(
            f"{source}config.json: model_type {model_type!r} is not supported, "
            f"expected one of {known}"
        )
    if wanted in names:
        return str(wanted)
    hinted = [name for name in names if name in Path(source).name.lower()]
    return hinted[-1] if hinted else names[0]


def _refuse(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], source: str) -> None:
    for option, values in allowed.items():
        value = config.get(option)
        if value not in values:
            raise ValueError(
                f"{source}config.json: option {option}={value!r} is not supported, "
                f"expected one of {[v for v in values if v is not None]}"
            )


def _need(config: Mapping[str, Any], option: str, source: str) -> Any:
    value = config.get(option)
    if value is None:
        raise ValueError(f"{source}config.json: option {option} is absent")
    return value


def _hf_sizes(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Sizes under transformers' own names (Dream, SDAR, plain decoders, our exports)."""
    _refuse(config, _ONLY_HF, source)
    rope = dict(config.get("rope_parameters") or {})
    scaling = {**rope, **(config.get("rope_scaling") or {})}
    theta = scaling.pop("rope_theta", None) or _need(config, "rope_theta", source)
    if "type" in scaling:  # the older spelling
        scaling.setdefault("rope_type", scaling.pop("type"))
    if scaling.get("rope_type", "default") == "default":
        scaling = {}
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
        "tie_embeddings": bool(_need(config, "weight_tying", source)),
        "logit_scale": width**-0.5 if config.get("scale_logits") else 1.0,
    }


def _hf_key(key: str) -> str | None:
    return None if key.endswith("rotary_emb.inv_freq") else key


def _llada_key(key: str) -> str | None:
    """``ff_out`` names two matrices: the head at the top and the down projection of a block."""
    if key in _LLADA_TOP_NAMES:
        return _LLADA_TOP_NAMES[key]
    match = _LLADA_BLOCK_KEY.fullmatch(key)
    if match is None or match[2] not in _LLADA_BLOCK_NAMES:
        return _hf_key(key)
    return f"model.layers.{match[1]}.{_LLADA_BLOCK_NAMES[match[2]]}.{match[3]}"


def _listed(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) else (value,)


def _ids_without_table(
    config: Mapping[str, Any], *, source: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Ids from the configuration alone; whatever it lacks must come from the overrides."""
    eos = _listed(config.get("eos_token_id"))
    found = {
        "mask_id": config.get("mask_token_id"),
        "pad_id": config.get("pad_token_id"),
        "eos_ids": eos or None,
        "bos_id": config.get("bos_token_id"),
    }
    for field in ("mask_id", "pad_id", "eos_ids"):
        if found[field] is None and field not in overrides:
            raise ValueError(
                f"{source}config.json names no {field}; give it as spec_overrides.{field}"
            )
    return found


def _ids(
    config: Mapping[str, Any],
    *,
    name: str,
    table: SpecialIds,
    vocab_size: int,
    added_tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    source: str,
) -> dict[str, Any]:
    """Ids of a known family: the configuration, checked against the table and the tokenizer."""
    if vocab_size <= max(table.mask, *table.eos):
        # A reduced vocabulary, as test models have, cannot hold the released ids.
        return _ids_without_table(config, source=source, overrides=overrides)
    mask = config.get("mask_token_id", table.mask)
    pad = config.get("pad_token_id")
    eos = _listed(config.get("eos_token_id"))
    token_id = added_tokens.get(table.mask_token, table.mask)
    disagreements = [
        ("mask_id", mask, table.mask, mask != table.mask),
        ("mask_id", token_id, table.mask, token_id != table.mask),
        ("pad_id", pad, table.pad, pad not in (None, table.pad, *table.pad_also)),
        ("eos_ids", eos, table.eos, not set(eos) <= set(table.eos)),
    ]
    for field, value, expected, differs in disagreements:
        if differs and field not in overrides:
            raise ValueError(
                f"{source}: {field} is {value} in the files but {expected} in the released "
                f"{name} vocabulary; set spec_overrides.{field} if the files are right"
            )
    return {
        "mask_id": mask,
        "pad_id": table.pad if pad is None else pad,
        "eos_ids": table.eos,
        "bos_id": table.bos,
    }
