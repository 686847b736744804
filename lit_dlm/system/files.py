"""Files that readers see whole or not at all; files of tensors carry their digest.

Exported networks are folders: a JSON file of settings beside a file of weights, whose header holds
a digest of both, so a folder that is damaged, or whose files are from two exports, is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:  # torch takes seconds to import, and reports do not need it
    from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write, which replaces ``path`` if the block succeeds."""
    partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")  # processes share folders
    partial.unlink(missing_ok=True)  # a link to elsewhere, if others prepared the folder
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers see all of it or nothing, and it survives a machine crash.

    Texts are UTF-8; missing folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    # A rename is durable once its folder is; before, a crash could bring the old file back.
    sync_folder(path.parent)


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> None:
    """Writes a JSON value as :func:`write_atomically` does, indented by two."""
    write_atomically(path, json.dumps(value, indent=2, sort_keys=sort_keys) + "\n")


def copy_file(source: Path, folder: Path) -> None:
    """Copies a file into a folder, where readers see all of it or what was there before."""
    with replacing(folder / source.name) as partial:
        shutil.copyfile(own_file(source), partial)


def own_file(path: Path) -> Path:
    """Returns the regular file at a path; refuses one outside, which must not be published.

    A snapshot in the hub's cache links to the blobs of its repository, or of all of them.
    """
    folder, file = path.parent.resolve(), path.resolve()
    is_cached = folder.parent.name == "snapshots"
    roots = (folder, *(above / "blobs" for above in folder.parents[1:3] if is_cached))
    if not file.is_file() or not any(file.is_relative_to(root) for root in roots):
        raise ValueError(f"{path}: expected a regular file of this folder, got {file}")
    return file


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def add_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """Adds a tensor's name, dtype, shape and bytes to a digest."""
    import torch

    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    # Bytes, not numbers: numpy has no bfloat16, and NaNs are unequal to themselves.
    plain = tensor.detach().cpu().contiguous()
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)


def tensors_digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Returns the SHA-256 of a text and of tensors in the order of their names, hexadecimal."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        add_tensor(digest, name, tensors[name])
    return digest.hexdigest()


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file, whole or not at all; equal tensors yield equal bytes."""
    from safetensors.torch import save_file

    plain = {key: tensors[key].detach().cpu().contiguous() for key in sorted(tensors)}
    try:
        with replacing(path) as partial:
            save_file(plain, partial, metadata=dict(metadata))
            # Equal weights must be equal files: digests of exports are compared.
            _sort_metadata(partial)
            partial.chmod(0o644)  # safetensors makes files that only their owner may read
    except (SafetensorError, OSError) as error:
        raise OSError(f"{path}: cannot be written ({error})") from error


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata in a header, which safetensors writes in varying order."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(
            json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither infinities nor NaN; takes one pass and no copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # NaN anywhere makes both ends NaN, and an infinity is an end itself.
    return all(bool(end.isfinite()) for end in tensor.aminmax())


DIGEST = "sha256"
"""Key of the digest in the header of a file of weights."""


def write_folder(
    folder: Path,
    record: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    config: str,
    weights: str,
) -> None:
    """Writes settings and tensors, each file whole or not at all."""
    require_finite(folder / weights, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2) + "\n"
    write_tensors(tensors, folder / weights, {DIGEST: tensors_digest(tensors, text)})
    write_atomically(folder / config, text)


def read_folder(
    folder: Path, *, config: str, weights: str, what: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads settings and tensors (float32) and checks them."""
    import torch

    for name in (config, weights):
        if not (folder / name).is_file():
            raise ValueError(f"{what} folder {folder}: {name} is missing")
    record = read_json_object(folder / config)
    with fitting(folder / weights), safe_open(folder / weights, framework="pt") as file:
        digest = (file.metadata() or {}).get(DIGEST)
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
    if tensors_digest(tensors, (folder / config).read_text(encoding="utf-8")) != digest:
        raise ValueError(
            f"{what} folder {folder}: damaged, or {config} and {weights} are of two exports: the "
            "digest differs; expected the files as training wrote them"
        )
    require_finite(folder / weights, tensors)
    # Copied to aligned memory, as parameters are: elsewhere products may have other last bits.
    return record, {key: one.to(dtype=torch.float32, copy=True) for key, one in tensors.items()}


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads one of a model's description files, which holds no infinities or NaN."""
    if not path.is_file():  # a pipe or a device has no end
        raise ValueError(f"{path}: expected a regular file")
    try:
        text = path.read_text(encoding="utf-8")
        return {**json.loads(text, parse_float=_finite, parse_constant=_finite)}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object ({error})") from error


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Names the file in the error if what was read does not fit the code that takes it.

    One line of ours that names a file of the same folder passes.
    """
    try:
        yield
    except Exception as error:  # libraries raise whatever their parsers run into
        message, reason = str(error), " ".join(str(error).split())
        is_named = path.name in message or f"{path.parent}/" in message
        is_named = is_named and isinstance(error, ValueError) and message == reason
        # No fault of the file: a disk that fails, a GPU without memory.
        is_elsewhere = isinstance(error, OSError) and error.errno is not None
        if is_named or is_elsewhere or type(error).__name__ == "OutOfMemoryError":
            raise
        raise ValueError(
            f"{path}: expected what this version reads, got {type(error).__name__}: {reason}"
        ) from error


def require_finite(path: object, tensors: Mapping[str, Tensor]) -> None:
    """Refuses tensors with infinities or NaN; ``path`` begins the message."""
    for key, value in tensors.items():
        if not is_finite(value):
            raise ValueError(f"{path}: {key} has numbers that are not finite")
