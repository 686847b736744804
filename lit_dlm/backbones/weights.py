"""Weights on disk: reads safetensors shard by shard under a key map, writes and digests them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_dlm.backbones.location import INDEX_FILE
from lit_dlm.system.files import (
    DIGEST,
    add_tensor,
    require_finite,
    tensors_digest,
    write_json,
    write_tensors,
)

SHARD_BYTES = 5 * 10**9
"""Most bytes of a shard, unless one tensor alone is larger."""
_SHOWN = 5


@torch.no_grad()
def load_weights(
    files: Sequence[Path],
    parameters: Mapping[str, Tensor | Sequence[Tensor]],
    *,
    rename: Callable[[str], str | None],
    optional: frozenset[str] = frozenset(),
    as_stored: bool = False,
) -> dict[str, Tensor]:
    """Loads weights into existing parameters, one tensor at a time.

    A CPU parameter in the dtype of the file becomes the file's own memory, mapped copy-on-write:
    processes of one machine share what they only read, and weights that move to a device page by
    page are never whole on the host. Anything else is converted tensor by tensor.

    Args:
        parameters: targets by our key; those in a list are written in place, and take consecutive
            rows of one tensor.
        rename: maps a key of the file to ours; ``None`` drops the tensor on purpose.
        optional: our keys that a file may hold or lack (the head of a tied model); a file's copy
            is ignored where ``parameters`` does not list the key.
        as_stored: parameters get the dtype of the file.

    Returns the tensors that are a file's own memory, by our key.
    """
    place = files[0].parent if len(files) > 1 else files[0]
    # Raised at the end, as one wrong name shows twice: as an absent and as an unexpected key.
    missing = set(parameters) - optional
    unknown: list[str] = []
    mapped: dict[str, Tensor] = {}
    for path in files:
        for key, tensor in read_weights(path, is_wanted=lambda key: rename(key) is not None):
            ours = rename(key)
            if ours is None or ours not in parameters:
                if ours is not None and ours not in optional:
                    unknown.append(key)
                continue
            try:
                is_mapped = _give(parameters[ours], tensor, as_stored=as_stored)
            except ValueError as error:
                raise ValueError(f"{path.name}: {key} {error} from config.json") from error
            if is_mapped:
                mapped[ours] = tensor
            missing.discard(ours)
    if unknown or missing:
        raise ValueError(
            f"{place}: {len(missing)} keys are absent, such as {sorted(missing)[:_SHOWN]}, and "
            f"{len(unknown)} unexpected, such as {unknown[:_SHOWN]}; they are those of "
            "another model"
        )
    return mapped


def _give(into: Tensor | Sequence[Tensor], tensor: Tensor, *, as_stored: bool) -> bool:
    """Copies a tensor to its targets; returns whether it became the target's memory instead."""
    targets = [into] if isinstance(into, Tensor) else into
    expected = (sum(one.shape[0] for one in targets), *targets[0].shape[1:])
    if expected != tensor.shape:
        raise ValueError(f"has shape {tuple(tensor.shape)}, expected {expected}")
    target = targets[0]
    # A target that takes the whole tensor as it is becomes the mapped file: nothing is copied, and
    # pages that are only read are shared by processes.
    is_same = target.device == tensor.device and (as_stored or target.dtype == tensor.dtype)
    if is_same and target is into:
        target.data = tensor
        return True
    for one, part in zip(targets, tensor.split([len(one) for one in targets]), strict=True):
        one.copy_(part)
    return False


def read_weights(path: Path, *, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Yields a file's tensors by key, checking them against the digest of :func:`save_weights`.

    Files that other programs wrote have no digest; of these, only wanted keys are read.
    """
    try:
        with safe_open(path, framework="pt") as shard:
            stored = (shard.metadata() or {}).get(DIGEST)
            digest = hashlib.sha256()
            # In the order in which the digest was taken.
            for key in sorted(shard.keys()):
                if not stored and not is_wanted(key):
                    continue
                tensor = shard.get_tensor(key)
                if stored:
                    add_tensor(digest, key, tensor)
                require_finite(path, {key: tensor})
                yield key, tensor
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    if stored and digest.hexdigest() != stored:
        raise ValueError(f"{path}: the weights are damaged: they have another digest")


def save_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes one safetensors file with a digest in its header; equal tensors give equal bytes."""
    require_finite(f"{path}: not written", tensors)
    write_tensors(tensors, path, {"format": "pt", DIGEST: tensors_digest(tensors)})


def files_digest(files: Iterable[Path]) -> str:
    """Returns the SHA-256 over the contents of the files in the given order."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def plain_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor, detached; to gather a sharded one, all processes must call this."""
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


def save_checkpoint(
    sizes: Mapping[str, int], read: Callable[[str], Tensor], folder: Path, *, write: bool
) -> None:
    """Writes ``model.safetensors``, or shards with an index where that grows too large.

    One shard at a time is in memory. Weight files and the index of an earlier checkpoint in the
    folder are removed unless they are replaced.

    Args:
        sizes: stored bytes by key; keys are packed in this order.
        read: returns the tensor of a key.
        folder: created when absent.
        write: whether this process writes. All processes must call this to gather sharded weights.
    """
    split = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    shards = split.filename_to_tensors
    folder.mkdir(parents=True, exist_ok=True)
    if write and split.is_sharded:  # if cut short, the folder would load as a mixture of two models
        (folder / INDEX_FILE).unlink(missing_ok=True)
    for name, keys in shards.items():
        tensors = {key: read(key) for key in keys}
        if write:
            save_weights(tensors, folder / name)
    if not write:
        return
    if split.is_sharded:
        document = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX_FILE, document, sort_keys=True)
    else:
        (folder / INDEX_FILE).unlink(missing_ok=True)
    # Shards of an earlier export with another number of shards, which no index names now.
    for path in folder.glob("model*.safetensors"):
        if path.name not in shards:
            path.unlink()
