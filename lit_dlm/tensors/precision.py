"""Checking for autocast and switching it off, and evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device; never for one that has none, such as meta."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context without autocast: the device computes in the dtypes of its inputs."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


@contextmanager
def evaluating(module: object) -> Iterator[None]:
    """Puts the parts of a module in evaluation mode; each gets its own mode back afterwards."""
    parts = list(module.modules()) if isinstance(module, nn.Module) else []
    was_training = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, flag in zip(parts, was_training, strict=True):
            part.training = flag
