"""From the configuration of a model to its :class:`Architecture`.

No code of a checkpoint is ever run. Options that transformers' decoders cannot express are refused
by name. Special tokens get the ids that the folder's tokenizer has for the family's tokens, since
one id may mean different tokens in related vocabularies (151666 is Dream's mask, but a tool tag in
SDAR's).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from operator import index
from pathlib import Path
from typing import Any, Literal

from lit_dlm.backbones.architecture import (
    FAMILIES,
    PLAIN_DECODERS,
    Architecture,
    Family,
    KeyLayout,
    family_of,
    original_key,
)
from lit_dlm.backbones.base import UNKNOWN_ID, BackboneSpec
from lit_dlm.backbones.experts import FIXED, WORDS, Experts, Piece, pieces
from lit_dlm.backbones.location import locate
from lit_dlm.backbones.tokenizer import (
    named_tokens,
    read_added_tokens,
    read_if_there,
    tokenizer_size,
)
from lit_dlm.system.files import fitting, read_json_object
from lit_dlm.system.options import one_of, refuse

logger = logging.getLogger(__name__)

EXPORT_KEY = "lit_dlm"
"""Key of our own exports in ``config.json``; its value is the :class:`BackboneSpec`."""
RELEASE_KEY = "lit_dlm_original"
"""Key of the family's own configuration in exports of a released model."""
MASK_TOKEN = "<|mask|>"
"""Text of the mask token that is added to an autoregressive model."""

# Values that options must have where present: with others, decoders compute something else.
_HF_OPTIONS = {"hidden_act": "silu", "use_sliding_window": False, "quantization_config": None}
_NO_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 0)
_HF_SIZES = {
    **{name: name for name in ("vocab_size", "hidden_size", "intermediate_size")},
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Options that every configuration under transformers' names must have, by our names."""
_LLADA_OPTIONS = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
    "block_group_size": 1,
    **dict.fromkeys(("num_experts", "n_experts"), 0),
    **dict.fromkeys(("alibi", "attention_layer_norm", "input_emb_norm"), False),
    **dict.fromkeys(("include_bias", "bias_for_layer_norm"), False),
    **dict.fromkeys(("clip_qkv", "rope_scaling", "quantization_config")),
}


