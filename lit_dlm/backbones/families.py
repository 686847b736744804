"""The model families as plain data: decoder, special tokens and names of weights.

Dream and DiffuCoder are Qwen2 decoders, SDAR and TraDo Qwen3 decoders, LLaDA-V's text part a Llama
decoder, all under transformers' key names; LLaDA and MMaDA are Llama decoders (Qwen2 with
``include_qkv_bias``) under names of their own. :mod:`~lit_dlm.backbones.resolution` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lit_dlm.backbones.architecture import DecoderType

KeyLayout = Literal["hf", "llada"]
PEFTTask = Literal["CAUSAL_LM", "FEATURE_EXTRACTION"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is common to the checkpoints of a family."""

    model_types: tuple[str, ...]
    """What ``model_type`` of its ``config.json`` may say."""
    decoder: DecoderType
    layout: KeyLayout = "hf"
    """Whose names the options and keys have."""
    mask_tokens: tuple[str, ...]
    """How the mask token is written; sister files of one release may differ."""
    eos_tokens: tuple[str, str]
    """How end of text and end of turn are written."""
    bos_token: str | None = None
    """How the start of text is written."""
    shift: Literal[0, 1] = 0
    attention: Literal["full", "block"] = "full"
    text_vocab_size: int | None = None
    """Ids from here on are tokens of pictures: what the tokenizer of the release has. A folder's
    own tokenizer overrules it."""
    peft_task: PEFTTask = "CAUSAL_LM"
    """What PEFT can take the family's own class for; Dream's lacks the methods of a causal one."""


_DREAM = Family(
    model_types=("Dream",),
    decoder="qwen2",
    mask_tokens=("<|mask|>",),
    eos_tokens=("<|endoftext|>", "<|im_end|>"),
    bos_token="<|beginoftext|>",
    shift=1,
    peft_task="FEATURE_EXTRACTION",
)
_LLADA = Family(
    model_types=("llada",),
    decoder="llama",
    layout="llada",
    mask_tokens=("<|mdm_mask|>",),
    eos_tokens=("<|endoftext|>", "<|eot_id|>"),
    bos_token="<|startoftext|>",
)
_SDAR = Family(
    model_types=("sdar",),
    decoder="qwen3",
    mask_tokens=("<MASK>", "<|MASK|>"),
    eos_tokens=("<|endoftext|>", "<|im_end|>"),
    attention="block",
)
FAMILIES: dict[str, Family] = {
    "dream": _DREAM,
    "diffucoder": _DREAM,
    "llada": _LLADA,
    "mmada": replace(_LLADA, model_types=("mmada", "llada"), text_vocab_size=126349),
    "llada_v": replace(_LLADA, model_types=("llava_llada", "llada"), layout="hf"),
    "sdar": _SDAR,
    "trado": _SDAR,
}

PLAIN_DECODERS: dict[str, DecoderType] = {"qwen2": "qwen2", "llama": "llama", "qwen3": "qwen3"}
"""Model types of autoregressive checkpoints and of our own exports."""

_TOLD_BY_FOLDER = ("diffucoder", "mmada", "trado")


def family_of(config: Mapping[str, Any], *, source: str, wanted: str | None = None) -> str:
    """Names the family of a checkpoint, a key of :data:`FAMILIES`.

    DiffuCoder shares its ``model_type`` with Dream, TraDo with SDAR and some MMaDA copies with
    LLaDA; the computation is the same, so the folder's name decides what the family is called.

    Args:
        config: contents of ``config.json``.
        source: folder or hub id.
        wanted: a name that the user asked for.
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
    if not names or (wanted in FAMILIES and wanted not in names):
        known = {one for family in FAMILIES.values() for one in family.model_types}
        raise ValueError(
            f"{source}config.json: model_type {model_type!r} is not supported, expected one of "
            f"{sorted(known | set(PLAIN_DECODERS))}"
            + (f", or another family than {wanted!r}" if names else "")
        )
    if wanted in names:
        return wanted
    folder = Path(source.rstrip(": ")).name.lower()
    told = [name for name in names if name in _TOLD_BY_FOLDER and name in folder]
    return (told or names)[0]


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
# ``ff_out`` names two matrices: the head here, the down projection in a block.
_TOP_NAMES = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
_LLADA_BLOCK = re.compile(r"transformer\.blocks\.(\d+)\.(\w+)\.(.+)")
_LLADA_TOP = re.compile(r"transformer\.(\w+)\.(.+)")
_HF_BLOCK = re.compile(r"model\.layers\.(\d+)\.((?:\w+\.)?\w+)\.([^.]+)")
_DECODER_PARTS = ("embed_tokens.", "layers.", "norm.")
_VISION_PARTS = ("model.vision_tower.", "model.mm_projector.", "model.image_newline")

LLADA_MODULES = {name: target.rpartition(".")[2] for name, target in _BLOCK_NAMES.items()}
"""LLaDA's names of the modules in a block to transformers': ``ff_out`` to ``down_proj``, ..."""


def key_layout(family: str) -> KeyLayout:
    """Whose names the files of a family use; transformers' for what is none."""
    return FAMILIES[family].layout if family in FAMILIES else "hf"


def our_key(key: str, layout: KeyLayout) -> str | None:
    """The key under transformers' names of a key in a file, whose ``model.`` may be absent.

    ``None`` for what carries no weight of the decoder; an unknown key comes back as it is.
    """
    full = key if key.startswith("model.") else f"model.{key}"
    if key.endswith("rotary_emb.inv_freq") or full.startswith(_VISION_PARTS):
        return None
    if layout == "hf":
        return full if key.startswith(_DECODER_PARTS) else key
    bare = key.removeprefix("model.")
    if (block := _LLADA_BLOCK.fullmatch(bare)) and block[2] in _BLOCK_NAMES:
        return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.{block[3]}"
    if (top := _LLADA_TOP.fullmatch(bare)) and top[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[top[1]]}.{top[2]}"
    return key


def original_key(key: str, layout: KeyLayout) -> str:
    """The family's own name of ``{module}.{parameter}``; the inverse of :func:`our_key`."""
    if layout == "hf":
        return key
    module, _, parameter = key.rpartition(".")
    for own, target in _TOP_NAMES.items():
        if module == target:
            return f"model.transformer.{own}.{parameter}"
    match = _HF_BLOCK.fullmatch(key)
    names = {target: own for own, target in _BLOCK_NAMES.items()}
    assert match is not None, key
    return f"model.transformer.blocks.{match[1]}.{names[match[2]]}.{match[3]}"
