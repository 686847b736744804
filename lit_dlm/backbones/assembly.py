"""Building the decoder itself: classes, dtypes, empty memory, weights from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.attention import GROUPED_SDPA
from lit_dlm.backbones.autoregressive import add_mask_row
from lit_dlm.backbones.keys import EMBEDDING_KEY, HEAD_KEY
from lit_dlm.backbones.resolution import Resolved
from lit_dlm.backbones.weights import load_weights

DType = Literal["float32", "bfloat16", "float16"]
AttentionRoute = Literal["sdpa", "eager"]

_MODEL_CLASSES: dict[str, type[PreTrainedModel]] = {
    "qwen2": Qwen2ForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a setting.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``, or the torch dtype of that name.

    Raises:
        ValueError: anything else.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"HFBackbone.dtype: expected one of {list(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def random_decoder(
    architecture: Architecture, *, attn_implementation: AttentionRoute, dtype: torch.dtype
) -> PreTrainedModel:
    """A decoder with random weights, on torch's default device."""
    config = architecture.hf_config()
    config._attn_implementation = GROUPED_SDPA if attn_implementation == "sdpa" else "eager"
    model = _MODEL_CLASSES[architecture.decoder](config)
    nn.Module.to(model, dtype)  # in place
    return model


def loaded_decoder(
    resolved: Resolved,
    files: Sequence[Path],
    *,
    attn_implementation: AttentionRoute,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """A decoder with the weights of a checkpoint, on torch's default device.

    The memory starts uninitialised (random weights of billions of parameters take minutes) and is
    filled tensor by tensor, so that the peak is the model plus one shard.

    Args:
        resolved: the checkpoint's description.
        files: its safetensors files.
        attn_implementation: ``sdpa`` or ``eager``.
        dtype: of the weights.

    Returns:
        The model.

    Raises:
        ValueError: a file, a key or a shape does not fit the description.
    """
    architecture = resolved.architecture
    with torch.device("meta"):
        model = random_decoder(architecture, attn_implementation=attn_implementation, dtype=dtype)
        grows = resolved.file_vocab_size < architecture.vocab_size
        if grows:
            model.resize_token_embeddings(resolved.file_vocab_size, mean_resizing=False)
    model.to_empty(device=torch.get_default_device())
    if architecture.tie_embeddings:  # leaving the meta device gave each its own memory
        model.lm_head.weight = model.model.embed_tokens.weight
    load_weights(
        files,
        base_parameters(model, tied=architecture.tie_embeddings),
        rename=resolved.keys.ours,
        optional=frozenset([HEAD_KEY] if architecture.tie_embeddings else []),
    )
    if resolved.adds_mask:
        add_mask_row(model, mask_id=architecture.mask_id, vocab_size=architecture.vocab_size)
    return model


def base_parameters(model: PreTrainedModel, *, tied: bool) -> Mapping[str, Tensor]:
    """Parameters of a decoder without adapters, by key.

    Args:
        model: the decoder.
        tied: whether the head shares the embedding; it is then listed once, as the embedding.

    Returns:
        Key under transformers' names to parameter.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    if tied:
        assert EMBEDDING_KEY in named
        del named[HEAD_KEY]
    return named
