"""lit-dlm: post-train and decode masked diffusion language models with PyTorch Lightning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_dlm.finetuning.dparallel import DParallelModule as DParallelModule
    from lit_dlm.finetuning.dpo import DPOModule as DPOModule
    from lit_dlm.finetuning.pretrain import PretrainModule as PretrainModule
    from lit_dlm.finetuning.sft import SFTModule as SFTModule
    from lit_dlm.finetuning.tabom import TABOMModule as TABOMModule
    from lit_dlm.generation import Generations as Generations, generate as generate
    from lit_dlm.predict.decode import DecodeModule as DecodeModule
    from lit_dlm.reports.notebook import load_run as load_run
    from lit_dlm.tracelock.autoencoder import AutoencoderModule as AutoencoderModule
    from lit_dlm.tracelock.generate import TraceModule as TraceModule
    from lit_dlm.tracelock.module import TraceLockModule as TraceLockModule

__version__ = "0.1.0"
_PLACES = {
    "AutoencoderModule": "tracelock.autoencoder",
    "DecodeModule": "predict.decode",
    "DPOModule": "finetuning.dpo",
    "DParallelModule": "finetuning.dparallel",
    "Generations": "generation",
    "PretrainModule": "finetuning.pretrain",
    "SFTModule": "finetuning.sft",
    "TABOMModule": "finetuning.tabom",
    "TraceLockModule": "tracelock.module",
    "TraceModule": "tracelock.generate",
    "generate": "generation",
    "load_run": "reports.notebook",
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    # On first use: torch and Lightning take seconds to import.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