@dataclass(frozen=True, kw_only=True)
class FromAR:
    """How an autoregressive Qwen2, Llama or Qwen3 checkpoint becomes a diffusion model.

    As Dream was made from Qwen2.5 and SDAR from Qwen3: the decoder keeps its weights, attention
    becomes bidirectional, and a mask token ``<|mask|>`` is added after the tokenizer's last token,
    unless there is one already (arXiv:2410.17891 describes the adaptation). The tokenizer's end of
    text joins those of the configuration, and its padding is taken where that names none.
    """

    shift: Literal[0, 1]
    """1 keeps next-token prediction: row ``i - 1`` predicts token ``i`` (Dream); 0 trains row ``i``
    to predict token ``i`` (SDAR). There is no default: the two need different training."""
    attention: Literal["full", "block"] = "full"
    block_size: int | None = None
    """Block length, with block attention."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A translated checkpoint description."""

    architecture: Architecture
    layout: KeyLayout
    """Naming scheme of the weight files."""
    config: Mapping[str, Any]
    """The description itself, untranslated."""
    file_vocab_size: int
    """Rows of the embedding in the weight files; fewer than the architecture's where a mask token
    is added to an autoregressive checkpoint."""
    adds_mask: bool = False
    """Whether the mask token has no row of its own in the files."""
    mask_token: str | None = None
    """Text of the mask token of a model that starts from an autoregressive checkpoint."""

    @property
    def spec(self) -> BackboneSpec:
        return self.architecture.spec()

    def pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Piece]]:
        """Returns the pieces of our tensors that are under each key of the files."""
        return pieces(shapes, lambda key: original_key(key, self.layout))


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
        spec_overrides: fields of :class:`BackboneSpec` that win over the files.
        from_ar: how to start from an autoregressive checkpoint; any other one is refused.
        source: of a given mapping, its folder or hub id, for error messages and the family's name.
        added_tokens: for a given mapping, the added tokens of its tokenizer with their ids.
    """
    overrides = dict(spec_overrides or {})
    for name in overrides:
        one_of(*(field.name for field in fields(BackboneSpec)), spec_overrides=name)
    folder = None
    if isinstance(path_or_config, Mapping):
        config: Mapping[str, Any] = path_or_config
    else:
        folder = locate(str(path_or_config), weights=False)
        config, source = read_config(folder), f"{path_or_config}: "
        added_tokens = read_added_tokens(folder)
    with fitting((folder or Path()) / "config.json"):
        tokens = added_tokens or {}
        size = None if folder is None else tokenizer_size(folder)
        if from_ar is not None:
            _expect_autoregressive(config, source)
        model_type, family = config.get("model_type"), None
        if model_type in PLAIN_DECODERS:
            values = {"family": model_type, "decoder": model_type}
            values |= _hf_sizes(config, source, decoder=model_type)
        else:
            values = {"family": family_of(config, source=source, wanted=overrides.get("family"))}
            family = FAMILIES[values["family"]]
            values |= _of_family(config, family, size, source)
        rows, mask_token = values["vocab_size"], None
        if EXPORT_KEY in config:
            values |= config[EXPORT_KEY]
        else:
            described = dict(config)
            if family is None:
                described["eos_token_id"] = _stop_ids(config, folder)
            if from_ar is not None:
                named = {} if folder is None else named_tokens(folder)
                mask_token = named.get("mask_token", MASK_TOKEN)
                # A new mask comes after the tokenizer's last token; the embedding often has unused
                # rows there, and grows where it has none.
                mask = tokens.get(mask_token, rows if size is None else size)
                described |= _ids_for_ar(described, tokens, named) | {"mask_token_id": mask}
                values |= asdict(from_ar) | {"vocab_size": max(rows, mask + 1)}
            values |= _special_ids(described, tokens, overrides, family=family, source=source)
        return Resolved(
            architecture=Architecture(**{**values, **overrides}),
            layout="hf" if family is None else family.layout,
            config=config,
            file_vocab_size=rows,
            adds_mask=mask_token is not None and tokens.get(mask_token, rows) >= rows,
            mask_token=mask_token,
        )


def _expect_autoregressive(config: Mapping[str, Any], source: str) -> None:
    model_type = config.get("model_type")
    if model_type not in PLAIN_DECODERS or EXPORT_KEY in config:
        wanted = f"an autoregressive {', '.join(PLAIN_DECODERS)} checkpoint"
        got = f"a diffusion model of model_type {model_type!r} in config.json"
        refuse(f"{source}from_ar", wanted, got)


def _ids_for_ar(
    config: Mapping[str, Any], tokens: Mapping[str, int], named: Mapping[str, str]
) -> dict[str, Any]:
    """Returns end of text and padding of an autoregressive model, its tokenizer's included."""
    ends = (*config["eos_token_id"], *_listed(tokens.get(named.get("eos_token", ""))))
    pad = config.get("pad_token_id")
    if pad is None:
        pad = tokens.get(named.get("pad_token", ""))
    return {"eos_token_id": tuple(dict.fromkeys(ends)), "pad_token_id": pad}


def _of_family(
    config: Mapping[str, Any], family: Family, tokenizer_size: int | None, source: str
) -> dict[str, Any]:
    """Returns what is known of a release of a family, except its special tokens."""
    _refuse(config, family.options, source)
    sizes = _llada_sizes if family.layout == "llada" else _hf_sizes
    values = {
        "decoder": family.decoder,
        **family.facts,
        **sizes(family.translated(config), source, decoder=family.decoder),
    }
    if family.text_vocab_size is not None:
        words = tokenizer_size or family.text_vocab_size
        values["text_vocab_size"] = words if values["vocab_size"] > words else None
    if family.facts.get("attention") == "block":
        values["block_size"] = config.get(*family.block)
    return values


