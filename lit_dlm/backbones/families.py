"""The model families: whose names their files use, and the special tokens of their vocabularies.

Dream and DiffuCoder are Qwen2 decoders, SDAR and TraDo Qwen3 decoders, LLaDA-V's text tower a Llama
decoder, all under transformers' key names; LLaDA and MMaDA are Llama decoders (Qwen2 with
``include_qkv_bias``) under names of their own. Tables only; :mod:`~lit_dlm.backbones.resolution`
reads configurations with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_dlm.backbones.architecture import Decoder

Layout = Literal["hf", "llada"]
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
    layout: Layout
    """Whose names the options and keys have."""
    ids: SpecialIds
    decoder: Decoder
    shift: Literal[0, 1] = 0
    attention: Literal["full", "block"] = "full"
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
_VISION_KEYS = (
    "model.vision_tower.",
    "model.vision_resampler.",
    "model.mm_projector.",
    "model.image_newline",
)

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
        model_types=("mmada", "llada"), layout="llada", decoder="llama", ids=_LLADA_IDS
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

PLAIN_DECODERS: dict[str, Decoder] = {"qwen2": "qwen2", "llama": "llama", "qwen3": "qwen3"}
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

    Raises:
        ValueError: no family has this ``model_type``, or the wanted one has another.
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
