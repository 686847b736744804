"""Makes transformers' decoders: with random weights, or with those of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_dlm.backbones.architecture import FAMILIES, HEAD_KEY, Architecture, original_key, whole_key
from lit_dlm.backbones.attention import AttentionRoute
from lit_dlm.backbones.experts import Piece, expert_biases
from lit_dlm.backbones.location import is_local, locate, unpinned, weight_files
from lit_dlm.backbones.resolution import EXPORT_KEY, RELEASE_KEY, FromAR, Resolved, resolve
from lit_dlm.backbones.weights import load_weights
from lit_dlm.system.files import fitting

DType = Literal["float32", "bfloat16", "float16"]


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns the torch dtype of a setting, which may already be one."""
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files that a model came from; none of them for random weights."""

    name: str | None = None
    """Embedded name, folder or hub id."""
    files: Sequence[Path] = ()
    """Those of the weights."""
    config: Mapping[str, Any] | None = None
    """The configuration of the family's own code, if the model is one of a family."""
    is_release: bool = False
    """Whether the files are as the family releases them, and not as we export them."""
    mask_token: str | None = None
    """Text of a mask token that the files lack (``from_ar``), else ``None``."""
    mapped: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights in a file's own memory, as they were read, by key."""
    late_dtype: torch.dtype | None = None
    """Dtype to which weights that are as in their files are still to be converted."""


def load_checkpoint(
    name: str,
    *,
    dtype: torch.dtype,
    attn_implementation: AttentionRoute,
    trains_all: bool,
    spec_overrides: dict[str, Any] | None,
    from_ar: FromAR | None,
) -> tuple[PreTrainedModel, Architecture, Source]:
    """Loads the decoder of an embedded model, a folder or a hub id."""
    resolved = resolve(name, spec_overrides=spec_overrides, from_ar=from_ar)
    folder = locate(name)
    config, is_release = None, False
    if resolved.architecture.family in FAMILIES:
        # Our own exports of a family's model carry the family's configuration along, so that they
        # can be written in its layout again.
        is_release = EXPORT_KEY not in resolved.config
        config = resolved.config.get(RELEASE_KEY, resolved.config if is_release else None)
        with fitting(folder / "config.json"):
            config = config and _with_code(config, name)
    files = weight_files(folder)
    # Each of several processes may keep only a part, and converts what it keeps: whole weights in
    # another dtype would be in memory once per process.
    is_one_of_several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    is_late = trains_all and is_one_of_several and not resolved.adds_mask
    model, mapped = load_decoder(
        resolved, files, attn_implementation=attn_implementation, dtype=dtype, as_stored=is_late
    )
    source = Source(
        name=name,
        files=files,
        config=config,
        is_release=is_release,
        mask_token=resolved.mask_token,
        mapped=mapped,
        late_dtype=dtype if is_late else None,
    )
    return model, resolved.architecture, source


def _with_code(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a family's configuration; one from the hub refers to its code there."""
    if is_local(name):
        return {**config}
    places = {
        part: place if "--" in place else f"{unpinned(name)}--{place}"
        for part, place in config.get("auto_map", {}).items()
    }
    return {**config, "auto_map": places} if places else config


def random_decoder(
    architecture: Architecture, *, attn_implementation: AttentionRoute, dtype: torch.dtype
) -> PreTrainedModel:
    """Returns a decoder with random weights, on torch's default device."""
    config = architecture.hf_config()
    config._attn_implementation = f"lit_dlm_{attn_implementation}"
    model = architecture.model_class(config)
    nn.Module.to(model, dtype)  # in place
    # In half precision their small differences, which choose experts, would be lost.
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
        # A description may claim sizes that no file has, and memory is taken by it.
        wanted, held = model.num_parameters(), sum(path.stat().st_size for path in files)
        if wanted > held:  # before memory is asked for
            raise ValueError(f"{wanted} weights for {held} bytes of {files[0].name}, ...")
    _take_memory(model)
    ours = {**dict(model.named_parameters(remove_duplicate=False)), **expert_biases(model)}
    if architecture.tie_embeddings:  # leaving the meta device gave each its own memory
        model.lm_head.weight = model.model.embed_tokens.weight
        del ours[HEAD_KEY]
    stored = resolved.pieces({key: tuple(tensor.shape) for key, tensor in ours.items()})
    # Some files of tied models hold the shared matrix twice.
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


def _take_memory(model: PreTrainedModel) -> None:
    """Moves a decoder from the meta device to the default one, uninitialised.

    Everything is overwritten: what no file holds is an error. Deterministic algorithms would fill
    the memory first, and so hold the pages of weights that are mapped from their files, too.
    """
    deterministic: Any = torch.utils.deterministic  # types do not know its property
    fills = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    try:
        model.to_empty(device=torch.get_default_device())
    finally:
        deterministic.fill_uninitialized_memory = fills


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

    # Asked before the embedding is replaced, after which they would differ.
    is_tied = head.weight is embedding.weight
    embedding.weight = grown(embedding.weight)
    head.weight = embedding.weight if is_tied else grown(head.weight)
    embedding.num_embeddings = head.out_features = vocab_size
    for holder in (model.config, model, model.model):
        holder.vocab_size = vocab_size


def quantise(model: PreTrainedModel, architecture: Architecture) -> None:
    """Replaces the matrices of a decoder's layers with 4-bit ones (NF4), in place, one by one."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    if architecture.experts is not None:
        raise ValueError("HFBackbone.load_in_4bit: expected a model without experts")

    for name, linear in list(model.model.layers.named_modules()):
        # One after the other: at most one matrix exists in both forms.
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
