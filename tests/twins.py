"""Twins of released checkpoints: random weights, and otherwise what a download holds.

A twin has its release's own ``config.json`` words, weight keys, shards with an index, vocabulary
size, special tokens and chat template, so that whatever runs on it meets what the release would
bring. Small ones are written in a second; full-size ones stream through little memory. The texts of
a twin mean nothing: beside the bytes, its tokenizer has few ordinary entries of its own.
"""

import builtins
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lit_dlm.backbones import weights
from lit_dlm.backbones.architecture import PLAIN_DECODERS
from lit_dlm.backbones.location import locate
from lit_dlm.backbones.resolution import Resolved, resolve
from lit_dlm.vision.base import VisionSettings
from lit_dlm.vision.magvit import Magvit, MagvitSizes
from lit_dlm.vision.tower import TowerVision

_QWEN_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
]  # fmt: skip
_LLADA_NAMED = {
    126080: "<|startoftext|>", 126081: "<|endoftext|>", 126082: "[CLS]", 126083: "[gMASK]",
    126336: "<|mdm_mask|>", 126340: "<role>", 126341: "</role>",
    126342: "<|arithmetic_start|>", 126343: "<|arithmetic_end|>",
    126344: "<|number_start|>", 126345: "<|number_end|>",
    126346: "<|start_header_id|>", 126347: "<|end_header_id|>", 126348: "<|eot_id|>",
}  # fmt: skip
_ORDINARY = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
_ORDINARY |= {"<think>", "</think>"}
"""Added tokens that decoded texts show."""

_CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}SYSTEM{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _chatml(system: str) -> str:
    turn = f"<|im_start|>system\\n{system}<|im_end|>\\n"
    return _CHATML.replace("SYSTEM", f"{{{{ '{turn}' }}}}" if system else "")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A released tokenizer as far as its special tokens and files go."""

    added: tuple[str, ...]
    """Added tokens in the order of their ids, behind the ordinary entries."""
    num_ordinary: int
    """Entries before them."""
    files: Literal["vocab.json", "tokenizer.json"]
    """How the release stores it; ``vocab.json`` comes with ``merges.txt``."""
    template: str
    """Chat template: one turn after the other, as the release's renders plain messages."""
    named: Mapping[str, str]
    """Tokens with a part to play, such as ``eos_token``."""

    def ids(self) -> dict[str, int]:
        """Added tokens to their ids."""
        return {token: self.num_ordinary + index for index, token in enumerate(self.added)}


@dataclass(frozen=True, kw_only=True)
class Release:
    """What a twin copies of a released checkpoint."""

    config: Mapping[str, Any]
    """Contents of its ``config.json``."""
    vocabulary: Vocabulary


_END = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
_DREAM_TOKENS = Vocabulary(
    added=(*_QWEN_TOKENS, "<|beginoftext|>", "<|mask|>"),
    num_ordinary=151643,
    files="vocab.json",
    template=_chatml("You are a helpful assistant."),
    named={**_END, "bos_token": "<|beginoftext|>", "mask_token": "<|mask|>"},
)
_SDAR_TOKENS = Vocabulary(
    added=(
        *_QWEN_TOKENS,
        *("<tool_response>", "</tool_response>", "<think>", "</think>", "<|MASK|>"),
    ),
    num_ordinary=151643,
    files="vocab.json",
    template=_chatml(""),
    named=_END,
)
_QWEN25_TOKENS = Vocabulary(
    added=tuple(_QWEN_TOKENS),
    num_ordinary=151643,
    files="tokenizer.json",
    template=_chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    named={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
)
_FAST_DLLM_TOKENS = Vocabulary(
    added=(*_QWEN_TOKENS, "|<MASK>|"),
    num_ordinary=151643,
    files="vocab.json",
    template=_chatml("You are a helpful assistant."),
    named={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
)
_LLADA_TOKENS = Vocabulary(
    added=tuple(
        _LLADA_NAMED.get(number, f"<|reserved_token_{number - 126084}|>")
        for number in range(126080, 126349)
    ),
    num_ordinary=126080,
    files="tokenizer.json",
    template=(
        "{% for message in messages %}{{ (bos_token if loop.first else '') + "
        "'<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + "
        "message.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    ),
    named={**_END, "bos_token": "<|startoftext|>", "cls_token": "[CLS]"},
)

_LING_NAMED = {
    156891: "<|startoftext|>", 156892: "<|endoftext|>", 156893: "[CLS]", 156894: "[gMASK]",
    156895: "<|mask|>", 156898: "<role>", 156899: "</role>", 156900: "<|role_end|>",
}  # fmt: skip
_LING_TOKENS = Vocabulary(
    added=tuple(
        _LING_NAMED.get(number, f"<|reserved_token_{number}|>") for number in range(156891, 156910)
    ),
    num_ordinary=156891,
    files="tokenizer.json",
    template=(
        "<role>SYSTEM</role>detailed thinking off<|role_end|>{% for message in messages %}"
        "{{ '<role>' + ('HUMAN' if message.role == 'user' else message.role | upper) + '</role>' + "
        "message.content + '<|role_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}"
    ),
    named={**_END, "bos_token": "<|startoftext|>", "mask_token": "<|mask|>"},
)

_NEMOTRON_TOKENS = Vocabulary(
    added=("<s>", "<end>", "<mask>"),
    num_ordinary=131069,
    files="tokenizer.json",
    template=_chatml("").replace("<|im_end|>", "<end>"),
    named={"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<end>"},
)
"""Texts are our own, and ids come behind the ordinary entries: those released are 1, 11 and 100."""

_QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
    "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
    "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 151643, "eos_token_id": 151643,
}  # fmt: skip
_DREAM: dict[str, Any] = {
    **_QWEN2, "model_type": "Dream", "architectures": ["DreamModel"],
    "auto_map": {
        "AutoConfig": "configuration_dream.DreamConfig",
        "AutoModel": "modeling_dream.DreamModel",
    },
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 131072, "max_window_layers": 28, "rope_scaling": None,
    "tie_word_embeddings": False, "mask_token_id": 151666, "pad_token_id": 151643,
}  # fmt: skip
_SDAR_4B: dict[str, Any] = {
    **_QWEN2, "model_type": "sdar", "architectures": ["SDARForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "attention_bias": False, "attn_implementation": "flex_attention", "block_size": 4,
    "fuse_cross_entropy": True, "mask_token_id": 151669, "vocab_size": 151936,
    "hidden_size": 2560, "head_dim": 128, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "max_window_layers": 36, "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip
_SDAR_8B = {**_SDAR_4B, "hidden_size": 4096, "intermediate_size": 12288}
_LLADA: dict[str, Any] = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"],
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
    },
    "activation_type": "silu", "alibi": False, "attention_dropout": 0.0,
    "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1,
    "block_type": "llama", "d_model": 4096, "embedding_dropout": 0.0, "embedding_size": 126464,
    "eos_token_id": 126081, "include_bias": False, "include_qkv_bias": False, "init_std": 0.02,
    "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "mask_token_id": 126336, "max_sequence_length": 4096, "mlp_hidden_size": 12288,
    "mlp_ratio": 4, "multi_query_attention": None, "n_heads": 32, "n_kv_heads": 32,
    "n_layers": 32, "pad_token_id": 126081, "residual_dropout": 0.0, "rms_norm_eps": 1e-5,
    "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
    "vocab_size": 126464, "weight_tying": False,
}  # fmt: skip
_LLADA_V: dict[str, Any] = {
    "model_type": "llava_llada", "architectures": ["LlavaLLaDAModelLM"], "attention_bias": False,
    "attention_dropout": 0.0, "eos_token_id": 126081, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 8192,
    "image_aspect_ratio": "anyres_max_4", "image_grid_pinpoints": "(1x1),...,(6x6)",
    "mm_hidden_size": 1152, "mm_patch_merge_type": "spatial_unpad",
    "mm_projector_type": "mlp2x_gelu", "mm_vision_tower": "google/siglip2-so400m-patch14-384",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "vocab_size": 126464,
}  # fmt: skip
_FAST_DLLM: dict[str, Any] = {
    **{key: value for key, value in _DREAM.items() if key not in ("mask_token_id", "auto_map")},
    "model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 32,
    "eos_token_id": 151645, "max_position_embeddings": 32768, "pad_token_id": 151645,
}  # fmt: skip
_SDAR_30B: dict[str, Any] = {
    **_SDAR_4B, "model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"],
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_LING: dict[str, Any] = {
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "num_attention_heads": 16, "num_experts_per_tok": 8, "pad_token_id": 156892,
    "eos_token_id": 156892, "rope_scaling": None, "tie_word_embeddings": False,
    "use_cache": False, "vocab_size": 157184,
}  # fmt: skip
_LLADA_MOE: dict[str, Any] = {
    **_LING, "model_type": "llada", "architectures": ["LLaDAMoEModelLM"],
    "dense_intermediate_size": 8192, "expert_intermediate_size": 1024, "moe_layer_freq": [1] * 16,
    "max_position_embeddings": 8192, "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax", "norm_topk_prob": None, "num_experts": 64,
    "num_hidden_layers": 16, "num_key_value_heads": 16, "partial_rotary_factor": 1,
    "qk_layernorm": True, "rms_norm_eps": 1e-5, "rope_theta": 50000,
    "shared_expert_intermediate_size": None,
}  # fmt: skip
_LLADA2: dict[str, Any] = {
    **_LING, "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"],
    "first_k_dense_replace": 1, "head_dim": 128, "intermediate_size": 5120, "n_group": 8,
    "max_position_embeddings": 16384, "moe_intermediate_size": 512, "norm_head": False,
    "moe_router_enable_expert_bias": True, "norm_topk_prob": True, "num_experts": 256,
    "num_hidden_layers": 20, "num_key_value_heads": 4, "num_shared_experts": 1,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_theta": 600000,
    "routed_scaling_factor": 2.5, "score_function": "sigmoid", "topk_group": 4,
    "use_bias": False, "use_qkv_bias": False,
}  # fmt: skip

_NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_labs_diffusion", "architectures": ["NemotronLabsDiffusionModel"],
    "auto_map": {
        "AutoConfig": "configuration_nemotron_labs_diffusion.NemotronLabsDiffusionConfig",
        "AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel",
    },
    "ar_loss_weight": 1.0, "attention_bias": False, "attention_dropout": 0.0,
    "attn_implementation": "sdpa", "block_size": 32, "bos_token_id": 131069,
    "dlm_loss_weight": None, "dlm_paradigm": "bidirectional", "dp_varying_mask_ratio": False,
    "eos_token_id": 131070, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "mask_token_id": 131071,
    "max_position_embeddings": 262144, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0, "rope_type": "yarn",
    },
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": False, "vocab_size": 131072,
}  # fmt: skip

