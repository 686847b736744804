"""Loads the vision part of a checkpoint from its files (:mod:`lit_dlm.vision`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lit_dlm.backbones.base import BackboneSpec
from lit_dlm.backbones.loading import Source
from lit_dlm.backbones.location import locate
from lit_dlm.backbones.resolution import resolve
from lit_dlm.backbones.tokenizer import read_added_tokens
from lit_dlm.backbones.weights import load_weights
from lit_dlm.system.files import fitting
from lit_dlm.system.options import refuse
from lit_dlm.vision.base import Vision, VisionSettings
from lit_dlm.vision.magvit import Magvit
from lit_dlm.vision.patches import CODEBOOK, PatchTokenizer
from lit_dlm.vision.tokens import TokenVision
from lit_dlm.vision.tower import TowerVision


def load_vision(
    settings: VisionSettings,
    source: Source,
    spec: BackboneSpec,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    trained_dtype: torch.dtype,
) -> Vision:
    """Returns what a model sees pictures with: tokens of its vocabulary, or a tower's rows.

    A tower's weights are of ``dtype``, except those that are trained.
    """
    if spec.text_vocab_size is not None:
        return token_vision(
            source.name, settings, first_id=spec.text_vocab_size, vocab_size=vocab_size
        )
    config = source.config or {"model_type": spec.family}
    vision = tower_vision(settings, config, source.files).to(dtype)
    for parameter in vision.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained_dtype)
    return vision


def tower_vision(
    settings: VisionSettings, config: Mapping[str, Any], files: Sequence[Path]
) -> TowerVision:
    """Returns LLaDA-V's tower and projector, whose weights are in the decoder's files."""
    if config.get("model_type") not in ("llava_llada", "llada") or "mm_vision_tower" not in config:
        refuse("HFBackbone.vision", "a LLaDA-V or MMaDA checkpoint", config.get("model_type"))
    with fitting(files[0].parent / "config.json"):
        vision = TowerVision(settings, config)
    weights = vision.stored_weights()
    load_weights(files, weights, rename=lambda key: key if key in weights else None)
    return vision


def token_vision(
    path: str | None,
    settings: VisionSettings,
    *,
    first_id: int | None = None,
    vocab_size: int | None = None,
) -> TokenVision:
    """Returns the picture tokens of a model, without loading the model itself.

    Args:
        path: embedded name, folder or hub id of the model.
        settings: how it sees; ``path`` is the tokenizer's where the model's folder has none.
        first_id: id of the first picture token; by default what the model's files say.
        vocab_size: of the model; by default words and picture tokens.
    """
    folder = None if path is None else locate(path, weights=False)
    if first_id is None and path is not None:
        first_id = resolve(path).spec.text_vocab_size
    if first_id is None:
        raise ValueError(f"{path}: expected a model whose pictures are tokens")
    place = folder if settings.path is None else locate(settings.path)
    if place is None or (settings.path is None and not (place / CODEBOOK).is_file()):
        raise ValueError("vision.path: expected the picture tokenizer, such as showlab/magvitv2")
    has_patches = (place / CODEBOOK).is_file()
    with fitting(place / (CODEBOOK if has_patches else "*.safetensors")):
        tokenizer = PatchTokenizer(place / CODEBOOK) if has_patches else Magvit(place)
    marks = {} if folder is None else read_added_tokens(folder)
    return TokenVision(
        settings, first_id=first_id, tokenizer=tokenizer, vocab_size=vocab_size, marks=marks
    )
