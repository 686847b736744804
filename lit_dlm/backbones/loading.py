"""The two ways to a backbone from Python: a name, or a resolved description."""

from __future__ import annotations

from pathlib import Path

import torch

from lit_dlm.backbones.assembly import AttentionRoute, DType, torch_dtype
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.backbones.resolution import Resolved


def load_backbone(
    path_or_id: str | Path,
    *,
    dtype: DType | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    attn_implementation: AttentionRoute = "sdpa",
    adapter: str | Path | None = None,
) -> HFBackbone:
    """Loads a frozen backbone for decoding.

    Calling it with ``(input_ids, mask=None, position_ids=None)`` gives logits ``(B, L, V)`` whose
    row ``i`` predicts token ``i``, see :meth:`HFBackbone.forward`.

    Args:
        path_or_id: an embedded name (``tiny``), a local folder, or a hub id ``owner/name``.
        dtype: of weights and activations.
        device: where the weights go; they are read straight to it.
        attn_implementation: ``sdpa``, or ``eager`` as a reference.
        adapter: folder or hub id of a low-rank adapter in PEFT layout.

    Returns:
        The backbone in evaluation mode, without gradients.

    Raises:
        ValueError: nothing of that name exists, or its configuration is not supported.
    """
    with torch.device(device):
        backbone = HFBackbone(
            str(path_or_id),
            dtype=_name(dtype),
            attn_implementation=attn_implementation,
            adapter=None if adapter is None else str(adapter),
        )
    return backbone.to(device).eval()


def build(
    resolved: Resolved,
    *,
    weights: str | Path | None = None,
    dtype: DType | torch.dtype = "float32",
    attn_implementation: AttentionRoute = "sdpa",
    lora: LoRASettings | None = None,
) -> HFBackbone:
    """Builds a backbone from a resolved description.

    Args:
        resolved: see :func:`~lit_dlm.backbones.resolution.resolve`. Change its architecture for
            variants that no checkpoint has.
        weights: folder or hub id with the weights; ``None`` gives random ones (seed torch before).
        dtype: of weights and activations.
        attn_implementation: ``sdpa``, or ``eager`` as a reference.
        lora: puts a new trainable adapter on the frozen weights.

    Returns:
        The backbone, frozen but for the adapter.

    Raises:
        ValueError: the weights are not those of the description.
    """
    if weights is None:
        return HFBackbone(
            architecture=resolved.architecture,
            dtype=_name(dtype),
            attn_implementation=attn_implementation,
            lora=lora,
        )
    backbone = HFBackbone(
        str(weights),
        dtype=_name(dtype),
        attn_implementation=attn_implementation,
        spec_overrides=resolved.architecture.spec_fields(),
        lora=lora,
    )
    if backbone.architecture.digest() != resolved.architecture.digest():
        raise ValueError(f"weights: {weights} holds a model of another architecture")
    return backbone


def _name(dtype: DType | torch.dtype) -> DType:
    name: DType = str(torch_dtype(dtype)).removeprefix("torch.")  # type: ignore[assignment]
    return name
