"""The model families: special tokens, names of weights and options, and the way back to them.

Dream and DiffuCoder are Qwen2 decoders, SDAR and TraDo Qwen3 decoders, LLaDA-V's text tower a Llama
decoder, all under transformers' key names; LLaDA and MMaDA are Llama decoders (Qwen2 with
``include_qkv_bias``) under names of their own. :mod:`~lit_dlm.backbones.resolution` reads
configurations with these tables; :func:`original_config` exports an :class:`Architecture` as the
family's original ``config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_dlm.backbones.architecture import Architecture, DecoderType
from lit_dlm.backbones.base import UNKNOWN_ID

KeyLayout = Literal["hf", "llada"]
PEFTTask = Literal["CAUSAL_LM", "FEATURE_EXTRACTION"]


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Special tokens of a released vocabulary."""

    mask_tokens: tuple[str, ...]
    """How the mask token is written; sister files of one release may differ."""
    mask: int
    """Its id."""
    eos_tokens: tuple[str, str]
    """How end of text and end of turn are written."""
    eos: tuple[int, int]
    """Their ids."""
    pad: int | None
    """Padding id used where the configuration names none; ``None``: the end of text."""
    pad_also: tuple[int, ...] = ()
    """Other padding ids that releases of the family use."""
    bos: int | None = None
    """Start of text."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is common to the checkpoints of a family."""

    model_types: tuple[str, ...]
    """What ``model_type`` of its ``config.json`` may say."""
    layout: KeyLayout
    """Whose names the options and keys have."""
    ids: SpecialIds
    decoder: DecoderType
    shift: Literal[0, 1] = 0
    attention: Literal["full", "block"] = "full"
    text_vocab_size: int | None = None
    """Ids from here on are tokens of pictures: what the tokenizer of the release has. A folder's
    own tokenizer overrules it."""
    ignored_keys: tuple[str, ...] = ()
    """Prefixes of weights that belong to other parts of the model and are left in the files."""
    peft_task: PEFTTask = "CAUSAL_LM"
    """What PEFT can take the family's own class for; Dream's lacks the methods of a causal one."""


_DREAM_IDS = SpecialIds(
    mask_tokens=("<|mask|>",),
    mask=151666,
    eos_tokens=("<|endoftext|>", "<|im_end|>"),
    eos=(151643, 151645),
    pad=151643,
    pad_also=(151667,),
    bos=151665,
)
_LLADA_IDS = SpecialIds(
    mask_tokens=("<|mdm_mask|>",),
    mask=126336,
    eos_tokens=("<|endoftext|>", "<|eot_id|>"),
    eos=(126081, 126348),
    pad=126081,
    bos=126080,
)
_SDAR_IDS = SpecialIds(
    mask_tokens=("<MASK>", "<|MASK|>"),
    mask=151669,
    eos_tokens=("<|endoftext|>", "<|im_end|>"),
    eos=(151643, 151645),
    pad=151643,
)
VISION_NAMES = {
    "tower.": "model.vision_tower.vision_tower.vision_model.",
    "projector.": "model.mm_projector.",
    "newline": "model.image_newline",
}
"""Parts of :class:`~lit_dlm.backbones.vision.TowerVision` to their names in LLaDA-V's files."""


def vision_key(name: str) -> str:
    """LLaDA-V's key of a weight of :class:`~lit_dlm.backbones.vision.TowerVision`."""
    ours, theirs = next(pair for pair in VISION_NAMES.items() if name.startswith(pair[0]))
    return theirs + name.removeprefix(ours)


_VISION_KEYS = ("model.vision_tower.", "model.mm_projector.", "model.image_newline")

_DREAM = Family(
    model_types=("Dream",),
    layout="hf",
    decoder="qwen2",
    shift=1,
    ids=_DREAM_IDS,
    peft_task="FEATURE_EXTRACTION",
)

FAMILIES: dict[str, Family] = {
    "dream": _DREAM,
    "diffucoder": _DREAM,
    "llada": Family(model_types=("llada",), layout="llada", decoder="llama", ids=_LLADA_IDS),
    "mmada": Family(
        model_types=("mmada", "llada"),
        layout="llada",
        decoder="llama",
        ids=_LLADA_IDS,
        text_vocab_size=126349,
    ),
    "llada_v": Family(
        model_types=("llava_llada", "llada"),
        layout="hf",
        decoder="llama",
        ids=_LLADA_IDS,
        ignored_keys=_VISION_KEYS,
    ),
    "sdar": Family(
        model_types=("sdar",), layout="hf", decoder="qwen3", attention="block", ids=_SDAR_IDS
    ),
    "trado": Family(
        model_types=("sdar",), layout="hf", decoder="qwen3", attention="block", ids=_SDAR_IDS
    ),
}

PLAIN_DECODERS: dict[str, DecoderType] = {"qwen2": "qwen2", "llama": "llama", "qwen3": "qwen3"}
"""Model types of autoregressive checkpoints and of our own exports."""

_HINTS = {"diffucoder": "diffucoder", "mmada": "mmada", "trado": "trado"}