_SMALL_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip

_MMADA = {**_LLADA, "model_type": "mmada"}
_MMADA |= dict.fromkeys(("embedding_size", "vocab_size"), 134656)  # 8,192 codes of pictures more
_QWEN25: dict[str, Any] = {
    **_QWEN2, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "eos_token_id": 151645,
}  # fmt: skip

RELEASES: dict[str, Release] = {
    name: Release(config=config, vocabulary=vocabulary)
    for name, config, vocabulary in (
        ("Dream-org/Dream-v0-Instruct-7B", _DREAM, _DREAM_TOKENS),
        ("apple/DiffuCoder-7B-Instruct", _DREAM, _DREAM_TOKENS),
        ("apple/DiffuCoder-7B-cpGRPO", _DREAM, _DREAM_TOKENS),
        ("GSAI-ML/LLaDA-8B-Instruct", _LLADA, _LLADA_TOKENS),
        ("Gen-Verse/MMaDA-8B-MixCoT", _MMADA, _LLADA_TOKENS),
        ("GSAI-ML/LLaDA-V", _LLADA_V, _LLADA_TOKENS),
        ("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", _LLADA_MOE, _LING_TOKENS),
        ("inclusionAI/LLaDA2.0-mini", _LLADA2, _LING_TOKENS),
        ("Efficient-Large-Model/Fast_dLLM_v2_7B", _FAST_DLLM, _FAST_DLLM_TOKENS),
        ("JetLM/SDAR-30B-A3B-Chat", _SDAR_30B, _SDAR_TOKENS),
        ("JetLM/SDAR-4B-Chat", _SDAR_4B, _SDAR_TOKENS),
        ("JetLM/SDAR-8B-Chat", _SDAR_8B, _SDAR_TOKENS),
        ("Gen-Verse/TraDo-4B-Instruct", _SDAR_4B, _SDAR_TOKENS),
        ("Gen-Verse/TraDo-8B-Instruct", _SDAR_8B, _SDAR_TOKENS),
        ("Gen-Verse/TraDo-8B-Thinking", _SDAR_8B, _SDAR_TOKENS),
        ("nvidia/Nemotron-Labs-Diffusion-8B", _NEMOTRON, _NEMOTRON_TOKENS),
        ("nvidia/Nemotron-Labs-Diffusion-8B-Base", _NEMOTRON, _NEMOTRON_TOKENS),
        ("Qwen/Qwen2.5-0.5B-Instruct", _QWEN25, _QWEN25_TOKENS),
    )
}
"""Hub ids, as the shipped configurations name them, to what their twins copy."""


