"""Faster norms and products and a shorter last layer for transformers' decoders."""

from __future__ import annotations

from functools import cache
from inspect import signature
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_dlm.tensors.batches import gather_rows
from lit_dlm.tensors.precision import without_autocast


def replace_parts(model: PreTrainedModel) -> None:
    """Puts faster norms and products and a shorter last layer into a decoder; its keys stay."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            # Recognised by this attribute: every decoder has a norm class of its own.
            if (epsilon := getattr(norm, "variance_epsilon", None)) is not None:
                weight = norm.get_parameter("weight")
                fused = FusedRMSNorm(weight.shape, eps=epsilon, device="meta")
                fused.weight = weight
                setattr(module, name, fused)
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            # Exactly this class, since packed and adapted layers have forwards of their own. The
            # class is exchanged and not the module, so keys, ties and hooks stay.
            if type(module) is nn.Linear:
                module.__class__ = Linear
    # Predictions of a few columns need the last layer's feed-forward at these columns only.
    last = model.model.layers[-1]
    last.forward = MethodType(_last_layer_forward, last)
    for layer in model.model.layers:
        # Left at the module's own value, it would make an SDPA call without a mask causal.
        layer.self_attn.is_causal = False


@cache
def cache_argument(decoder: type[nn.Module]) -> str:
    """Name of the forward's argument for keys and values, which transformers 5.24 renamed."""
    return "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"


class FusedRMSNorm(nn.RMSNorm):
    """The decoders' norm as one kernel on a GPU; transformers' takes eight and float32 copies.

    In float32 the bits are the same. In half precision the product with the weight is rounded once,
    not twice. CUDA's autocast, which is off here, would return float32 rows, which neither the
    flash kernel nor the head's tensor cores take.
    """

    def forward(self, x: Tensor) -> Tensor:
        with without_autocast(x.device):  # in the dtype of x: torch does not fuse across dtypes
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


_LARGE = 2**18
"""Number of weights in a matrix from which oneDNN is the faster one of a CPU's two libraries."""


class Linear(nn.Linear):
    """A linear layer that runs large float32 products of CPU inference through oneDNN.

    torch uses oneDNN for half precision only, and MKL for float32. MKL is slower on AMD processors:
    by a tenth for many rows, by half for a few rows through a head.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if (
            weight.numel() < _LARGE
            or torch.is_grad_enabled()
            or not weight.dtype == x.dtype == torch.float32
            or weight.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
        ):
            return F.linear(x, weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, weight, self.bias, "none", [], "")


def _last_layer_forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Runs a decoder's last layer, ``(B, L, D)`` to ``(B, K, D)``.

    After attention it computes only the rows of the ``(B, K)`` int64 columns ``kept``, or all.
    """
    kept = kwargs.pop("kept", None)
    if kept is None:
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    # Attention runs at all columns, as their keys and values go to the cache.
    normed = layer.input_layernorm(hidden_states)
    attended, _ = layer.self_attn(*args, hidden_states=normed, **kwargs)
    rows = gather_rows(hidden_states, kept) + gather_rows(attended, kept)
    return rows + layer.mlp(layer.post_attention_layernorm(rows))
