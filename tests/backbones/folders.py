"""Folders of small random models in the layouts of releases."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_dlm.backbones import HFBackbone, resolve
from lit_dlm.backbones.lora import adapter_parameters
from lit_dlm.backbones.visibility import aligned
from tests.backbones.reference import HF, LLADA, raw_logits
from tests.twins import file_shapes

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
_SPARSE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu",
    "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1, "mask_token_id": 3,
    "num_experts": 8, "num_experts_per_tok": 3, "rms_norm_eps": 1e-6,
}  # fmt: skip
SPARSE: dict[str, dict[str, Any]] = {
    "llada_moe": {
        **_SPARSE, "model_type": "llada", "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        "dense_intermediate_size": 48, "expert_intermediate_size": 16, "moe_layer_freq": [1, 1],
        "shared_expert_intermediate_size": None, "moe_router_enable_expert_bias": False,
        "norm_topk_prob": None, "partial_rotary_factor": 1, "qk_layernorm": True,
        "rope_theta": 50000,
    },
    "llada2": {
        **_SPARSE, "model_type": "llada2_moe", "num_hidden_layers": 3, "head_dim": 12,
        "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 16,
        "num_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
        "rope_theta": 600000, "use_bias": False, "use_qkv_bias": False, "block_size": 4,
        "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    },
    "sdar_moe": {
        **_SPARSE, "model_type": "sdar_moe", "head_dim": 12, "intermediate_size": 48,
        "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rope_theta": 1000000.0, "attention_bias": False, "block_size": 4,
    },
}  # fmt: skip
"""The same of families with experts."""
_DENSE = {
    **{key: value for key, value in _SPARSE.items() if "experts" not in key},
    "intermediate_size": 48, "rope_theta": 1000000.0,
}  # fmt: skip
FAST_DLLM: dict[str, Any] = {**_DENSE, "model_type": "Fast_dLLM_Qwen", "bd_size": 4}
A2D: dict[str, Any] = {**_DENSE, "model_type": "a2d-qwen3", "head_dim": 12}
NEMOTRON: dict[str, Any] = {
    **{key: value for key, value in _DENSE.items() if key not in ("rope_theta", "pad_token_id")},
    "model_type": "nemotron_labs_diffusion", "head_dim": 12, "rms_norm_eps": 1e-5, "block_size": 4,
    "max_position_embeddings": 256, "bos_token_id": 2, "dlm_paradigm": "bidirectional",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
VARIANTS = {name: {**LLADA, **changes} for name, changes in _LLADA_CHANGES.items()} | {
    name: {**HF, **changes} for name, changes in _HF_CHANGES.items()
}
"""Configurations of small models in the words of their families."""


def weights_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights under the names of a family's files, drawn in the order of their names."""
    generator, found = torch.Generator().manual_seed(0), {}
    for key, shape in sorted(file_shapes(resolve(config)).items()):
        noise = torch.randn(shape, generator=generator) * 0.2
        found[key] = 1 + noise if "norm" in key else noise
    return found


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


def randomise(backbone: HFBackbone, *names: str) -> None:
    """Lets adapters do something: new ones are the identity."""
    generator = torch.Generator().manual_seed(0)
    for name in ("default", *names):
        for _, parameter in adapter_parameters(backbone.model, name):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def assert_logits(backbone: HFBackbone, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """1e-5 is the acceptance of float32 against the reference; logits reach about 10."""
    raw = raw_logits(config, tensors, IDS).float()
    expected = aligned(raw, backbone.spec.shift)
    torch.testing.assert_close(backbone(IDS), expected, atol=1e-5, rtol=1e-5)
