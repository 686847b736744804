"""Masked diffusion denoiser on transformers' Qwen2, Llama and Qwen3 decoders, made bidirectional.

The decoders run unchanged: only the causal flag is off and the masks are ours. This file holds the
forward and the ways to it from Python; construction, adapters and files are in
:mod:`~lit_dlm.backbones.decoder`, checkpoints are translated in
:mod:`~lit_dlm.backbones.resolution`, and caches build on :meth:`HFBackbone.encode_window`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from lit_dlm.backbones.attention import added_mask, sequences_from
from lit_dlm.backbones.base import UNKNOWN_ID, Backbone, Denoised
from lit_dlm.backbones.decoder import AttentionRoute, DType, StoredDecoder, torch_dtype
from lit_dlm.backbones.visibility import (
    attention_visibility,
    key_visibility,
    position_ids_for,
)
from lit_dlm.backbones.vision import VisionSettings
from lit_dlm.backbones.window_cache import WindowCache
from lit_dlm.ops.alignment import aligned, first_real_columns, gather_rows, raw_columns
from lit_dlm.ops.fused_head import TokenStats, token_stats
from lit_dlm.ops.masking import with_own_key
from lit_dlm.ops.precision import is_autocast

_WIDE = 64
"""Queries of a window from which on a CPU runs query heads that share keys apart."""

__all__ = ["AttentionRoute", "DType", "HFBackbone"]


class RowContext(TypedDict, total=False):
    """What a forward over training rows may be told beside their ids."""

    mask: Tensor | BlockMask | None
    """``(B, L)`` bool, ``True`` on real tokens, or ``None``: then the attention is that of
    :meth:`HFBackbone.denoise`. A boolean ``(B, 1, L, L)`` one replaces it, as in
    :meth:`HFBackbone.forward`; so does one by blocks."""
    position_ids: Tensor | None
    """``(B, L)`` int64; by default as in :meth:`HFBackbone.denoise` or :meth:`HFBackbone.forward`.
    """
    response_start: int | None
    """See :meth:`HFBackbone.denoise`."""
    predictors: Tensor | None
    """``(B or 1, L)`` int64 columns whose rows predict each cell; by default ``spec.shift`` before
    it."""
    pictures: Sequence[str]
    """Digests of the pictures that ids behind the vocabulary stand for, in order
    (:meth:`Vision.embedded <lit_dlm.backbones.vision.Vision.embedded>`)."""


class ScoreOptions(RowContext, total=False):
    """And how the head scores their cells."""

    forbidden_ids: Sequence[int] | None
    """Ids without probability; by default ``spec.forbidden_ids``."""
    id_range: tuple[int, int | None]
    """First id that has some, and the first one behind them, as in sampling
    (:meth:`Sampler.id_range <lit_dlm.decoding.Sampler.id_range>`)."""
    temperature: float
    """The logits are divided by it; 1 by default."""


class HFBackbone(StoredDecoder, Backbone):
    """A bidirectional decoder with aligned outputs (the :class:`~lit_dlm.backbones.base.Backbone`).

    Constructor options are those of :class:`~lit_dlm.backbones.decoder.StoredDecoder`.
    """

    forward_methods: ClassVar = ("_encode",)
    """What runs the weights; under FSDP2 it gathers like ``forward``. Every public method goes
    through this one, so none can be forgotten; the head is read behind it."""

    def denoise(
        self,
        ids: Tensor,
        *,
        pad_mask: Tensor | None = None,
        columns: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
        response_start: int | None = None,
        pictures: Sequence[str] | None = None,
    ) -> Denoised:
        """Runs one forward, see :meth:`Backbone.denoise <lit_dlm.backbones.base.Backbone.denoise>`.

        ``pictures`` are the digests of a batch of training; decodes have theirs in place. A block
        model (``spec.attention`` is ``block``) gets its block-causal mask, any other one sees every
        real token. Without ``pad_mask`` a full-attention model needs no mask at all, so
        that the flash kernel stays available. Differentiable.
        """
        if self.spec.mask_id == UNKNOWN_ID:
            raise ValueError(
                f"spec.mask_id: the files of this {self.spec.family} model name no mask token; "
                "give its id as spec_overrides.mask_id"
            )
        layers = [self._hidden_index(index) for index in hidden_layers]
        starts = self._starts(pad_mask)
        visible = attention_visibility(
            self.spec, ids, pad_mask=pad_mask, response_start=response_start
        )
        position_ids = None if pad_mask is None else position_ids_for(pad_mask, self.spec.positions)
        kept = None
        if columns is not None:
            kept = raw_columns(columns, self.spec.shift, starts=starts)
        last, snapshots = self._encode(
            ids, visible, position_ids, layers=layers, kept=kept, pictures=pictures
        )
        if columns is None:
            batch, length = ids.shape
            columns = torch.arange(length, device=ids.device).expand(batch, -1)
            rows = aligned(last, self.spec.shift, starts=starts)
        else:
            rows = last
        logits = self.head(rows)
        hidden = None
        if layers:
            stacked = torch.stack([snapshots[index] for index in layers], dim=2)  # (B, L, H, D)
            hidden = aligned(stacked, self.spec.shift, starts=starts)
        return Denoised(logits=logits, columns=columns, hidden=hidden)

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Aligned logits of the whole canvas under the mask given, with no id forbidden.

        Unlike :meth:`denoise` this adds nothing to the mask: without one every token sees all, in
        block models too.

        Args:
            input_ids: ``(B, L)`` int64.
            mask: ``(B, L)`` bool or 0/1 integers, nonzero on real tokens; or ``(B, 1, L, L)`` bool,
                ``True`` where the query (third axis) may see the key (``B`` may be 1). A query
                without any key sees itself.
            position_ids: ``(B, L)`` int64; by default the spec's rule for a two-dimensional mask,
                else column numbers.

        Returns:
            ``(B, L, V)`` in the model's dtype; row ``i`` predicts token ``i``.
        """
        starts, visible = None, None
        if mask is not None and mask.ndim == 2:
            if mask.shape != input_ids.shape:
                raise ValueError(
                    f"mask: expected the shape of input_ids {tuple(input_ids.shape)}, "
                    f"got {tuple(mask.shape)}"
                )
            starts, visible = self._starts(mask), key_visibility(mask)
            if position_ids is None:
                position_ids = position_ids_for(mask, self.spec.positions)
        elif mask is not None:
            visible = _given_visibility(mask)
        last, _ = self._encode(input_ids, visible, position_ids)
        return self._head(aligned(last, self.spec.shift, starts=starts))

    def encode_window(
        self,
        ids: Tensor,
        *,
        cache: WindowCache,
        visible: Tensor | None,
        position_ids: Tensor,
        hidden_layers: Sequence[int] = (),
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs some columns of a canvas against cached keys and values.

        Args:
            ids: ``(B, W)`` int64 tokens of the columns; ``(1, T)`` where the cache's plan packs
                windows of different widths.
            cache: receives their keys and values and gives those to attend to; its plan is that of
                this forward.
            visible: ``(B, 1, 1 or W, K)`` bool for the ``K`` keys that the cache gives and ``W``
                queries (with a packing as many as its grid is wide), ``True`` where the query may
                see the key; ``None`` when it sees all, or what the plan's sequences say.
            position_ids: like ``ids``.
            hidden_layers: as in :meth:`denoise`.
            kept: ``(B, K)`` int64 columns of the window whose last rows are wanted; all by default.

        Returns:
            *Raw* rows, not aligned: ``(B, W, D)`` after the final norm, and ``(B, W, H, D)``
            snapshots, or ``None`` when none is asked for; ``(1, T, ...)`` with a packing, and ``K``
            last rows with ``kept``.
        """
        layers = [self._hidden_index(index) for index in hidden_layers]
        last, snapshots = self._encode(
            ids, visible, position_ids, layers=layers, cache=cache, kept=kept
        )
        hidden = torch.stack([snapshots[index] for index in layers], dim=2) if layers else None
        return last, hidden

    @property
    def sequences_from(self) -> int | None:
        """Keys from which on windows are best described by sequences; ``None``: never."""
        return sequences_from(
            self.attn_implementation,
            self.device,
            self._compute_dtype(),
            num_heads=self.architecture.kv_heads,
        )

    @property
    def _groups(self) -> int:
        """Query heads that share a key head."""
        return self.architecture.num_heads // self.architecture.kv_heads

    def _compute_dtype(self) -> torch.dtype:
        """Dtype of products: that of autocast where it is on."""
        device = self.device
        return torch.get_autocast_dtype(device.type) if is_autocast(device) else self.dtype

    def head(self, rows: Tensor) -> Tensor:
        """Logits of aligned hidden rows.

        Args:
            rows: ``(..., D)`` after the final norm.

        Returns:
            ``(..., V)``, scaled, ``-inf`` at forbidden ids.
        """
        # In place: one copy of the logits less, and the head's backward does not need them.
        return self._head(rows).index_fill_(-1, self._forbidden, float("-inf"))

    def score_tokens(
        self, ids: Tensor, targets: Tensor, rows: Tensor, **options: Unpack[ScoreOptions]
    ) -> TokenStats:
        """Cross-entropy, entropy and log-probability of chosen cells; no logits are kept.

        What training uses in place of :meth:`denoise`: the same prediction, but only the chosen
        rows meet the head, a chunk at a time (:mod:`lit_dlm.ops.fused_head`), in float32.

        Args:
            ids: ``(B, L)`` int64 canvas as the model sees it, masks included.
            targets: ``(B, L)`` int64 tokens to score; read at ``rows`` only.
            rows: ``(B, L)`` bool, cells to score.
            options: see :class:`ScoreOptions`.

        Returns:
            One entry per chosen cell, row by row: ``rows.sum()`` of them; a forbidden target has
            infinite cross-entropy. Differentiable. To go back to the canvas, write
            ``canvas[rows] = stats.ce``.
        """
        return self.score_with_rows(ids, targets, rows, **options)[0]

    def score_with_rows(
        self,
        ids: Tensor,
        targets: Tensor,
        rows: Tensor,
        *,
        forbidden_ids: Sequence[int] | None = None,
        id_range: tuple[int, int | None] = (0, None),
        temperature: float = 1.0,
        **context: Unpack[RowContext],
    ) -> tuple[TokenStats, Tensor]:
        """:meth:`score_tokens`, and the hidden rows that were scored.

        Arguments and errors are those of :meth:`score_tokens`.

        Returns:
            The scores, and ``(N, D)`` aligned hidden rows after the final norm, one per score.
        """
        if not ids.shape == targets.shape == rows.shape or rows.dtype != torch.bool:
            raise ValueError(
                "score_tokens: expected ids, targets and boolean rows of one shape (B, L), got "
                f"{tuple(ids.shape)}, {tuple(targets.shape)} and {rows.dtype} {tuple(rows.shape)}"
            )
        if not temperature > 0.0:
            raise ValueError(f"temperature: expected a positive number, got {temperature}")
        head = self.model.lm_head
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"lm_head: expected a plain linear layer, got {type(head).__name__}; adapters on "
                "the head are not supported"
            )
        # By number: the host waits once, before the forward is under way.
        cells = rows.nonzero(as_tuple=True)
        hidden = self._rows(ids, cells, **context)
        part = slice(*id_range)
        weight: Tensor = head.weight
        bias: Tensor | None = head.bias
        known = range(self.vocab_size)[part]
        if len(known) < self.vocab_size:
            weight, bias = weight[part], None if bias is None else bias[part]
        forbidden = self.spec.forbidden_ids if forbidden_ids is None else forbidden_ids
        stats = token_stats(
            hidden,
            weight,
            targets[cells] - known.start,
            bias=bias,
            logit_scale=self.spec.logit_scale / temperature,
            forbidden_ids=[number - known.start for number in forbidden if number in known],
        )
        return stats, hidden

    def encode_rows(self, ids: Tensor, rows: Tensor, **context: Unpack[RowContext]) -> Tensor:
        """Hidden rows of chosen cells, for heads other than the model's own.

        Arguments are those of :meth:`score_tokens`.

        Returns:
            ``(N, D)`` aligned hidden rows after the final norm, row by row. Differentiable.
        """
        return self._rows(ids, rows.nonzero(as_tuple=True), **context)

    def _rows(
        self,
        ids: Tensor,
        cells: tuple[Tensor, ...],
        *,
        mask: Tensor | BlockMask | None = None,
        position_ids: Tensor | None = None,
        response_start: int | None = None,
        predictors: Tensor | None = None,
        pictures: Sequence[str] = (),
    ) -> Tensor:
        """Aligned hidden rows ``(N, D)`` of chosen cells."""
        starts: Tensor | None = None
        visible: Tensor | BlockMask | None
        if isinstance(mask, BlockMask):
            visible = mask
            if self.attn_implementation == "eager":
                B, _, L, K = mask.shape
                visible = create_mask(mask.mask_mod, B, 1, L, K, device=self.device)
        elif mask is None or mask.ndim == 2:
            starts = self._starts(mask)
            visible = attention_visibility(
                self.spec, ids, pad_mask=mask, response_start=response_start
            )
            if position_ids is None and mask is not None:
                position_ids = position_ids_for(mask, self.spec.positions)
        else:
            visible = _given_visibility(mask)
        last, _ = self._encode(ids, visible, position_ids, pictures=pictures)
        if predictors is not None:
            return last[cells[0], predictors.expand(len(ids), -1)[cells]]
        return aligned(last, self.spec.shift, starts=starts)[cells]

    def _hidden_index(self, index: int) -> int:
        count = self.num_layers + 1
        if not -count <= index < count:
            raise ValueError(
                f"hidden_layers: expected indices from {-count} to {count - 1}, got {index}"
            )
        return index % count

    def _starts(self, pad_mask: Tensor | None) -> Tensor | None:
        if pad_mask is None or self.spec.shift == 0:
            return None
        return first_real_columns(pad_mask)

    def _encode(
        self,
        ids: Tensor,
        visible: Tensor | BlockMask | None,
        position_ids: Tensor | None,
        *,
        layers: Sequence[int] = (),
        cache: WindowCache | None = None,
        kept: Tensor | None = None,
        pictures: Sequence[str] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Raw last hidden rows after the final norm, and raw snapshots by index.

        The last rows are ``(B, L, D)``, or those of the kept columns ``(B, K)`` alone.
        """
        self.convert()
        decoder = self.model.model
        snapshots: dict[int, Tensor] = {}
        plan: dict[str, Any] = {}
        if cache is not None:
            sequences = cache.plan.sequences
            if sequences is not None:
                sequences = sequences.grouped(self._groups)
            plan = {"packing": cache.plan.packing, "sequences": sequences}
        # A snapshot of the last layer has all columns.
        if kept is not None and self.num_layers not in layers:
            plan["kept"] = kept

        def keep(index: int) -> Callable[[nn.Module, Any, Tensor], None]:
            def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
                snapshots[index] = output

            return hook

        inputs = {"input_ids": ids}
        hooked = set(layers) - {self.num_layers}
        if self.vision is not None:
            snapshots[0] = self.vision.embedded(ids, decoder.embed_tokens, pictures)
            inputs = {"inputs_embeds": snapshots[0]}
            hooked -= {0}
        # Hooks rather than transformers' own capture: only the asked layers stay in memory.
        handles = [
            (
                decoder.embed_tokens if index == 0 else decoder.layers[index - 1]
            ).register_forward_hook(keep(index))
            for index in hooked
        ]
        try:
            last = decoder(
                **inputs,
                attention_mask=self._mask(visible, is_window=cache is not None),
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=cache is not None,
                **plan,
            ).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        snapshots[self.num_layers] = last
        if kept is not None and "kept" not in plan:
            last = gather_rows(last, kept)
        return last, snapshots

    def _mask(
        self, visible: Tensor | BlockMask | None, *, is_window: bool
    ) -> Tensor | BlockMask | None:
        """The mask as the attention of the layers takes it."""
        if visible is None or isinstance(visible, BlockMask):
            return visible
        if self.attn_implementation == "eager":
            hidden = torch.finfo(self.dtype).min
            return added_mask(visible, groups=1, dtype=self.dtype, hidden=hidden)
        # Training keeps the order of transformers' sums.
        if is_window or (visible.shape[2] == 1 and not torch.is_grad_enabled()):
            # On a CPU wide windows are as fast without the copies of the mask.
            is_apart = self.device.type == "cpu" and visible.shape[2] >= _WIDE
            groups = 1 if is_apart else self._groups
            return added_mask(visible, groups=groups, dtype=self._compute_dtype())
        return visible

    def _head(self, rows: Tensor) -> Tensor:
        logits = self.model.lm_head(rows)
        return logits if self.spec.logit_scale == 1.0 else logits * self.spec.logit_scale


def _given_visibility(mask: Tensor) -> Tensor:
    """A caller's own attention mask, checked."""
    if mask.ndim != 4 or mask.dtype != torch.bool:
        raise ValueError(
            "mask: expected (B, L), or a boolean (B, 1, L, L), "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    return with_own_key(mask)


def load_backbone(
    path_or_id: str | Path,
    *,
    dtype: DType | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    attn_implementation: AttentionRoute = "auto",
    adapter: str | Path | None = None,
    vision: VisionSettings | None = None,
) -> HFBackbone:
    """Loads a frozen backbone for decoding.

    Calling it with ``(input_ids, mask=None, position_ids=None)`` gives logits ``(B, L, V)`` whose
    row ``i`` predicts token ``i``, see :meth:`HFBackbone.forward`.

    Args:
        path_or_id: an embedded name (``tiny``), a local folder, or a hub id ``owner/name``.
        dtype: of weights and activations.
        device: where the weights go; they are read straight to it.
        attn_implementation: see :mod:`~lit_dlm.backbones.attention`.
        adapter: folder or hub id of a low-rank adapter in PEFT layout.
        vision: lets prompts have pictures.

    Returns:
        The backbone in evaluation mode, without gradients.
    """
    with torch.device(device):
        backbone = HFBackbone(
            str(path_or_id),
            dtype=_name(dtype),
            attn_implementation=attn_implementation,
            adapter=None if adapter is None else str(adapter),
            vision=vision,
        )
    return backbone.to(device).eval()


def _name(dtype: DType | torch.dtype) -> DType:
    name: DType = str(torch_dtype(dtype)).removeprefix("torch.")  # type: ignore[assignment]
    return name
