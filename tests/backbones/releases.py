"""Configurations of released models."""

from __future__ import annotations

from typing import Any

DREAM: dict[str, Any] = {
    "model_type": "Dream",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "mask_token_id": 151666,
    "pad_token_id": 151643,
    "eos_token_id": 151643,
    "bos_token_id": 151643,
}


LLADA: dict[str, Any] = {
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "block_type": "llama",
    "block_group_size": 1,
    "d_model": 4096,
    "embedding_size": 126464,
    "include_bias": False,
    "include_qkv_bias": False,
    "layer_norm_type": "rms",
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 126464,
    "weight_tying": False,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
}
