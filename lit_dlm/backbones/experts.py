"""Mixtures of experts in place of a decoder's feed-forward: sizes, routing, and names in files.

SDAR-MoE and LLaDA-MoE (arXiv:2509.24389) are Qwen3-MoE decoders, LLaDA2 (arXiv:2512.15745) is a
GLM-4-MoE one under names of its own. transformers keeps the matrices of a layer's experts in one
tensor and uses torch's grouped matrix products; files store each matrix separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_dlm.system.options import of_declared_kinds, within

if TYPE_CHECKING:  # checks before a run need only the facts, not torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Feed-forwards of a layer, of which the router picks some for every token."""

    number: int
    """Routed experts."""
    per_token: int
    """Routed experts per token."""
    width: int
    """Inner width of each expert."""
    normalised: bool = True
    """Whether the weights of a token's experts sum to :attr:`scale`."""
    scale: float = 1.0
    """Factor on these weights (sigmoid routers)."""
    groups: int = 1
    """Groups of equal size; a token's experts come from its best groups (arXiv:2412.19437)."""
    groups_per_token: int = 1
    """Number of groups that a token's experts come from."""
    shared: int = 0
    """Experts that every token gets, as one feed-forward of their summed width."""
    first_dense: int = 0
    """Leading layers with an ordinary feed-forward."""

    def __post_init__(self) -> None:
        of_declared_kinds(self)
        within("[1, 1000]", of="experts.", number=self.number)
        # transformers' router takes experts that are masked out if a token's groups hold too few.
        per_group, rest = divmod(self.number, self.groups)
        most = per_group * self.groups_per_token
        if rest or not 1 <= self.per_token <= most or self.groups_per_token > self.groups:
            raise ValueError(
                f"experts: expected {self.number} in {self.groups} equal groups, of which "
                f"{self.groups_per_token} hold the {self.per_token} of a token"
            )


_QWEN3 = {
    "number": "num_experts",
    "per_token": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "normalised": "norm_topk_prob",
}
_GLM4 = {
    **_QWEN3,
    "number": "n_routed_experts",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "groups_per_token": "topk_group",
    "shared": "n_shared_experts",
    "first_dense": "first_k_dense_replace",
}
WORDS: dict[str, dict[str, str]] = {"qwen3_moe": _QWEN3, "glm4_moe": _GLM4}
"""transformers' names of the fields of :class:`Experts`, by decoder."""
FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "glm4_moe": {"use_qk_norm": True, "num_nextn_predict_layers": 0},
}
"""Values that options must have, since no field describes others."""


def config_fields(experts: Experts, decoder: str) -> dict[str, Any]:
    """Returns the experts as options of transformers' configuration."""
    named = {word: getattr(experts, name) for name, word in WORDS[decoder].items()}
    return {**named, **FIXED[decoder]}


# -- configurations of families ------------------------------------------------------------------


def from_llada_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translates LLaDA-MoE's ``config.json`` to Qwen3-MoE's names; LLaDA-MoE never normalises."""
    kinds = config.get("moe_layer_freq") or ()
    names = {
        "dense_intermediate_size": "intermediate_size",
        "expert_intermediate_size": "moe_intermediate_size",
    }
    return {
        **{names.get(option, option): value for option, value in config.items()},
        "norm_topk_prob": False,
        "mlp_only_layers": [layer for layer, is_sparse in enumerate(kinds) if not is_sparse],
    }


LLADA_MOE_OPTIONS = {
    "qk_layernorm": True,
    "partial_rotary_factor": 1,
    "moe_router_enable_expert_bias": False,
    **dict.fromkeys(("shared_expert_intermediate_size", "clip_qkv")),
}


def from_llada2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translates LLaDA2's ``config.json`` to GLM-4-MoE's names; LLaDA2 always normalises."""
    names = {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    }
    renamed = {names.get(option, option): value for option, value in config.items()}
    return {**renamed, "norm_topk_prob": True}


LLADA2_OPTIONS = {
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    **dict.fromkeys(("use_bias", "norm_head", "using_split_qkv_in_self_attention"), False),
}

# -- names in files ------------------------------------------------------------------------------

_BIAS = "e_score_correction_bias"

LLADA2_MODULES = {
    "model.embed_tokens": "model.word_embeddings",
    **dict.fromkeys((f"self_attn.{part}_proj" for part in "qkv"), "attention.query_key_value"),
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
}
"""Maps transformers' names of modules to LLaDA2's, where q, k and v are rows of one matrix."""


def llada2_key(key: str) -> str:
    """Returns LLaDA2's name of a weight from transformers' name."""
    module, _, parameter = key.rpartition(".")
    if parameter == _BIAS:
        return f"{module}.expert_bias"
    for ours, own in LLADA2_MODULES.items():
        if module.endswith(ours):
            return f"{module.removesuffix(ours)}{own}.{parameter}"
    return key


class Piece(NamedTuple):
    """The part of one of our tensors that is in a tensor of a file."""

    key: str
    where: tuple[int | slice, ...]
    """Index into our tensor; empty for all of it."""
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the piece of our tensor, which shares its memory."""
        return tensor.detach()[self.where] if self.where else tensor


def pieces(
    shapes: Mapping[str, tuple[int, ...]], own_key: Callable[[str], str]
) -> dict[str, list[Piece]]:
    """Returns the pieces of our tensors that tensors of a file stack; ``own_key`` names these."""
    result: dict[str, list[Piece]] = {}
    for key, shape in shapes.items():
        module, _, last = key.rpartition(".")
        if not module.endswith(".experts"):
            result.setdefault(own_key(key), []).append(Piece(key, (), shape))
            continue
        count, rows, columns = shape  # each expert's matrix is a tensor of the file
        # transformers stacks all experts' matrices, gate above up; files have a tensor for each.
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        rows //= len(names)
        for number, (place, name) in product(range(count), enumerate(names)):
            index = (number, slice(place * rows, (place + 1) * rows))
            own = own_key(f"{module}.{number}.{name}.weight")
            result.setdefault(own, []).append(Piece(key, index, (rows, columns)))
    return result


def expert_biases(model: nn.Module) -> dict[str, Tensor]:
    """Returns what sigmoid routers add to their scores, by key: float32 buffers that are stored."""
    return {key: value for key, value in model.named_buffers() if key.endswith(_BIAS)}
