"""LightningModules for training and for decoding."""

from lit_dlm.modules.autoencoder import AutoencoderModule as AutoencoderModule
from lit_dlm.modules.decode import DecodeModule as DecodeModule
from lit_dlm.modules.dparallel import DParallelModule as DParallelModule
from lit_dlm.modules.dpo import DPOModule as DPOModule
from lit_dlm.modules.finetune import SFTModule as SFTModule
from lit_dlm.modules.generate import TraceModule as TraceModule
from lit_dlm.modules.pretrain import PretrainModule as PretrainModule
from lit_dlm.modules.tabom import TABOMModule as TABOMModule
from lit_dlm.modules.tracelock import TraceLockModule as TraceLockModule