def read_config(folder: Path) -> dict[str, Any]:
    """Reads ``config.json`` of a model folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: expected a model folder with config.json")
    return read_json_object(path)


def _refuse(config: Mapping[str, Any], options: Mapping[str, Any], source: str) -> None:
    for option, expected in options.items():
        if config.get(option) not in (None, expected):
            raise ValueError(
                f"{source}config.json: option {option}={config[option]!r} is not supported, "
                f"expected {expected!r}"
            )


def _need(config: Mapping[str, Any], *options: str, source: str) -> list[Any]:
    for option in options:
        if config.get(option) is None:
            raise ValueError(f"{source}config.json: option {option} is absent")
    return [config[option] for option in options]


def _hf_sizes(config: Mapping[str, Any], source: str, *, decoder: str) -> dict[str, Any]:
    """Reads sizes under transformers' names (Dream, SDAR, LLaDA-V, plain decoders, our exports)."""
    options: dict[str, Any] = _HF_OPTIONS | FIXED.get(decoder, _NO_EXPERTS)
    if decoder == "qwen2":  # Qwen2 has biases of its own
        options["attention_bias"] = False
    if decoder != "llama":
        options["mlp_bias"] = False
    _refuse(config, options, source)
    # Layers with a window of their own would compute something else under a full mask.
    kinds = sorted({"full_attention", *(config.get("layer_types") or ())})
    _refuse({"layer_types": kinds}, {"layer_types": ["full_attention"]}, source)
    needed = _need(config, *_HF_SIZES.values(), source=source)
    theta, scaling = _rotary(config, source, decoder=decoder)
    return {
        **dict(zip(_HF_SIZES, needed, strict=True)),
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": config.get("max_position_embeddings", 4096),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "initializer_range": config.get("initializer_range", 0.02),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "experts": _experts(config, source, decoder=decoder),
    }


def _rotary(
    config: Mapping[str, Any], source: str, *, decoder: str
) -> tuple[float, dict[str, Any] | None]:
    """Returns the base of the rotary frequencies, and their further settings if any."""
    scaling = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta")
    if theta is None:
        # The default of transformers' classes, for older files that say nothing.
        is_plain = config.get("model_type") in PLAIN_DECODERS
        theta = 10000.0 if is_plain else _need(config, "rope_theta", source=source)[0]
    if "type" in scaling:  # the older spelling
        scaling.setdefault("rope_type", scaling.pop("type"))
    part = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    if scaling.get("rope_type") == "longrope":  # the longest row of a batch would decide for all
        _refuse(scaling, {"rope_type": "default"}, source)
    if scaling.get("rope_type", "default") == "default":
        scaling = {}
    if decoder == "glm4_moe":
        scaling["partial_rotary_factor"] = part or 0.5  # the family's and transformers' default
    return float(theta), scaling or None


def _experts(config: Mapping[str, Any], source: str, *, decoder: str) -> Experts | None:
    """Returns a decoder's experts, if it has any; all of transformers' options are required."""
    words = WORDS.get(decoder)
    if words is None:
        return None
    needed = _need(config, *words.values(), source=source)
    return Experts(**dict(zip(words, needed, strict=True)))


