"""Where autocast is on, and how to be without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device; never for one that has none, such as meta."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a device computes in the dtypes that it is given."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()