def write_twin(
    folder: str | Path,
    release: str,
    *,
    full_size: bool = False,
    num_layers: int | None = None,
    hidden_size: int = 64,
    num_ordinary: int | None = None,
) -> Path:
    """Writes a twin: configuration, bfloat16 weights in shards with an index, tokenizer files.

    Weights are normal, with the spread that gives logits of the release's width: ``0.02`` times
    the root of the released width over the twin's. Norms are one.

    Args:
        folder: created when absent. A family that is told by its folder's name (TraDo, MMaDA,
            DiffuCoder) needs that name here.
        release: a key of :data:`RELEASES`.
        full_size: the released sizes. One shard of about a gigabyte is in memory at a time.
        num_layers: decoder layers; by default 2, or all of them at full size.
        hidden_size: width of a small twin, a multiple of 8; its heads are four.
        num_ordinary: entries before its added tokens, which move to other ids with them; by default
            as many as the release has.
    """
    known = RELEASES[release]
    if num_ordinary is not None:
        known = _shortened(known, num_ordinary)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _sized(known.config, None if full_size else hidden_size, num_layers)
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, known.vocabulary)

    width, released = (c.get("hidden_size", c.get("d_model")) for c in (config, known.config))
    spread = 0.02 * math.sqrt(released / width)
    # An autoregressive checkpoint has no mask token; its shapes do not depend on one.
    plain = {"mask_id": 0} if config["model_type"] in PLAIN_DECODERS else None
    shapes = file_shapes(resolve(config, spec_overrides=plain, source=f"{release}: "))
    if "mm_vision_tower" in config:
        shapes |= tower_shapes(config)
    # A CPU draws a gigabyte in half a minute.
    device = "cuda" if full_size and torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def read(key: str) -> Tensor:
        if "norm" in key or "ln_f" in key:
            return torch.ones(shapes[key], dtype=torch.bfloat16)
        drawn = torch.empty(shapes[key], dtype=torch.bfloat16, device=device)
        return drawn.normal_(0.0, spread, generator=generator).cpu()

    sizes = {key: 2 * math.prod(shape) for key, shape in shapes.items()}
    with patch.object(weights, "SHARD_BYTES", min(sum(sizes.values()) // 2, 10**9)):
        weights.save_checkpoint(sizes, read, folder, write=True)
    return folder


def write_autoregressive(folder: Path, model_type: str = "llama", hidden_size: int = 16) -> None:
    """A checkpoint of random weights of this type, with a tokenizer of Qwen2.5's kind."""
    tokenizer = AutoTokenizer.from_pretrained(
        write_twin(folder.parent / "twin", "Qwen/Qwen2.5-0.5B-Instruct", num_ordinary=2000)
    )
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def file_shapes(resolved: Resolved) -> dict[str, tuple[int, ...]]:
    """Shapes that weight files should hold, by their own names; a tied head is not listed."""
    ours = replace(resolved.architecture, vocab_size=resolved.file_vocab_size).parameter_shapes()
    return {
        key: (sum(piece.shape[0] for piece in parts), *parts[0].shape[1:])
        for key, parts in resolved.pieces(ours).items()
    }


def write_descriptions(folder: Path) -> Callable[..., Path]:
    """Writes the configurations of all releases, and gives a ``locate`` that finds them there."""
    for release, known in RELEASES.items():
        (folder / release).mkdir(parents=True)
        _write_json(folder / release / "config.json", known.config)

    def locate_here(path: str, *, weights: bool = True) -> Path:
        return folder / path if path in RELEASES else locate(path, weights=weights)

    return locate_here


def tower_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of what makes rows of pictures in LLaDA-V, by its ``config.json``."""
    with torch.device("meta"):
        stored = TowerVision(VisionSettings(), config).stored_weights()
    return {name: tuple(weight.shape) for name, weight in stored.items()}


def write_magvit_twin(folder: Path) -> Path:
    """Writes a small MAGVIT-v2 with the release's number of tokens and random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    small = MagvitSizes(width=32, encoder=((1, 1), (1, 1)), decoder=((1, 1), (1, 1)))
    save_file(Magvit(sizes=small).state_dict(), folder / "model.safetensors")
    return folder


def _shortened(known: Release, num_ordinary: int) -> Release:
    """With fewer entries in its vocabulary."""
    moved = ("vocab_size", "embedding_size", *(key for key in known.config if "token_id" in key))
    fewer = known.vocabulary.num_ordinary - num_ordinary
    config = {key: known.config[key] - fewer for key in moved if key in known.config}
    return Release(
        config={**known.config, **config},
        vocabulary=replace(known.vocabulary, num_ordinary=num_ordinary),
    )


_INNER = "moe_intermediate_size"
_HF_HEADS = ("num_attention_heads", "num_key_value_heads")


def _sized(config: Mapping[str, Any], width: int | None, num_layers: int | None) -> dict[str, Any]:
    """The family's original configuration, less wide and deep."""
    own = "d_model" in config
    sized = dict(config)
    if width is not None:
        heads, kv_heads = ("n_heads", "n_kv_heads") if own else _HF_HEADS
        grouped = config[kv_heads] != config[heads]
        sized |= {"d_model" if own else "hidden_size": width, heads: 4}
        sized |= {kv_heads: 2 if grouped else 4}
        sized |= {"mlp_hidden_size" if own else "intermediate_size": 2 * width}
        if "head_dim" in config:
            sized["head_dim"] = width // 2  # not the width over the heads
        if "mm_vision_tower" in config:
            sized["vision_config"] = _SMALL_TOWER
        if "num_experts" in config:
            inner = "expert_intermediate_size" if "qk_layernorm" in config else _INNER
            sized |= {"num_experts": 16, "num_experts_per_tok": 4, inner: width // 2}
        num_layers = num_layers or 2
    if num_layers is not None:
        sized["n_layers" if own else "num_hidden_layers"] = num_layers
        if "moe_layer_freq" in config:
            sized["moe_layer_freq"] = [1] * num_layers
    return sized


@cache
def _merges() -> list[tuple[str, str]]:
    """Merges learnt from Python's own help texts."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [str(getattr(builtins, name).__doc__) for name in dir(builtins)]
    trainer = trainers.BpeTrainer(
        vocab_size=1256,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    learner.train_from_iterator(texts, trainer)
    return [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]


def _write_tokenizer(folder: Path, vocabulary: Vocabulary) -> None:
    merges = _merges()
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += dict.fromkeys(left + right for left, right in merges)
    entries += [f"<t{number}>" for number in range(len(entries), vocabulary.num_ordinary)]
    ids = {entry: number for number, entry in enumerate(entries)}
    added = vocabulary.ids()
    tokens = [AddedToken(text, special=text not in _ORDINARY, normalized=False) for text in added]
    if vocabulary.files == "vocab.json":
        _write_json(folder / "vocab.json", ids)
        lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        _write_json(folder / "added_tokens.json", added)
    else:
        made = Tokenizer(models.BPE(vocab=ids, merges=merges))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_tokens(tokens)
        made.save(str(folder / "tokenizer.json"))
    fields = ("lstrip", "normalized", "rstrip", "single_word", "special")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                str(added[token.content]): {
                    "content": token.content,
                    **{name: getattr(token, name) for name in fields},
                }
                for token in tokens
            },
            "chat_template": vocabulary.template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 131072,
            "padding_side": "left",
            **vocabulary.named,
        },
    )
    _write_json(folder / "special_tokens_map.json", dict(vocabulary.named))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
