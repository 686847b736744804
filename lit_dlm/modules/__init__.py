"""LightningModules: what is trained and what decodes."""

from lit_dlm.modules.decode import DecodeModule

__all__ = ["DecodeModule"]