def _llada_sizes(config: Mapping[str, Any], source: str, *, decoder: str) -> dict[str, Any]:
    """Reads sizes under LLaDA's names (arXiv:2502.09992, released configuration class)."""
    _refuse(config, _LLADA_OPTIONS, source)
    width, heads, layers, tied = _need(
        config, "d_model", "n_heads", "n_layers", "weight_tying", source=source
    )
    # The embedding matrix may be padded beyond the vocabulary; logits have its height.
    rows = config.get("embedding_size") or _need(config, "vocab_size", source=source)[0]
    # The ratio counts only where no width is given.
    inner = config.get("mlp_hidden_size")
    if inner is None:
        inner = int(_need(config, "mlp_ratio", source=source)[0] * width)
    kv_heads = config.get("n_kv_heads")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query_attention") else heads
    return {
        "decoder": "qwen2" if config.get("include_qkv_bias") else decoder,
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "rope_theta": float(config.get("rope_theta", 10000.0)),
        "max_positions": config.get("max_sequence_length", 4096),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "initializer_range": config.get("init_std") or 0.02,
        "tie_embeddings": bool(tied),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "logit_scale": width**-0.5 if config.get("scale_logits") else 1.0,
    }


# -- special tokens ------------------------------------------------------------------------------


def _listed(value: Any) -> tuple[int, ...]:
    """Returns the ids of an option, which may be absent, one id or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _stop_ids(config: Mapping[str, Any], folder: Path | None) -> tuple[int, ...]:
    """Returns the end-of-text ids; ``generation_config.json`` alone may say where samplers stop."""
    # Both files count: releases add the end of turn in one of them only.
    named = _listed(config.get("eos_token_id"))
    if folder is not None:
        with fitting(path := folder / "generation_config.json"):
            named += tuple(map(index, _listed(read_if_there(path).get("eos_token_id"))))
    return tuple(dict.fromkeys(named))


def _special_ids(
    config: Mapping[str, Any],
    tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    *,
    family: Family | None,
    source: str,
) -> dict[str, Any]:
    """Returns ``mask_id``, ``pad_id``, ``eos_ids`` and ``bos_id``.

    They come from the family's tokens in the tokenizer, else from the configuration. A mask or end
    of text that neither names is ``UNKNOWN_ID``, with a warning.
    """
    eos, bos = _listed(config.get("eos_token_id")), config.get("bos_token_id")
    if family is not None:
        eos = tuple(tokens[text] for text in family.eos_tokens if text in tokens) or eos
        # SDAR's configurations name an end of text as the start of text.
        bos = None if family.bos_token is None else tokens.get(family.bos_token, bos)
    # Decoding needs only the mask and an end of text; a missing one is refused where it is used.
    pad = config.get("pad_token_id")
    ids = {
        "mask_id": _mask_id(config.get("mask_token_id"), tokens, overrides, family, source),
        "eos_ids": eos or (UNKNOWN_ID,),
        # Padding is hidden from attention, so any id will do.
        "pad_id": (eos[0] if eos else 0) if pad is None else pad,
        "bos_id": bos,
    }
    for field in ("mask_id", "eos_ids"):
        if ids[field] in (UNKNOWN_ID, (UNKNOWN_ID,)) and field not in overrides:
            message = "%sthe files name no %s; decoding needs it as spec_overrides.%s"
            logger.warning(message, source, field, field)
    return ids


def _mask_id(
    named: int | None,
    tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    family: Family | None,
    source: str,
) -> int:
    """Returns the id of the mask token, on which tokenizer and configuration must agree."""
    if "mask_id" in overrides:
        return UNKNOWN_ID if named is None else named
    if family is None:
        if named is None:
            raise ValueError(
                f"{source}config.json names no mask_token_id: this is an autoregressive "
                "checkpoint; start from it with from_ar, or give the id of its mask token as "
                "spec_overrides.mask_id"
            )
        return named
    written = [tokens[text] for text in family.mask_tokens if text in tokens]
    # The end of turn shows whether the tokenizer is a released one; small models may have any.
    is_kin = written or tokens.keys() & family.eos_tokens[1:]
    if is_kin and named not in (None, *written):
        raise ValueError(
            f"{source}mask_token_id is {named} in config.json, but {family.mask_tokens[0]!r} is "
            f"{written or 'absent'} in the tokenizer; set spec_overrides.mask_id to the right one"
        )
    return next(iter(written), UNKNOWN_ID) if named is None else named
