"""Gradient checkpointing: layers that run again in the backward, under the same adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from lit_dlm.backbones.lora import using_adapter

_ATEN = torch.ops.aten
_PRODUCTS = (
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.addmm_.default,
    _ATEN.bmm.default,
    _ATEN._grouped_mm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)
"""Operations that are expensive to recompute: matrix products and attention."""


def recompute_layers(model: PreTrainedModel, *, keep_products: bool) -> None:
    """Turns on gradient checkpointing; outputs of matrix products and attention may be kept."""
    for layer in model.model.layers:
        # As transformers' own switch, without its hook that makes embeddings require gradients.
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = _recomputed(layer, keep_products=keep_products)


def _recomputed(layer: nn.Module, *, keep_products: bool) -> Callable[..., Any]:
    """Returns a function that runs a layer and, in the backward, again with the same adapter."""
    from peft.tuners.lora import LoraLayer

    @contextmanager
    def again(kept: AbstractContextManager[Any], name: str | None) -> Iterator[None]:
        with kept, using_adapter(layer, name):
            yield

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, kept = nullcontext(), nullcontext()
        if keep_products:
            # An adapter is added to a kept product in place. What is kept, twice, is the sum.
            forward, kept = create_selective_checkpoint_contexts(
                list(_PRODUCTS), allow_cache_entry_mutation=True
            )
        # Read while the layer runs: by the time of the backward another adapter may be in use.
        adapted = [part for part in layer.modules() if isinstance(part, LoraLayer)]
        names = adapted[0]._active_adapter if adapted else []
        return forward, again(kept, next(iter(names), None))

    return partial(checkpoint, use_reentrant=False, context_fn=contexts)
