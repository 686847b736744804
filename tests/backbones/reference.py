"""A slow decoder written from the families' own tables, to compare ours with.

No part of transformers: weights are read by the family's key names, options by its option names.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LLADA: dict[str, Any] = {
    "model_type": "llada",
    "d_model": 32,
    "embedding_size": 40,
    "mask_token_id": 3,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "max_sequence_length": 64,
    "mlp_hidden_size": 48,
    "mlp_ratio": 4,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 40,
    "weight_tying": False,
}
HF: dict[str, Any] = {
    "model_type": "Dream",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "mask_token_id": 3,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

_NAMES = {
    "embed": ("model.transformer.wte.weight", "model.embed_tokens.weight"),
    "norm": ("model.transformer.ln_f.weight", "model.norm.weight"),
    "head": ("model.transformer.ff_out.weight", "lm_head.weight"),
    "layer": ("model.transformer.blocks.{}.", "model.layers.{}."),
    "in_norm": ("attn_norm", "input_layernorm"),
    "ff_norm": ("ff_norm", "post_attention_layernorm"),
    "q": ("q_proj", "self_attn.q_proj"),
    "k": ("k_proj", "self_attn.k_proj"),
    "v": ("v_proj", "self_attn.v_proj"),
    "o": ("attn_out", "self_attn.o_proj"),
    "gate": ("ff_proj", "mlp.gate_proj"),
    "up": ("up_proj", "mlp.up_proj"),
    "down": ("ff_out", "mlp.down_proj"),
}
_LLADA_NAMES, _HF_NAMES = ({key: names[side] for key, names in _NAMES.items()} for side in (0, 1))


_OPTIONS = {
    "width": ("d_model", "hidden_size"),
    "layers": ("n_layers", "num_hidden_layers"),
    "heads": ("n_heads", "num_attention_heads"),
    "kv": ("n_kv_heads", "num_key_value_heads"),
    "inner": ("mlp_hidden_size", "intermediate_size"),
    "tied": ("weight_tying", "tie_word_embeddings"),
    "eps": ("rms_norm_eps",) * 2,
    "theta": ("rope_theta",) * 2,
}


def sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The options both vocabularies share, under one name."""
    is_llada = "d_model" in config
    s = {name: config[words[0 if is_llada else 1]] for name, words in _OPTIONS.items()}
    if s["kv"] is None:
        s["kv"] = 1 if config["multi_query_attention"] else s["heads"]
    if s["inner"] is None:
        s["inner"] = config["mlp_ratio"] * s["width"]
    return {
        **s,
        "names": _LLADA_NAMES if is_llada else _HF_NAMES,
        "rows": config.get("embedding_size") or config["vocab_size"],
        "head_dim": config.get("head_dim") or s["width"] // s["heads"],
        "bias": config.get("include_qkv_bias") or config["model_type"] in ("Dream", "qwen2"),
        "qk_norm": config["model_type"] in ("sdar", "qwen3"),
        "scale": s["width"] ** -0.5 if config.get("scale_logits") else 1.0,
    }


def random_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """Weights under the family's names; a tied model has no head of its own."""
    s = sizes(config)
    names, width = s["names"], s["width"]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.2) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors = {names["embed"]: normal(s["rows"], width), names["norm"]: 1 + normal(width)}
    if not s["tied"]:
        tensors[names["head"]] = normal(s["rows"], width)
    attention = {"q": s["heads"], "k": s["kv"], "v": s["kv"]}
    for layer in range(s["layers"]):
        prefix = names["layer"].format(layer)
        for norm in ("in_norm", "ff_norm"):
            tensors[f"{prefix}{names[norm]}.weight"] = 1 + normal(width)
        for part, heads in attention.items():
            tensors[f"{prefix}{names[part]}.weight"] = normal(heads * s["head_dim"], width)
            if s["bias"]:
                tensors[f"{prefix}{names[part]}.bias"] = normal(heads * s["head_dim"])
        shapes = {"o": (width, s["heads"] * s["head_dim"]), "down": (width, s["inner"])}
        for part, shape in (shapes | dict.fromkeys(("gate", "up"), (s["inner"], width))).items():
            tensors[f"{prefix}{names[part]}.weight"] = normal(*shape)
        if s["qk_norm"]:
            for part in "qk":
                tensors[f"{prefix}self_attn.{part}_norm.weight"] = 1 + normal(s["head_dim"])
    return tensors


def raw_logits(
    config: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor, visible: Tensor | None = None
) -> Tensor:
    """Raw logits ``(B, L, V)`` in float64, before any shift."""
    s = sizes(config)
    names, weights = s["names"], {key: value.double() for key, value in tensors.items()}

    def rms(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + s["eps"]).sqrt() * gain

    batch, length = ids.shape
    half = s["head_dim"] // 2
    frequencies = s["theta"] ** (-torch.arange(half).double() / half)
    angles = torch.arange(length).double()[:, None] * frequencies  # (L, half)

    def rotate(x: Tensor) -> Tensor:
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    x = weights[names["embed"]][ids]
    for layer in range(s["layers"]):
        prefix = names["layer"].format(layer)

        def linear(value: Tensor, part: str, prefix: str = prefix) -> Tensor:
            key = prefix + names[part]
            return F.linear(value, weights[f"{key}.weight"], weights.get(f"{key}.bias"))

        h = rms(x, weights[f"{prefix}{names['in_norm']}.weight"])
        split = {
            part: linear(h, part).view(batch, length, heads, s["head_dim"]).transpose(1, 2)
            for part, heads in (("q", s["heads"]), ("k", s["kv"]), ("v", s["kv"]))
        }
        if s["qk_norm"]:
            for part in "qk":
                gain = weights[f"{prefix}self_attn.{part}_norm.weight"]
                split[part] = rms(split[part], gain)
        q, k = rotate(split["q"]), rotate(split["k"])
        repeat = s["heads"] // s["kv"]
        k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, split["v"]))
        scores = q @ k.transpose(-1, -2) / s["head_dim"] ** 0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        x = x + linear(mixed, "o")
        h = rms(x, weights[f"{prefix}{names['ff_norm']}.weight"])
        x = x + linear(F.silu(linear(h, "gate")) * linear(h, "up"), "down")
    x = rms(x, weights[names["norm"]])
    head = weights[names["embed"] if s["tied"] else names["head"]]
    return x @ head.T * s["scale"]


def slow_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    seqused_k: Tensor,
) -> Tensor:
    """What ``torch.nn.attention.varlen.varlen_attn`` says it computes, which needs a GPU.

    Sequence by sequence and head by head; as in the kernel, starts ascend, and sequences of keys
    may begin at the same one since their lengths are given.
    """
    assert {index.dtype for index in (cu_seq_q, cu_seq_k, seqused_k)} == {torch.int32}
    assert cu_seq_q.tolist() == sorted(cu_seq_q.tolist())
    assert cu_seq_k.tolist() == sorted(cu_seq_k.tolist())
    assert all(tensor.is_contiguous() for tensor in (query, key, value))
    assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key))
    output = torch.full_like(query, float("nan"))
    for number, count in enumerate(seqused_k.tolist()):
        begin, end = cu_seq_q[number : number + 2].tolist()
        keys = slice(int(cu_seq_k[number]), int(cu_seq_k[number]) + count)
        assert 0 <= end - begin <= max_q
        assert 0 < count <= max_k
        for head in range(query.shape[1]):
            scores = query[begin:end, head] @ key[keys, head].T * scale
            output[begin:end, head] = scores.softmax(-1) @ value[keys, head]
    return output
