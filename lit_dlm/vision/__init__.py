"""Reads pictures, puts them into prompts and shows them to models.

:mod:`lit_dlm.backbones.vision` loads what a model sees with. Text models need nothing of this.
"""
