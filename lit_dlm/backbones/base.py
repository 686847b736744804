"""What the rest of the project knows about a denoiser: a specification and one forward.

Model families differ only inside this package. Nothing outside asks which family it talks to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from lit_dlm.ops.options import one_of

if TYPE_CHECKING:  # checks before a run need the facts alone
    from torch import Tensor

UNKNOWN_ID = -1
"""Stands for a special token that the files do not name; no token has this id."""


BlockOrigin = Literal["sequence", "response"]
"""Where blocks are counted from: the first real token of a row (the generators of SDAR and dLLM-RL;
the tail of a prompt then shares the first block that is generated), or the first column of the
response."""


@dataclass(frozen=True, kw_only=True)
class BackboneSpec:
    """Facts about a masked diffusion language model that decoding and training need."""

    family: str
    """Family name, for provenance only: ``dream``, ``llada``, ``sdar``, ``tiny``, ..."""
    mask_id: int
    """Id of the mask token; ``UNKNOWN_ID`` where the files name none: only plain logits then."""
    pad_id: int
    """Id that fills left padding; its positions are hidden from attention."""
    eos_ids: tuple[int, ...]
    """Ids that end an answer (end of text, end of turn). The first one fills an ended answer."""
    bos_id: int | None = None
    """Id that starts a text, where the family has one."""
    shift: Literal[0, 1] = 0
    """1 when the raw output at position ``i - 1`` predicts token ``i`` (Dream), else 0."""
    attention: Literal["full", "block"] = "full"
    """Attention layout the model was trained with."""
    block_size: int | None = None
    """Block length of a block-attention model."""
    block_origin: BlockOrigin = "sequence"
    """Released samplers count from the sequence, the reference's training on traces from the
    response (arXiv:2509.06949). One model, two partitions."""
    logit_scale: float = 1.0
    """Factor on the logits (LLaDA's ``scale_logits``)."""
    forbidden_ids: tuple[int, ...] = ()
    """Ids that are never proposed; the mask id is always among them."""
    text_vocab_size: int | None = None
    """Ids from here on are tokens of pictures; ``None`` where there are none."""
    positions: Literal["cumsum", "arange"] = "cumsum"
    """Position ids under left padding: counted from the first real token, or column numbers."""
    edits_tokens: bool = False
    """Whether it was trained to correct tokens that stand, too (LLaDA2.1, arXiv:2602.08676)."""

    def __post_init__(self) -> None:
        if self.mask_id not in (*self.forbidden_ids, UNKNOWN_ID):
            object.__setattr__(self, "forbidden_ids", (*self.forbidden_ids, self.mask_id))
        # Overrides come as plain values, which no parser has checked.
        of = "BackboneSpec."
        one_of(0, 1, of=of, shift=self.shift)
        one_of("full", "block", of=of, attention=self.attention)
        one_of("sequence", "response", of=of, block_origin=self.block_origin)
        one_of("cumsum", "arange", of=of, positions=self.positions)
        if not self.eos_ids or (self.attention == "block" and not self.block_size):
            raise ValueError(
                "BackboneSpec: expected eos_ids, and a block_size with block attention, got "
                f"{self.eos_ids} and {self.block_size}"
            )


@dataclass(frozen=True)
class Denoised:
    """Result of one forward, already aligned: entry ``i`` predicts token ``i``."""

    logits: Tensor
    """``(B, K, V)`` floating point; forbidden ids are ``-inf``."""
    columns: Tensor
    """``(B, K)`` int64: the canvas column that each row of ``logits`` predicts."""
    hidden: Tensor | None = None
    """``(B, L, H, D)``: the asked hidden snapshots of every canvas column, aligned."""


@runtime_checkable
class Backbone(Protocol):
    """A denoiser: it maps a canvas with masks to aligned logits (and hidden snapshots)."""

    spec: BackboneSpec
    hidden_size: int
    num_layers: int
    vocab_size: int

    def denoise(
        self,
        ids: Tensor,
        *,
        pad_mask: Tensor | None = None,
        columns: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
        response_start: int | None = None,
    ) -> Denoised:
        """Run one forward: aligned logits and, when asked, aligned hidden snapshots.

        Args:
            ids: ``(B, L)`` int64 canvas.
            pad_mask: ``(B, L)`` bool, ``True`` on real tokens; ``None`` when there is no padding.
            columns: ``(B, K)`` int64 canvas columns to predict, which may differ between rows;
                ``None`` means all. Only these rows pass through the head.
            hidden_layers: indices into the tuple of ``num_layers + 1`` hidden states (embedding
                first; the last one after the final norm); negative ones count from the end.
            response_start: canvas column of the first response cell, for block models whose blocks
                count from there (``spec.block_origin``).
        """
        ...


class Span(NamedTuple):
    """The window of one row: columns ``[begin, end)`` run and see the columns ``[0, kv_end)``."""

    begin: int
    end: int
    kv_end: int


def backbone_facts(spec: BackboneSpec, sizes: Any) -> dict[str, Any]:
    """Facts that tell whether a policy fits a backbone: family, sizes and special tokens.

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
    """Refuses ``what`` where it was trained for another backbone than the one at hand.

    Facts that either side does not know are ignored.
    """
    for key, expected in trained_for.items():
        if key in facts and facts[key] != expected:
            raise ValueError(
                f"{what}: it was trained for a backbone with {key}={expected!r}, got "
                f"{key}={facts[key]!r}"
            )
