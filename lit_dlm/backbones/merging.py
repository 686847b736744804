"""Low-rank adapters added to the weights they adapt: for good, or while a policy decodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_dlm.backbones.lora import POLICY
from lit_dlm.backbones.weights import plain_tensor


def base_parameters_adapted(model: nn.Module) -> dict[str, tuple[Tensor, nn.Module | None]]:
    """Base weights of a decoder that may hold an adapter.

    Args:
        model: the decoder.

    Returns:
        Key without traces of the adapter to the parameter and, for an adapted weight, the layer
        with which it has to be :func:`merged`.
    """
    modules = dict(model.named_modules())
    found: dict[str, tuple[Tensor, nn.Module | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        owner, _, last = name.rpartition(".")
        parent = owner.removesuffix(".base_layer")
        adapted = parent != owner and last == "weight"
        layer: Any = modules[parent] if adapted else None
        has_adapter = layer is not None and POLICY in layer.lora_A
        found[f"{parent}.{last}"] = (parameter, layer if has_adapter else None)
    return found


def merged(weight: Tensor, layer: Any) -> Tensor:
    """The weight of one of peft's layers with its adapter added.

    Args:
        weight: ``(out, in)`` of the base layer.
        layer: peft's layer.

    Returns:
        ``(out, in)`` in the dtype of ``weight``; the sum is taken in float32, of float64 weights in
        float64, and rounded once.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    rows = plain_tensor(layer.lora_B[POLICY].weight).to(dtype)
    columns = plain_tensor(layer.lora_A[POLICY].weight).to(dtype)
    with torch.autocast(weight.device.type, enabled=False):  # rollouts run inside of it
        return (weight.to(dtype) + rows @ columns * layer.scaling[POLICY]).to(weight.dtype)


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Adds the policy's adapter to the base weights in place; its layers stay, and still run.

    Args:
        model: the decoder, with whole weights.
    """
    for base, layer in base_parameters_adapted(model).values():
        if layer is not None:
            base.copy_(merged(base, layer))


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Puts the base weights that hold an adapter back, bit by bit, when the context closes.

    Subtracting the adapter again would leave rounding behind. The copies lie in the host's memory:
    as much as the adapted weights need, of sharded ones this process's part.

    Args:
        model: the decoder; its weights are as sharded at the end as at the beginning.
    """

    def local(weight: Tensor) -> Tensor:
        plain = weight.detach()
        return plain.to_local() if isinstance(plain, DTensor) else plain

    kept = {
        key: local(base).to("cpu", copy=True)
        for key, (base, layer) in base_parameters_adapted(model).items()
        if layer is not None
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for key, (base, _) in base_parameters_adapted(model).items():
                if key in kept:
                    local(base).copy_(kept[key])


@torch.no_grad()
def merge(model: nn.Module) -> int:
    """Adds the adapter to the base weights and removes its layers, in place.

    Args:
        model: the decoder.

    Returns:
        How many layers were merged.
    """
    from peft.tuners.lora import LoraLayer

    fold(model)
    adapted = [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]
    for name, layer in adapted:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.get_base_layer())
    if adapted:
        del model.peft_config
    return len(adapted)
