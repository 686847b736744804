"""LightningModules: what is trained and what decodes."""

from lit_dlm.modules.decode import DecodeModule
from lit_dlm.modules.generate import TraceModule

__all__ = ["DecodeModule", "TraceModule"]
