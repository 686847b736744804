"""Everything that defines a denoiser except its weights, and the model families as plain data.

A family's own configuration is first translated into an :class:`Architecture`; only this file turns
that into a transformers configuration. Dream, DiffuCoder and Fast-dLLM v2 are Qwen2 decoders, SDAR
and TraDo Qwen3 decoders, LLaDA-V's text part a Llama decoder, all under transformers' key names;
LLaDA and MMaDA are Llama decoders (Qwen2 with ``include_qkv_bias``) under names of their own, as is
Nemotron-Labs-Diffusion. Families with experts: :mod:`~lit_dlm.backbones.experts`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lit_dlm.backbones.base import UNKNOWN_ID, BackboneSpec
from lit_dlm.backbones.experts import (
    LLADA2_OPTIONS,
    LLADA_MOE_OPTIONS,
    WORDS,
    Experts,
    config_fields as fields_of_experts,
    expert_biases,
    from_llada2,
    from_llada_moe,
    llada2_key,
)
from lit_dlm.system.options import at_least, of_declared_kinds, refuse, within

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DecoderType = Literal["qwen2", "llama", "qwen3", "qwen3_moe", "glm4_moe"]

_DECODERS = {
    "qwen2": "Qwen2",
    "llama": "Llama",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "glm4_moe": "Glm4Moe",
}
"""Prefixes of transformers' classes, which are imported on first use: that takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Architecture(BackboneSpec):
    """A :class:`BackboneSpec` and the sizes of its bidirectional decoder."""

    decoder: DecoderType = "qwen2"
    """Layer type: Qwen2 (bias on q, k, v), Llama (no bias) or Qwen3 (norms on q and k); Qwen3-MoE
    (softmax router) and GLM-4-MoE (sigmoid router, norms on q and k) with :attr:`experts`."""
    vocab_size: int
    """Rows of the embedding, padding rows included; logits have as many columns."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated SiLU feed-forward."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads; by default as many as query heads."""
    head_dim: int | None = None
    """Width of a head; by default ``hidden_size / num_heads``."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Extra rotary settings under transformers' names (``rope_type``, ``factor``, ...)."""
    max_positions: int = 4096
    """Longest canvas the model was made for; longer decodes are refused."""
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    """Standard deviation of random weights."""
    tie_embeddings: bool = False
    """Whether the head shares the embedding matrix."""
    attention_bias: bool = False
    """Bias on q, k, v and o of a Llama or Qwen3 decoder (Qwen2 always has it on q, k, v)."""
    mlp_bias: bool = False
    """Bias in the feed-forward of a Llama decoder."""
    attention_dropout: float = 0.0
    """Dropout on attention weights in training; released models have none."""
    experts: Experts | None = None
    """Mixture of experts in place of the layers' feed-forward, for decoders that have one."""

    family: str = "custom"

    def __post_init__(self) -> None:
        for name in ("eos_ids", "forbidden_ids"):  # YAML and JSON give lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        of = "Architecture."
        of_declared_kinds(self)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_positions", "block_size"):
            at_least(1, of=of, **{name: getattr(self, name)})
        within("[1, 1000]", of=of, num_layers=self.num_layers)  # each takes time to build
        for name in ("rope_theta", "rms_norm_eps", "logit_scale"):
            within("(0, inf)", of=of, **{name: getattr(self, name)})
        within("[0, 1]", of=of, attention_dropout=self.attention_dropout)
        is_divided = self.head_dim is not None or self.hidden_size % self.num_heads == 0
        if not is_divided or self.num_heads % self.kv_heads:
            divisor = f"a divisor of hidden_size {self.hidden_size} (or head_dim)"
            wanted = f"{divisor} and a multiple of num_kv_heads {self.kv_heads}"
            refuse("Architecture.num_heads", wanted, self.num_heads)
        if (self.experts is None) == (self.decoder in WORDS):
            refuse("Architecture.experts", f"with {' or '.join(WORDS)}", self.decoder)
        spec = self.spec()
        ids = [spec.mask_id, spec.pad_id, spec.bos_id or 0, *spec.eos_ids, *spec.forbidden_ids]
        if beyond := [i for i in ids if not UNKNOWN_ID <= i < self.vocab_size]:
            refuse("Architecture", f"ids below vocab_size {self.vocab_size}", beyond)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def inner_width(self) -> int:
        """Largest inner width that a token passes in a layer, its experts taken together."""
        if self.experts is None:
            return self.intermediate_size
        met = self.experts.width * (self.experts.per_token + self.experts.shared)
        return max(met, self.intermediate_size) if self.experts.first_dense else met

    def spec(self) -> BackboneSpec:
        values = {field.name: getattr(self, field.name) for field in fields(BackboneSpec)}
        return BackboneSpec(**values)

    def config_fields(self) -> dict[str, Any]:
        """Returns the transformers configuration as plain JSON values, without its defaults."""
        # Only if they are on: a configuration without them keeps its digest.
        biases = {name: True for name in ("attention_bias", "mlp_bias") if getattr(self, name)}
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        sparse = {} if self.experts is None else fields_of_experts(self.experts, self.decoder)
        return {
            "model_type": self.decoder,
            "architectures": [f"{_DECODERS[self.decoder]}ForCausalLM"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": self.attention_dropout,
            **biases,
            **sparse,
            "pad_token_id": self.pad_id,
            "eos_token_id": [i for i in self.eos_ids if i != UNKNOWN_ID] or None,
            "bos_token_id": self.bos_id,
            "is_causal": False,
            "use_cache": False,
        }

    def hf_config(self) -> PreTrainedConfig:
        # With a padding id transformers would freeze that embedding row at zero gradient; here
        # padding is hidden from attention anyway, and its id is often the end-of-text id.
        dropped = ("model_type", "is_causal", "pad_token_id")
        values = {k: v for k, v in self.config_fields().items() if k not in dropped}
        config = _of_transformers(self.decoder, "Config")(**values)
        # Not a field of these classes: the mask builders and the layers look the attribute up.
        config.is_causal = False
        return config

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return _of_transformers(self.decoder, "ForCausalLM")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns all weights' shapes but a tied head's by transformers' names; allocates none."""
        import torch

        with torch.device("meta"):
            model = self.model_class(self.hf_config())
        named = {**dict(model.named_parameters()), **expert_biases(model)}
        return {key: tuple(tensor.shape) for key, tensor in named.items()}

    def spec_fields(self) -> dict[str, Any]:
        fields = asdict(self.spec())
        # Left out if unset, so that such models keep their digest.
        if self.text_vocab_size is None:
            del fields["text_vocab_size"]
        for name in ("edits_tokens", "whole_prompt", "causal_context"):
            if not fields[name]:
                del fields[name]
        return fields

    def digest(self) -> str:
        """Returns the SHA-256 of the configuration and the specification in canonical JSON."""
        # Records compare models by this digest: whatever enters it must stay as it is.
        document = {"config": self.config_fields(), "spec": self.spec_fields()}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _of_transformers(decoder: str, kind: str) -> Any:
    return getattr(import_module("transformers"), _DECODERS[decoder] + kind)


KeyLayout = Literal["hf", "llada", "llada2", "nemotron"]
PEFTTask = Literal["CAUSAL_LM", "FEATURE_EXTRACTION"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the checkpoints of a family have in common."""

    model_types: tuple[str, ...]
    """Values that ``model_type`` may have in its ``config.json``."""
    decoder: DecoderType
    layout: KeyLayout = "hf"
    """Naming scheme of its options and weight keys."""
    mask_tokens: tuple[str, ...] = ()
    """Text of the mask token; files of the same release may differ."""
    eos_tokens: tuple[str, ...] = ()
    """Texts of the end of text and of the end of turn; where none are known, ids count."""
    bos_token: str | None = None
    """Text of the start of text."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its :class:`BackboneSpec` that are not as by default."""
    block: tuple[str, int] = ("block_size", 4)
    """With block attention: the option that gives the block length, and its default."""
    translated: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Translates its ``config.json`` to transformers' names; LLaDA's layout keeps its own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values that options of its own must have where they are present."""
    text_vocab_size: int | None = None
    """Ids from here on are picture tokens: the size of the released tokenizer, unless a folder has
    a tokenizer of its own."""
    peft_task: PEFTTask = "CAUSAL_LM"
    """PEFT task type of the family's own class; Dream's lacks the methods of a causal model."""


_DREAM = Family(
    model_types=("Dream",),
    decoder="qwen2",
    mask_tokens=("<|mask|>",),
    eos_tokens=("<|endoftext|>", "<|im_end|>"),
    bos_token="<|beginoftext|>",
    facts={"shift": 1},
    peft_task="FEATURE_EXTRACTION",
)
_LLADA = Family(
    model_types=("llada",),
    decoder="llama",
    layout="llada",
    mask_tokens=("<|mdm_mask|>",),
    eos_tokens=("<|endoftext|>", "<|eot_id|>"),
    bos_token="<|startoftext|>",
)
_SDAR = Family(
    model_types=("sdar",),
    decoder="qwen3",
    mask_tokens=("<MASK>", "<|MASK|>"),
    eos_tokens=("<|endoftext|>", "<|im_end|>"),
    facts={"attention": "block"},
)
_LING_TOKENS: dict[str, Any] = {
    "mask_tokens": ("<|mask|>",),
    "eos_tokens": ("<|endoftext|>", "<|role_end|>"),
    "bos_token": "<|startoftext|>",
}
_LLADA_MOE = Family(
    model_types=("lladamoe", "llada"),
    decoder="qwen3_moe",
    translated=from_llada_moe,
    options=LLADA_MOE_OPTIONS,
    **_LING_TOKENS,
)
_LLADA2 = Family(
    model_types=("llada2_moe",),
    decoder="glm4_moe",
    layout="llada2",
    facts={"attention": "block"},
    block=("block_size", 32),
    translated=from_llada2,
    options=LLADA2_OPTIONS,
    **_LING_TOKENS,
)
_FAST_DLLM = replace(
    _SDAR,
    model_types=("Fast_dLLM_Qwen",),
    decoder="qwen2",
    mask_tokens=("|<MASK>|",),
    facts={"attention": "block", "shift": 1},
    block=("bd_size", 32),
)


def _as_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translates Ministral 3, a Llama up to its original length; behind it, it scales queries."""
    rope = {**config["rope_parameters"]}
    rope.pop("llama_4_scaling_beta", None)
    most = rope["original_max_position_embeddings"]
    return {**config, "rope_parameters": rope, "max_position_embeddings": most}


FAMILIES: dict[str, Family] = {
    "dream": _DREAM,
    "diffucoder": _DREAM,
    "llada": _LLADA,
    "mmada": replace(_LLADA, model_types=("mmada", "llada"), text_vocab_size=126349),
    "llada_v": replace(_LLADA, model_types=("llava_llada", "llada"), layout="hf"),
    "a2d": replace(_SDAR, model_types=("a2d-qwen3",), mask_tokens=("<|mask|>",), facts={}),
    "fast_dllm": _FAST_DLLM,
    "llada_moe": _LLADA_MOE,
    "nemotron_labs_diffusion": Family(
        model_types=("nemotron_labs_diffusion",),
        decoder="llama",
        layout="nemotron",
        bos_token="<s>",
        facts={"attention": "block", "block_origin": "response", "causal_context": True},
        block=("block_size", 32),
        translated=_as_llama,
    ),
    "llada2": _LLADA2,
    "llada2.1": replace(
        _LLADA2,
        model_types=("llada21_moe", *_LLADA2.model_types),
        facts={**_LLADA2.facts, "edits_tokens": True},
    ),
    "sdar": _SDAR,
    "trado": _SDAR,
    "sdar_moe": replace(_SDAR, model_types=("sdar_moe",), decoder="qwen3_moe"),
}

PLAIN_DECODERS: tuple[DecoderType, ...] = get_args(DecoderType)
"""Model types of autoregressive checkpoints and of our own exports."""

_TOLD_BY_FOLDER = ("diffucoder", "llada2.1", "mmada", "trado")


def family_of(config: Mapping[str, Any], *, source: str, wanted: str | None = None) -> str:
    """Returns the name of a checkpoint's family, a key of :data:`FAMILIES`.

    DiffuCoder shares its ``model_type`` with Dream, TraDo with SDAR, LLaDA2.1 with LLaDA2.0 and
    some MMaDA copies with LLaDA; the computation is the same, so the name that the user gave
    (``wanted``), else that of the folder or hub id ``source``, decides what the family is called.
    """
    model_type = config.get("model_type")
    names = [name for name, family in FAMILIES.items() if _may_be(config, family)]
    if not names or (wanted in FAMILIES and wanted not in names):
        known = {one for family in FAMILIES.values() for one in family.model_types}
        raise ValueError(
            f"{source}config.json: model_type {model_type!r} is not supported, expected one of "
            f"{sorted(known | set(PLAIN_DECODERS))}"
            + (f", or another family than {wanted!r}" if names else "")
        )
    if wanted in names:
        return wanted
    folder = Path(source.rstrip(": ")).name.lower()
    # Their files are those of another family; only the name says which one it is.
    in_folder = [name for name in names if name in _TOLD_BY_FOLDER and name in folder]
    return (in_folder or names)[0]


def _may_be(config: Mapping[str, Any], family: Family) -> bool:
    """Whether a configuration may be one of the family."""
    if config.get("model_type") not in family.model_types:
        return False
    if "llada" not in family.model_types:
        return True
    # The own classes of LLaDA-V and LLaDA-MoE say llada, too, but use transformers' names of
    # options.
    layout = "hf" if "hidden_size" in config and "d_model" not in config else "llada"
    has_experts = layout == "hf" and bool(config.get("num_experts"))
    return (family.layout, family.decoder in WORDS) == (layout, has_experts)


# -- names of weights ---------------------------------------------------------------------------

HEAD_KEY = "lm_head.weight"

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
# ``ff_out`` names two matrices: the head here, the down projection in a block.
_TOP_NAMES = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
_HF_BLOCK = re.compile(r"model\.layers\.(\d+)\.((?:\w+\.)?\w+)\.([^.]+|lora_.+)")
_DECODER_PARTS = ("embed_tokens.", "layers.", "norm.", "transformer.", "word_embeddings.")
_VISION_PARTS = ("model.vision_tower.", "model.mm_projector.", "model.image_newline")

LLADA_MODULES = {name: target.rpartition(".")[2] for name, target in _BLOCK_NAMES.items()}
"""Maps LLaDA's names of modules in a block to transformers', as ``ff_out`` to ``down_proj``."""


def key_layout(family: str) -> KeyLayout:
    """Returns the naming scheme of a family's files; transformers' for an unknown family."""
    return FAMILIES[family].layout if family in FAMILIES else "hf"


def whole_key(key: str) -> str | None:
    """Completes a file's key with ``model.``; ``None`` for keys that are not the decoder's."""
    full = key if key.startswith("model.") else f"model.{key}"
    if key.endswith("rotary_emb.inv_freq") or full.startswith(_VISION_PARTS):
        return None
    return full if key.startswith(_DECODER_PARTS) else key


def original_key(key: str, layout: KeyLayout) -> str:
    """Returns the family's name for ``{module}.{parameter}``, also of an adapter in a layer.

    Adapters of LLaDA2 keep transformers' names: as its q, k and v are one matrix, the adapter of
    that would have another rank.
    """
    if layout == "nemotron":
        return "diffusion_head.weight" if key == HEAD_KEY else key.replace("model", "encoder", 1)
    if layout != "llada":
        return llada2_key(key) if layout == "llada2" else key
    module, _, parameter = key.rpartition(".")
    for own, target in _TOP_NAMES.items():
        if module == target:
            return f"model.transformer.{own}.{parameter}"
    match = _HF_BLOCK.fullmatch(key)
    names = {target: own for own, target in _BLOCK_NAMES.items()}
    assert match is not None, key
    return f"model.transformer.blocks.{match[1]}.{names[match[2]]}.{match[3]}"
