"""Denoisers: model families differ only inside this package.

Names that need transformers are imported on first use, which takes seconds; heads, decoding and the
data side need only the protocol in :mod:`lit_dlm.backbones.base`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lit_dlm.backbones.base import (
    Backbone as Backbone,
    BackboneSpec as BackboneSpec,
    Denoised as Denoised,
)

if TYPE_CHECKING:
    from lit_dlm.backbones.architecture import Architecture as Architecture
    from lit_dlm.backbones.hf import HFBackbone as HFBackbone, load_backbone as load_backbone
    from lit_dlm.backbones.lora import LoRASettings as LoRASettings
    from lit_dlm.backbones.resolution import FromAR as FromAR, resolve as resolve
    from lit_dlm.backbones.tokenizer import (
        load_tokenizer as load_tokenizer,
        tokenizer_of as tokenizer_of,
    )


_ON_FIRST_USE = {
    "Architecture": "architecture",
    "FromAR": "resolution",
    "HFBackbone": "hf",
    "LoRASettings": "lora",
    "load_backbone": "hf",
    "load_tokenizer": "tokenizer",
    "tokenizer_of": "tokenizer",
    "resolve": "resolution",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
