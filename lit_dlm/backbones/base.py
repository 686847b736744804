"""What the rest of the project knows about a denoiser: a specification and one forward.

Model families differ only inside this package. No code outside needs to know a model's family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from lit_dlm.system.options import of_declared_kinds, refuse

if TYPE_CHECKING:  # checks before a run need only the facts, not torch
    import torch
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

UNKNOWN_ID = -1
"""Id of a special token that the files do not name; no real token has this id."""

BlockOrigin = Literal["sequence", "response"]
"""Where blocks are counted from: the first real token of a row (the generators of SDAR and dLLM-RL;
the first generated block then begins with the tail of the prompt), or the first column of the
response."""


@dataclass(frozen=True, kw_only=True)
class BackboneSpec:
    """Facts about a masked diffusion language model that decoding and training need."""

    family: str
    """Family name, for files and checks only: ``dream``, ``llada``, ``sdar``, ``tiny``, ..."""
    mask_id: int
    """Id of the mask token; ``UNKNOWN_ID``, if the files name none, allows plain logits only."""
    pad_id: int
    """Id that fills left padding; its positions are hidden from attention."""
    eos_ids: tuple[int, ...]
    """Ids that end an answer (end of text, end of turn). The first one fills what follows."""
    bos_id: int | None = None
    """Id that starts a text, where the family has one."""
    shift: Literal[0, 1] = 0
    """1 when the raw output at position ``i - 1`` predicts token ``i`` (Dream), else 0."""
    attention: Literal["full", "block"] = "full"
    """Attention layout the model was trained with."""
    block_size: int | None = None
    """Block length of a block-attention model."""
    block_origin: BlockOrigin = "sequence"
    """The released samplers count from the sequence, but dLLM-RL's training on traces counts from
    the response (arXiv:2509.06949): one model, two partitions."""
    whole_prompt: bool = False
    """Whether the prompt is one block, all of which sees itself (D2F, arXiv:2508.09192); for blocks
    that count from the response, which else has the prompt in blocks before it."""
    causal_context: bool = False
    """Whether tokens of finished blocks see only what is left of them, and blocks with masks all of
    themselves (Nemotron-Labs-Diffusion)."""
    logit_scale: float = 1.0
    """Factor on the logits (LLaDA's ``scale_logits``)."""
    forbidden_ids: tuple[int, ...] = ()
    """Ids that are never proposed; the mask id is always among them."""
    text_vocab_size: int | None = None
    """Ids from here on are picture tokens; ``None`` if the model has none."""
    positions: Literal["cumsum", "arange"] = "cumsum"
    """Position ids under left padding: counted from the first real token, or column numbers."""
    edits_tokens: bool = False
    """Whether the model was also trained to correct written tokens (LLaDA2.1, arXiv:2602.08676)."""

    def __post_init__(self) -> None:
        if self.mask_id not in (*self.forbidden_ids, UNKNOWN_ID):
            object.__setattr__(self, "forbidden_ids", (*self.forbidden_ids, self.mask_id))
        of_declared_kinds(self)
        if not self.eos_ids or (self.attention == "block" and not self.block_size):
            wanted = "eos_ids, and a block_size with block attention"
            refuse("BackboneSpec", wanted, f"{self.eos_ids} and {self.block_size}")
        if self.whole_prompt and (self.attention, self.block_origin) != ("block", "response"):
            wanted = "block attention with block_origin 'response'"
            refuse("whole_prompt", wanted, f"{self.attention}, {self.block_origin!r}")
        if self.causal_context and (self.attention, self.whole_prompt) != ("block", False):
            wanted = "block attention without whole_prompt"
            refuse("causal_context", wanted, f"{self.attention}, {self.whole_prompt}")


@dataclass(frozen=True)
class Denoised:
    """Result of one forward, already aligned: entry ``i`` predicts token ``i``."""

    logits: Tensor
    """``(B, K, V)`` floating point; forbidden ids are ``-inf``."""
    columns: Tensor
    """``(B, K)`` int64: the canvas column that each row of ``logits`` predicts."""
    hidden: Tensor | None = None
    """``(B, L, H, D)``: the requested hidden snapshots of every canvas column, aligned."""


@runtime_checkable
class Backbone(Protocol):
    """A denoiser: it maps a canvas with masks to aligned logits (and hidden snapshots)."""

    spec: BackboneSpec
    hidden_size: int
    num_layers: int
    vocab_size: int

    max_positions: int | None = None
    """Most tokens of a canvas; ``None`` if there is no limit."""

    @property
    def device(self) -> torch.device:
        """Where it takes its canvases."""
        ...

    @property
    def is_half(self) -> bool:
        """Whether its weights are of 16 bits: then autocast would only add casts."""
        return False

    @property
    def graph_safe(self) -> bool:
        """Whether a CUDA graph may record a forward: no read on the host, weights that stay."""
        return False

    def denoise(
        self,
        ids: Tensor,
        *,
        pad_mask: Tensor | None = None,
        columns: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
        response_start: int | None = None,
        position_ids: Tensor | None = None,
    ) -> Denoised:
        """Runs one forward; returns aligned logits and, if requested, aligned hidden snapshots.

        Args:
            ids: ``(B, L)`` int64 canvas.
            pad_mask: ``(B, L)`` bool, ``True`` on real tokens; ``None`` when there is no padding.
                Or ``(B, 1, L, L)`` bool, which position sees which.
            columns: ``(B, K)`` int64 canvas columns to predict, which may differ between rows;
                ``None`` means all. Only these rows pass through the head.
            hidden_layers: indices into the tuple of ``num_layers + 1`` hidden states (embedding
                first; the last one after the final norm); negative ones count from the end.
            response_start: canvas column of the first response cell, for block models whose blocks
                count from there (``spec.block_origin``).
            position_ids: ``(B, L)`` int64, with a ``pad_mask`` of four dimensions.
        """
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """``R`` rows of ``S`` slots: the input of a training forward, and what is scored of it."""

    ids: Tensor
    """``(R, S)`` int64 as the model sees them, masks included."""
    targets: Tensor
    """``(R, S)`` int64 clean tokens; read where ``scored`` only."""
    scored: Tensor
    """``(R, S)`` bool, ``N`` slots in all: scores come row by row."""
    mask: Tensor | BlockMask | None = None
    """``(R, S)`` bool, ``True`` on real tokens, or ``None``: the attention is that of
    :meth:`Backbone.denoise`. A boolean ``(R or 1, 1, S, S)`` mask or a block mask replaces it."""
    position_ids: Tensor | None = None
    """``(R, S)`` int64; ``None`` lets the backbone count."""
    predictors: Tensor | None = None
    """``(R or 1, S)`` int64 slot whose row predicts each slot; ``None`` for the one ``spec.shift``
    slots before it."""
    response_start: int | None = None
    """First response slot, if the rows are plain canvases; see :meth:`Backbone.denoise`."""
    pictures: Sequence[str] = ()
    """Digests of the pictures that ids beyond the vocabulary represent, in order
    (:meth:`Vision.embed <lit_dlm.vision.base.Vision.embed>`)."""


class Span(NamedTuple):
    """The window of one row: columns ``[begin, end)`` are computed and see ``[0, kv_end)``."""

    begin: int
    end: int
    kv_end: int


def backbone_facts(spec: BackboneSpec, sizes: Any) -> dict[str, Any]:
    """Returns what decides whether a policy fits a backbone: family, sizes, mask id and shift.

    ``sizes`` is the backbone, or its :class:`~lit_dlm.backbones.architecture.Architecture`.
    """
    return {
        "family": spec.family,
        "hidden_size": sizes.hidden_size,
        "num_layers": sizes.num_layers,
        "vocab_size": sizes.vocab_size,
        "mask_id": spec.mask_id,
        "shift": spec.shift,
    }


def check_facts(what: str, trained_for: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if ``what`` was trained for a backbone that differs in a known fact."""
    for key, expected in trained_for.items():
        if key in facts and facts[key] != expected:
            raise ValueError(
                f"{what}: it was trained for a backbone with {key}={expected!r}, got "
                f"{key}={facts[key]!r}"
            )