def family_of(config: Mapping[str, Any], *, source: str, wanted: str | None = None) -> str:
    """Names the family of a checkpoint.

    DiffuCoder shares its ``model_type`` with Dream, TraDo with SDAR and some MMaDA copies with
    LLaDA; the computation is the same, so the folder's name decides what the family is called.

    Args:
        config: contents of ``config.json``.
        source: folder or hub id.
        wanted: a name that the user asked for.

    Returns:
        A key of :data:`FAMILIES`.
    """
    model_type = config.get("model_type")
    # LLaDA-V's own classes call their text part llada too, but with transformers' option names.
    layout = "hf" if "hidden_size" in config and "d_model" not in config else "llada"
    names = [
        name
        for name, family in FAMILIES.items()
        if model_type in family.model_types
        and ("llada" not in family.model_types or family.layout == layout)
    ]
    if not names:
        known = sorted(
            {name for family in FAMILIES.values() for name in family.model_types}
            | set(PLAIN_DECODERS)
        )
        raise ValueError(
            f"{source}config.json: model_type {model_type!r} is not supported, "
            f"expected one of {known}"
        )
    if wanted is not None:
        if wanted in FAMILIES and wanted not in names:
            raise ValueError(
                f"{source}config.json: model_type {model_type!r} is not of family {wanted!r}, "
                f"expected one of {names}"
            )
        return wanted if wanted in names else names[0]
    folder = Path(source.rstrip(": ")).name.lower()
    hinted = [name for name in names if name in _HINTS and _HINTS[name] in folder]
    return hinted[0] if hinted else names[0]


# -- names of weights ---------------------------------------------------------------------------

HEAD_KEY = "lm_head.weight"

_BLOCK_NAMES = {
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
_TOP_NAMES = {
    "wte": "model.embed_tokens",
    "ln_f": "model.norm",
    "ff_out": "lm_head",
}
_LLADA_BLOCK = re.compile(r"transformer\.blocks\.(\d+)\.(\w+)\.(.+)")
_LLADA_TOP = re.compile(r"transformer\.(\w+)\.(.+)")
_HF_BLOCK = re.compile(r"model\.layers\.(\d+)\.((?:\w+\.)?\w+)\.([^.]+)")
_DECODER_PARTS = ("embed_tokens.", "layers.", "norm.")

LLADA_MODULES = {name: target.rpartition(".")[2] for name, target in _BLOCK_NAMES.items()}
"""LLaDA's names of the modules in a block to transformers': ``ff_out`` to ``down_proj``, ..."""


@dataclass(frozen=True, kw_only=True)
class KeyMap:
    """Translates keys of weight files; a leading ``model.`` may be absent in them."""

    layout: KeyLayout
    """Whose names the files use."""
    ignored: tuple[str, ...] = ()
    """Prefixes of keys that are left in the files."""

    @classmethod
    def of(cls, family: str) -> KeyMap:
        """Names of a family without keys to ignore; transformers' for what is none."""
        return cls(layout=FAMILIES[family].layout if family in FAMILIES else "hf")

    def ours(self, key: str) -> str | None:
        """Our name of a key in a file.

        Args:
            key: as in the file.

        Returns:
            The key under transformers' names; ``None`` for what carries no weight of the decoder.
            An unknown key comes back as it is.
        """
        full = key if key.startswith("model.") else f"model.{key}"
        if key.endswith("rotary_emb.inv_freq") or full.startswith(self.ignored or ("\0",)):
            return None
        if self.layout == "hf":
            return full if key.startswith(_DECODER_PARTS) else key
        bare = key.removeprefix("model.")
        if (block := _LLADA_BLOCK.fullmatch(bare)) and block[2] in _BLOCK_NAMES:
            return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.{block[3]}"
        # ``ff_out`` names two matrices: the head here, the down projection in a block.
        if (top := _LLADA_TOP.fullmatch(bare)) and top[1] in _TOP_NAMES:
            return f"{_TOP_NAMES[top[1]]}.{top[2]}"
        return key

    def original(self, key: str) -> str:
        """The family's own name of one of our keys; the inverse of :meth:`ours`.

        Args:
            key: ``{module}.{parameter}`` under transformers' names.

        Returns:
            The key as a release of the family has it.
        """
        if self.layout == "hf":
            return key
        module, _, parameter = key.rpartition(".")
        for own, target in _TOP_NAMES.items():
            if module == target:
                return f"model.transformer.{own}.{parameter}"
        match = _HF_BLOCK.fullmatch(key)
        names = {target: own for own, target in _BLOCK_NAMES.items()}
        assert match is not None, key
        return f"model.transformer.blocks.{match[1]}.{names[match[2]]}.{match[3]}"


# -- the way back to a family's own configuration ------------------------------------------------


def original_config(
    architecture: Architecture, *, source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes a configuration that the family's own code would read.

    Args:
        architecture: of a family in :data:`~lit_dlm.backbones.families.FAMILIES`, or of a plain
            decoder, whose configuration is transformers' own.
        source: configuration of the files it came from, in the same words. What it says beyond the
            architecture is kept.

    Returns:
        Contents of ``config.json``.
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
