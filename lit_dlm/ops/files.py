"""Files that readers see as a whole or not at all; files of tensors carry their digest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives another file to fill, which takes the place of ``path`` when that has succeeded."""
    partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")  # processes share folders
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers see all of it or nothing, and a crash of the machine keeps it.

    Texts are UTF-8; the folder is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class TensorDigest:
    """SHA-256 over the names, dtypes, shapes and bytes of tensors, which are added one by one.

    Args:
        text: what goes before them.
    """

    def __init__(self, text: str = "") -> None:
        self._sha = hashlib.sha256(text.encode())

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor."""
        self._sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous()
        self._sha.update(plain.reshape(-1).view(torch.uint8).numpy().data)

    def text(self) -> str:
        """The digest, hexadecimal."""
        return self._sha.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Digest of tensors in the order of their names."""
    digest = TensorDigest(text)
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.text()


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file as a whole; equal tensors give equal bytes."""
    plain = {key: tensors[key].detach().cpu().contiguous() for key in sorted(tensors)}
    try:
        with replacing(path) as partial:
            save_file(plain, partial, metadata=dict(metadata))
            _sort_metadata(partial)
            partial.chmod(0o644)  # safetensors makes files that only their owner may read
    except (SafetensorError, OSError) as error:
        raise OSError(f"{path}: cannot be written ({error})") from error


def _sort_metadata(path: Path) -> None:
    """Orders the facts in a header, which safetensors writes in an order that changes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(
            json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither infinities nor not-a-number; one pass without a copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))
