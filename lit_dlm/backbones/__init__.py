"""Denoisers: model families differ only inside this package.

Names that need transformers load on first use: it costs seconds, and heads, decoding and the data
side need only the protocol of :mod:`lit_dlm.backbones.base`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lit_dlm.backbones.base import Backbone, BackboneSpec, Denoised

if TYPE_CHECKING:
    import torch

    from lit_dlm.backbones.architecture import Architecture
    from lit_dlm.backbones.hf import AttentionRoute, DType, HFBackbone
    from lit_dlm.backbones.tokenizer import load_tokenizer

__all__ = [
    "Architecture",
    "Backbone",
    "BackboneSpec",
    "Denoised",
    "HFBackbone",
    "load_backbone",
    "load_tokenizer",
]

_ON_FIRST_USE = {
    "Architecture": "architecture",
    "AttentionRoute": "hf",
    "DType": "hf",
    "HFBackbone": "hf",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)


def load_backbone(
    path_or_id: str,
    *,
    dtype: DType = "float32",
    device: str | torch.device = "cpu",
    attn_implementation: AttentionRoute = "sdpa",
) -> HFBackbone:
    """Loads a frozen backbone for decoding.

    Args:
        path_or_id: an embedded name (``tiny``), a local folder, or a hub id ``owner/name``.
        dtype: of weights and activations.
        device: where the weights go.
        attn_implementation: ``sdpa``, or ``eager`` as a reference.

    Returns:
        The backbone in evaluation mode, without gradients.

    Raises:
        ValueError: nothing of that name exists, or its configuration is not supported.
    """
    from lit_dlm.backbones.hf import HFBackbone

    backbone = HFBackbone(path_or_id, dtype=dtype, attn_implementation=attn_implementation)
    return backbone.to(device).eval()
