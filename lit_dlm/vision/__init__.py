"""Pictures: read, put into prompts, and seen by a model (:mod:`lit_dlm.backbones.vision` loads it).

Who works with text models alone needs nothing of this package.
"""
