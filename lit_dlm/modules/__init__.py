"""LightningModules: what is trained and what decodes."""

from lit_dlm.modules.autoencoder import AutoencoderModule
from lit_dlm.modules.decode import DecodeModule
from lit_dlm.modules.finetune import SFTModule
from lit_dlm.modules.generate import TraceModule
from lit_dlm.modules.pretrain import PretrainModule
from lit_dlm.modules.tabom import TABOMModule
from lit_dlm.modules.tracelock import TraceLockModule

__all__ = [
    "AutoencoderModule",
    "DecodeModule",
    "PretrainModule",
    "SFTModule",
    "TABOMModule",
    "TraceLockModule",
    "TraceModule",
]
