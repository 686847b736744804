"""Tiny denoisers with random weights, one per decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.hf import HFBackbone
from tests.shared_data import shared


def tiny_architecture(**changes: Any) -> Architecture:
    values: dict[str, Any] = {
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
    return Architecture(**{**values, **changes})


@pytest.fixture
def make_backbone() -> Callable[..., HFBackbone]:
    def make(*, trainable: bool = False, attn: str = "sdpa", **changes: object) -> HFBackbone:
        torch.manual_seed(0)
        options: Any = {"attn_implementation": attn, "trainable": trainable}
        return HFBackbone(architecture=tiny_architecture(**changes), **options).eval()

    return make


@pytest.fixture
def parity() -> Path:
    return shared("parity")
