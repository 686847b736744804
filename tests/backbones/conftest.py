"""Tiny denoisers with random weights, one per decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.hf import HFBackbone

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def tiny_architecture(**changes: object) -> Architecture:
    values: dict[str, object] = {
        "decoder": "qwen2",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 3,
        "num_heads": 2,
        "initializer_range": 0.5,
        "mask_id": 3,
        "pad_id": 0,
        "eos_ids": (1,),
    }
    return Architecture(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def make_backbone() -> Callable[..., HFBackbone]:
    def make(*, trainable: bool = False, attn: str = "sdpa", **changes: object) -> HFBackbone:
        torch.manual_seed(0)
        architecture = tiny_architecture(**changes)
        return HFBackbone(
            architecture=architecture,
            attn_implementation=attn,  # type: ignore[arg-type]
            trainable=trainable,
        ).eval()

    return make


@pytest.fixture
def parity() -> Path:
    folder = SHARED / "parity"
    if not folder.is_dir():
        pytest.skip(f"no parity fixtures at {folder}")
    return folder
