"""From a checkpoint's own ``config.json`` to an :class:`Architecture` and a key map.

No code of a checkpoint is ever run. What the Qwen2, Llama and Qwen3 decoders cannot express is
refused by the option's name.

Ids of special tokens come from the configuration and the tokenizer and are checked against the
release: one id may mean different tokens in sister vocabularies (151666 is Dream's mask and a tool
tag in SDAR's), so whatever names an id must agree, or loading stops.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.base import UNKNOWN_ID, BackboneSpec
from lit_dlm.backbones.families import FAMILIES, PLAIN_DECODERS, KeyMap, SpecialIds, family_of
from lit_dlm.backbones.location import locate, read_json_object

if TYPE_CHECKING:
    pass

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
    if family.text_vocab_size is not None:
        length = None if folder is None else tokenizer_size(folder)
        words = family.text_vocab_size if length is None else length
        if facts["vocab_size"] > words:
            facts["text_vocab_size"] = words
    if family.attention == "block":
        facts["block_size"] = config.get("block_size", 4)
    facts |= _ids_of_family(
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
    """Reads ``config.json`` of a model folder."""
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
            **_ids_without_table(
                described, added_tokens=tokens, overrides=overrides, source=source
            ),
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
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes seconds

        if kind not in ROPE_INIT_FUNCTIONS:
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


# -- special tokens ------------------------------------------------------------------------------


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


def listed(value: Any) -> tuple[int, ...]:
    """An id option, which may be absent, one id or several, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _ids_without_table(
    config: Mapping[str, Any],
    *,
    mask_tokens: tuple[str, ...] = (),
    added_tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    source: str,
) -> dict[str, Any]:
    """``mask_id``, ``pad_id``, ``eos_ids`` and ``bos_id`` of a vocabulary without a known release.

    What nothing names, the user's overrides included, is ``UNKNOWN_ID``, with a warning; padding is
    hidden from attention, so it falls back to another id.
    """
    mask = config.get("mask_token_id")
    for token in mask_tokens:
        if token in added_tokens and "mask_id" not in overrides:
            mask = added_tokens[token] if mask is None else mask
            if mask != added_tokens[token]:
                raise ValueError(
                    f"{source}mask_id is {mask} in config.json, but the tokenizer gives {token!r} "
                    f"the id {added_tokens[token]}; set spec_overrides.mask_id to the right one"
                )
    eos = listed(config.get("eos_token_id"))
    pad = config.get("pad_token_id")
    for field, found in (("mask_id", mask is not None), ("eos_ids", bool(eos))):
        if not found and field not in overrides:
            logger.warning(
                "%sthe files name no %s; decoding needs it as spec_overrides.%s",
                source,
                field,
                field,
            )
    return {
        "mask_id": UNKNOWN_ID if mask is None else mask,
        "pad_id": (eos[0] if eos else 0) if pad is None else pad,
        "eos_ids": eos or (UNKNOWN_ID,),
        "bos_id": config.get("bos_token_id"),
    }


def _ids_of_family(
    config: Mapping[str, Any],
    *,
    name: str,
    table: SpecialIds,
    vocab_size: int,
    added_tokens: Mapping[str, int],
    overrides: Mapping[str, Any],
    source: str,
) -> dict[str, Any]:
    """The same of a known family: configuration, tokenizer and the released vocabulary must agree.

    An embedding too small for the released ids (test models) is taken for a vocabulary of its own.
    """
    if vocab_size <= max(table.mask, *table.eos):
        return _ids_without_table(
            config,
            mask_tokens=table.mask_tokens,
            added_tokens=added_tokens,
            overrides=overrides,
            source=source,
        )

    def check(field: str, value: Any, expected: Any, agrees: bool, where: str) -> None:
        if not agrees and field not in overrides:
            raise ValueError(
                f"{source}{field} is {value} in {where} but {expected} in the released {name} "
                f"vocabulary; set spec_overrides.{field} if the files are right"
            )

    mask = config.get("mask_token_id", table.mask)
    pad = config.get("pad_token_id")
    eos = listed(config.get("eos_token_id"))
    table_pad = table.eos[0] if table.pad is None else table.pad
    check("mask_id", mask, table.mask, mask == table.mask, "config.json")
    pads = (None, table_pad, *table.pad_also)
    check("pad_id", pad, table_pad, pad in pads, "config.json")
    check("eos_ids", eos, table.eos, set(eos) <= set(table.eos), "config.json")
    if added_tokens:
        written = [token for token in table.mask_tokens if token in added_tokens]
        if not written and "mask_id" not in overrides:
            taken = [text for text, number in added_tokens.items() if number == table.mask]
            raise ValueError(
                f"{source}mask_id: the tokenizer has no {table.mask_tokens[0]!r}"
                + (f", and id {table.mask} is {taken[0]!r} there" if taken else "")
                + f"; is it the tokenizer of a {name} model?"
            )
        for token in written:
            found = added_tokens[token]
            check("mask_id", found, table.mask, found == table.mask, "the tokenizer")
        for token, expected in zip(table.eos_tokens, table.eos, strict=True):
            found = added_tokens.get(token, expected)
            check("eos_ids", found, expected, found == expected, f"the tokenizer ({token})")
    return {
        "mask_id": mask,
        "pad_id": table_pad if pad is None else pad,
        "eos_ids": table.eos,
        "bos_id": table.bos,
    }


