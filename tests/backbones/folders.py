"""Folders of small random models in the layouts of releases."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_dlm.backbones import HFBackbone
from lit_dlm.ops.batches import aligned
from tests.backbones.reference import HF, LLADA, raw_logits

IDS = torch.tensor([[5, 9, 3, 7, 3, 11, 30], [4, 3, 8, 3, 6, 2, 39]])


_LLADA_CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"weight_tying": True},
    "gqa": {"n_kv_heads": 2},
    "mqa": {"n_kv_heads": None, "multi_query_attention": True},
    "qkv_bias": {"include_qkv_bias": True},
    "padded_embedding": {"embedding_size": 40, "vocab_size": 37},
    "no_embedding_size": {"embedding_size": None},
    "scaled_logits": {"scale_logits": True},
    "eps": {"rms_norm_eps": 1e-2},
    "theta": {"rope_theta": 50.0},
    "mlp_ratio": {"mlp_hidden_size": None},
    "everything": {
        "weight_tying": True,
        "n_kv_heads": 1,
        "include_qkv_bias": True,
        "vocab_size": 37,
        "scale_logits": True,
        "rms_norm_eps": 1e-3,
        "rope_theta": 100.0,
    },
    "mmada": {"model_type": "mmada"},
}
_HF_CHANGES: dict[str, dict[str, Any]] = {
    "dream": {},
    "dream_tied": {"tie_word_embeddings": True},
    "dream_mqa": {"num_key_value_heads": 1, "rope_theta": 300.0},
    "sdar": {"model_type": "sdar", "head_dim": 12, "rms_norm_eps": 1e-3},
    "sdar_tied": {"model_type": "sdar", "head_dim": 16, "tie_word_embeddings": True},
    "llada_v": {"model_type": "llava_llada", "num_key_value_heads": 4},
    "head_dim": {"head_dim": 20},
}
VARIANTS = {name: {**LLADA, **changes} for name, changes in _LLADA_CHANGES.items()} | {
    name: {**HF, **changes} for name, changes in _HF_CHANGES.items()
}
"""Configurations of small models in the words of their families."""


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, shards: int = 1
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_logits(backbone: HFBackbone, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """1e-5 is the acceptance of float32 against the reference; logits reach about 10."""
    raw = raw_logits(config, tensors, IDS).float()
    expected = aligned(raw, backbone.spec.shift)
    torch.testing.assert_close(backbone(IDS), expected, atol=1e-5, rtol=1e-5)
