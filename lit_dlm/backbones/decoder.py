"""Builds and loads transformers' decoders as denoisers, and puts faster parts into them.

:mod:`lit_dlm.backbones.hf` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_dlm.backbones.architecture import HEAD_KEY, Architecture, original_key, whole_key
from lit_dlm.backbones.attention import AttentionRoute
from lit_dlm.backbones.experts import Piece, expert_biases
from lit_dlm.backbones.resolution import Resolved
from lit_dlm.backbones.weights import load_weights
from lit_dlm.system.files import fitting
from lit_dlm.tensors.batches import gather_rows
from lit_dlm.tensors.precision import without_autocast

DType = Literal["float32", "bfloat16", "float16"]


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns the torch dtype of a setting, which may already be one."""
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def random_decoder(
    architecture: Architecture, *, attn_implementation: AttentionRoute, dtype: torch.dtype
) -> PreTrainedModel:
    """Returns a decoder with random weights, on torch's default device."""
    config = architecture.hf_config()
    config._attn_implementation = f"lit_dlm_{attn_implementation}"
    model = architecture.model_class(config)
    nn.Module.to(model, dtype)  # in place
    for bias in expert_biases(model).values():
        bias.data = bias.float()
    return model


def load_decoder(
    resolved: Resolved,
    files: Sequence[Path],
    *,
    attn_implementation: AttentionRoute,
    dtype: torch.dtype,
    as_stored: bool = False,
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Returns a decoder with a checkpoint's weights, and those of them that are mapped, by key.

    The decoder is on torch's default device. Its memory starts uninitialised (billions of random
    weights take minutes) and is filled tensor by tensor: the peak is the model plus one shard.
    """
    architecture = resolved.architecture
    with torch.device("meta"), fitting(files[0].parent / "config.json"):
        model = random_decoder(architecture, attn_implementation=attn_implementation, dtype=dtype)
        if resolved.file_vocab_size < architecture.vocab_size:
            model.resize_token_embeddings(resolved.file_vocab_size, mean_resizing=False)
        wanted, held = model.num_parameters(), sum(path.stat().st_size for path in files)
        if wanted > held:  # before memory is asked for
            raise ValueError(f"{wanted} weights for {held} bytes of {files[0].name}, ...")
    model.to_empty(device=torch.get_default_device())
    ours = {**dict(model.named_parameters(remove_duplicate=False)), **expert_biases(model)}
    if architecture.tie_embeddings:  # leaving the meta device gave each its own memory
        model.lm_head.weight = model.model.embed_tokens.weight
        del ours[HEAD_KEY]
    stored = resolved.pieces({key: tuple(tensor.shape) for key, tensor in ours.items()})
    head = original_key(HEAD_KEY, resolved.layout)
    mapped = load_weights(
        files,
        {key: _target(parts, ours) for key, parts in stored.items()},
        rename=whole_key,
        optional=frozenset([head] if architecture.tie_embeddings else []),
        as_stored=as_stored,
    )
    mapped = {stored[key][0].key: tensor for key, tensor in mapped.items()}
    if resolved.adds_mask:
        _add_mask_row(model, mask_id=architecture.mask_id, vocab_size=architecture.vocab_size)
    return model, mapped


def _target(parts: Sequence[Piece], ours: Mapping[str, Tensor]) -> Tensor | list[Tensor]:
    """Returns where a tensor of a file goes: one whole tensor of ours, or pieces of some."""
    first = ours[parts[0].key]
    is_whole = len(parts) == 1 and not parts[0].where
    return first if is_whole else [part.of(ours[part.key]) for part in parts]


@torch.no_grad()
def _add_mask_row(model: PreTrainedModel, *, mask_id: int, vocab_size: int) -> None:
    """Gives the mask token its rows in the embedding and the head, in place.

    Both matrices grow where needed. The new rows, and the mask's own row where the checkpoint has
    an unused one there, start at the mean of the checkpoint's rows, which is of ordinary size and
    carries no token's meaning.
    """
    embedding, head = model.model.embed_tokens, model.lm_head

    def grown(weight: Tensor) -> nn.Parameter:
        mean = weight.float().mean(dim=0).to(weight.dtype)
        rows = torch.cat([weight, mean.expand(vocab_size - len(weight), -1)])
        rows[mask_id] = mean
        return nn.Parameter(rows, requires_grad=weight.requires_grad)

    is_tied = head.weight is embedding.weight
    embedding.weight = grown(embedding.weight)
    head.weight = embedding.weight if is_tied else grown(head.weight)
    embedding.num_embeddings = head.out_features = vocab_size
    for holder in (model.config, model, model.model):
        holder.vocab_size = vocab_size


def quantise(model: PreTrainedModel) -> None:
    """Replaces the matrices of a decoder's layers with 4-bit ones (NF4), in place, one by one."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, linear in list(model.model.layers.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue
        weight = linear.weight
        packed = Linear4bit(
            linear.in_features,
            linear.out_features,
            compute_dtype=weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        packed.weight = Params4bit(
            weight.detach(), requires_grad=False, quant_type="nf4", module=packed
        )
        packed.bias = linear.bias
        parent, _, last = name.rpartition(".")
        setattr(model.model.layers.get_submodule(parent), last, packed.to(weight.device))
    # With this, peft puts its layer for 4-bit weights around them.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def replace_parts(model: PreTrainedModel) -> None:
    """Puts faster norms and products and a shorter last layer into a decoder; its keys stay."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if (epsilon := getattr(norm, "variance_epsilon", None)) is not None:
                weight = norm.get_parameter("weight")
                fused = FusedRMSNorm(weight.shape, eps=epsilon, device="meta")
                fused.weight = weight
                setattr(module, name, fused)
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
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
    normed = layer.input_layernorm(hidden_states)
    attended, _ = layer.self_attn(*args, hidden_states=normed, **kwargs)
    rows = gather_rows(hidden_states, kept) + gather_rows(attended, kept)
    return rows + layer.mlp(layer.post_attention_layernorm(rows))