# -- autoregressive checkpoints ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FromAR:
    """How an autoregressive Qwen2, Llama or Qwen3 checkpoint becomes a diffusion model.

    As Dream was made from Qwen2.5 and SDAR from Qwen3: the decoder keeps its weights, attention
    turns bidirectional, and a mask token is added (arXiv:2410.17891 describes the adaptation).
    """

    shift: Literal[0, 1]
    """1 keeps next-token prediction: row ``i - 1`` predicts token ``i`` (Dream); 0 trains row ``i``
    to predict token ``i`` (SDAR). Give it explicitly: the other value needs other training."""
    mask_token: str = "<|mask|>"
    """How the mask token is written, where the tokenizer has one already."""
    mask_id: int | None = None
    """Its id; by default that of ``mask_token``, else the first id behind the tokenizer's last."""
    attention: Literal["full", "block"] = "full"
    """Attention layout to train."""
    block_size: int | None = None
    """Block length, with block attention."""

    def __post_init__(self) -> None:
        if self.shift not in (0, 1):
            raise ValueError(f"from_ar.shift: expected 0 or 1, got {self.shift!r}")
        if self.mask_id is not None and self.mask_id < 0:
            raise ValueError(f"from_ar.mask_id: expected an id from 0, got {self.mask_id}")

    def find_mask_id(
        self, vocab_size: int, added_tokens: Mapping[str, int], *, tokenizer_size: int | None
    ) -> int:
        """Decides the id of the mask token.

        Args:
            vocab_size: rows of the checkpoint's embedding.
            added_tokens: text to id of the tokenizer's added tokens.
            tokenizer_size: ids that the tokenizer uses; ``None`` without a tokenizer.

        Returns:
            The id. From ``vocab_size`` on, the embedding and the head have to grow.
        """
        known = added_tokens.get(self.mask_token)
        if self.mask_id is None:
            if known is not None:
                return known
            return vocab_size if tokenizer_size is None else tokenizer_size
        if known is not None and known != self.mask_id:
            raise ValueError(
                f"from_ar.mask_id: got {self.mask_id}, but the tokenizer gives "
                f"{self.mask_token!r} the id {known}"
            )
        if known is None and tokenizer_size is not None and self.mask_id < tokenizer_size:
            raise ValueError(
                f"from_ar.mask_id: got {self.mask_id}, which the tokenizer uses for another token; "
                f"expected an id from {tokenizer_size} on, or None"
            )
        return self.mask_id

    def spec_fields(self) -> dict[str, Any]:
        """The fields of the backbone's specification that this decides."""
        return {"shift": self.shift, "attention": self.attention, "block_size": self.block_size}


def tokenizer_size(folder: Path) -> int | None:
    """One more than the largest id of a folder's tokenizer.

    Args:
        folder: with ``tokenizer.json`` or ``vocab.json``, and added tokens.

    Returns:
        The size, or ``None`` without a vocabulary file.
    """
    largest = max(read_added_tokens(folder).values(), default=-1)
    if (folder / "tokenizer.json").is_file():
        model = read_json_object(folder / "tokenizer.json").get("model", {})
        vocabulary = model.get("vocab", {})
        # Unigram models list pairs in the order of their ids.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max([largest, *ids]) + 1
    if (folder / "vocab.json").is_file():
        return max([largest, *read_json_object(folder / "vocab.json").values()]) + 1
    return None
