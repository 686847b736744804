"""Digests of tensors, as files of weights carry them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


class TensorDigest:
    """SHA-256 over the names, dtypes, shapes and bytes of tensors, which are added one by one.

    Args:
        text: what goes before them.
    """

    def __init__(self, text: str = "") -> None:
        self._sha = hashlib.sha256(text.encode())

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor.

        Args:
            name: its key.
            tensor: of any shape and dtype, on any device.
        """
        self._sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous()
        self._sha.update(plain.reshape(-1).view(torch.uint8).numpy().data)

    def text(self) -> str:
        """The digest, hexadecimal."""
        return self._sha.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Digest of tensors in the order of their names.

    Args:
        tensors: by key.
        text: what goes before them.
    """
    digest = TensorDigest(text)
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.text()


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither infinities nor not-a-number; one pass without a copy.

    Args:
        tensor: of any shape and dtype.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))
