"""lit-dlm: post-train and decode masked diffusion language models with PyTorch Lightning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_dlm.generation import Generations, generate

__version__ = "0.1.0"
__all__ = ["Generations", "__version__", "generate"]


def __getattr__(name: str) -> Any:
    # On first use: torch takes seconds to import.
    if name not in ("Generations", "generate"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.generation"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
