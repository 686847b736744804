"""States as the rows of one forward, under the attention of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.base import Rows
from lit_dlm.backbones.visibility import (
    block_causal_visibility,
    block_numbers,
    canvas_positions,
    first_column,
    hide_padding,
)
from lit_dlm.tensors.sampling import uniform_noise
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.states import States
from lit_dlm.vision.base import batch_pictures

_PROMPT = 21  # stream of noise, see ``training/masking.py``


def lay_out(batch: SupervisedBatch, states: States, spec: BackboneSpec) -> Rows:
    """Writes states as rows of one forward, according to the model's attention.

    With full attention a row is the canvas of a state. With block attention it is the clean canvas
    and a noisy copy of the response, so that all its blocks are learnt in one forward
    (:class:`Slots`); states of one ``sample`` share a row, with a noisy copy each. States in
    ``one_copy`` are their canvas with any attention. Causal states keep the clean canvas under a
    causal mask.
    """
    if states.prompt_rate and (states.causal or spec.attention == "block"):
        raise ValueError(
            "masking: hidden prompt tokens need a model with full attention, "
            f"got {spec.attention} attention"
        )
    if states.causal:
        return _causal(batch, states, spec)
    # Given tokens stood on the canvas before the first step, so no state can hide them. Done here
    # for all maskings: one of your own need not know of them.
    hidden = states.hidden
    if batch.given is not None:
        hidden = hidden & ~batch.given[states.response]
    if spec.attention == "block" and not states.one_copy:
        return _two_copies(batch, states, hidden, spec)
    clean, pad_mask = _canvas(batch, states.response)
    prompt = _hidden_prompt(clean[:, : batch.start], pad_mask, states)
    ids = clean.masked_fill(torch.cat([prompt, hidden], dim=1), spec.mask_id)
    if (shown := states.shown) is not None:
        ids[:, batch.start :] = torch.where(shown >= 0, shown, ids[:, batch.start :])
    return Rows(
        ids=ids,
        targets=clean,
        scored=F.pad(states.supervised, (batch.start, 0)),
        mask=pad_mask,
        response_start=batch.start,
        pictures=batch_pictures(batch.pictures),
    )


def _canvas(batch: SupervisedBatch, responses: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns clean canvases of some rows of a batch, and their padding masks."""
    pad_mask = None if batch.pad_mask is None else batch.pad_mask[responses]
    return batch.ids[responses], pad_mask


def _hidden_prompt(prompt: Tensor, pad_mask: Tensor | None, states: States) -> Tensor:
    """Returns which of ``(K, P)`` prompt tokens are hidden, bool."""
    if states.prompt_seeds is None:
        return torch.zeros_like(prompt, dtype=torch.bool)
    # Counted from each prompt's own start: noise must not depend on how far others are longer.
    place = torch.arange(prompt.shape[1], device=prompt.device).expand_as(prompt)
    if pad_mask is not None:
        place = place - first_column(pad_mask)[:, None]
    noise = uniform_noise(states.prompt_seeds, 0, place.clamp_min(0), stream=_PROMPT)
    return (noise < states.prompt_rate) & (place >= 0)


def _causal(batch: SupervisedBatch, states: States, spec: BackboneSpec) -> Rows:
    """Returns rows of next-token training."""
    if spec.shift != 1:
        raise ValueError(
            "masking: autoregressive training predicts the next token, which needs a model "
            f"with shift 1, got shift {spec.shift}"
        )
    clean, pad_mask = _canvas(batch, states.response)
    columns = torch.arange(clean.shape[1], device=clean.device)[None]
    return Rows(
        ids=clean,
        targets=clean,
        scored=F.pad(states.supervised, (batch.start, 0)),
        mask=block_causal_visibility(columns, pad_mask),  # blocks of one column
        position_ids=canvas_positions(spec, clean, pad_mask),
        pictures=batch_pictures(batch.pictures),
    )


def _two_copies(batch: SupervisedBatch, states: States, hidden: Tensor, spec: BackboneSpec) -> Rows:
    """Returns rows of a block model: the clean canvas, then noisy copies of the response.

    Noisy blocks see the clean ones before them, so one row teaches all blocks of a state.
    """
    assert spec.block_size is not None
    K, device = len(states.response), hidden.device
    # A row each, with one copy.
    row = first = torch.arange(K, device=device)
    used, number = None, torch.zeros_like(row)
    # The host waits for this number, so it asks only where states may share a row.
    if states.sample is not None and int(states.sample[-1]) + 1 < K:
        row, used = states.sample, torch.bincount(states.sample)  # (R,) copies of each row
        first = used.cumsum(0) - used  # the first state of each row
        number = torch.arange(K, device=device) - first[row]
    copies = 1 if used is None else int(used.max())
    clean, pad_mask = _canvas(batch, states.response[first])
    slots = Slots.trace(
        batch.start,
        clean.shape[1],
        spec.block_size,
        pad_mask=pad_mask,
        origin=spec.block_origin,
        device=device,
    )
    if spec.whole_prompt:
        slots = replace(slots, blocks=slots.blocks.clamp_min(-1))
    if spec.causal_context:  # each clean token is a block of its own, behind its noisy block
        tokens = slots.source * ~slots.is_noisy
        slots = replace(slots, blocks=slots.blocks * clean.shape[1] + tokens)
    if copies > 1:
        slots = slots.packed(copies)
    by_blocks = wants_block_mask(len(slots.source), device)
    if by_blocks:  # few different lengths, and only whole tiles
        slots = slots.in_whole_tiles()

    def spread(values: Tensor) -> Tensor:  # (K, G) of the states to (R, S) of the slots
        planes = values.new_zeros(len(clean), copies + 1, clean.shape[1])
        planes[row, number, batch.start :] = values
        # Slots of the clean copy have number -1 and read the last plane, which stays empty.
        return planes[:, slots.copy, slots.source]

    targets = clean[:, slots.source]
    ids = targets.masked_fill(spread(hidden), spec.mask_id)
    if states.shown is not None:  # only in noisy copies: blocks before them are final
        shown = spread(states.shown + 1) - 1
        ids = torch.where(shown >= 0, shown, ids)
    return Rows(
        ids=ids,
        targets=targets,
        scored=spread(states.supervised),
        mask=slots.block_mask(used) if by_blocks else slots.visibility(used),
        position_ids=slots.positions(canvas_positions(spec, clean, pad_mask)),
        predictors=slots.predictors() if spec.shift else None,
        pictures=batch_pictures(batch.pictures),
    )


def row_tokens(
    num_prompt: int, num_response: int, spec: BackboneSpec, *, copies: int = 1
) -> tuple[int, int]:
    """Returns how many prompt and response tokens a row of :func:`lay_out` has, copies included."""
    if spec.attention != "block":
        return num_prompt, num_response
    assert spec.block_size is not None
    early = spec.block_size - 1 if spec.block_origin == "sequence" else 0
    return num_prompt, num_response + copies * (num_response + early)


TILE = 128
"""Number of queries and of keys in a tile of FlexAttention."""
_FAR = 2**62
FLEX_LENGTH = 512
"""Fewest slots of a training row for which a GPU uses FlexAttention instead of a mask matrix. Tiles
save little in shorter rows, see ``benchmarks/block_attention.py --count``."""


def wants_block_mask(length: int, device: torch.device) -> bool:
    """Whether rows of clean and noisy copies use :meth:`Slots.block_mask`."""
    return device.type == "cuda" and length >= FLEX_LENGTH


@dataclass(frozen=True)
class Slots:
    """A training row with a clean copy of a canvas and a noisy copy of a part, under one mask.

    All blocks are trained in one forward: a noisy block sees itself and the *clean* blocks before
    it, which is exactly what it sees while it is decoded. Clean tokens are block causal among
    themselves and never see a noisy one. Build one with :meth:`trace`, gather tokens with
    ``ids[:, source]``, put masks into the noisy copy. Several noisy copies may share the clean one
    (:meth:`packed`): ``K`` states of one response take ``1 + K`` segments instead of ``2 K``.

    ``N`` is the length of the training row, ``S`` the batch size of its tensors (1 if rows agree).
    """

    source: Tensor  # (N,) int64 canvas column that each slot of the row holds
    copy: Tensor  # (N,) int64 number of the noisy copy from 0, -1 on the clean one
    blocks: Tensor  # (S, N) int64 block numbers; a noisy slot has that of its clean twin
    real: Tensor  # (S or B, N) bool, True on slots that take part

    @classmethod
    def trace(
        cls,
        response_start: int,
        length: int,
        block_size: int,
        *,
        pad_mask: Tensor | None = None,
        origin: Literal["sequence", "response"] = "response",
        device: torch.device | str | None = None,
    ) -> Slots:
        """``[prompt | clean response | noisy response]`` (TraceRL, arXiv:2509.06949).

        If blocks count from the response, the noisy copy is the response, as in the reference. If
        they count from the sequence, the tail of the prompt may share the first response block; the
        noisy copy then starts ``block_size - 1`` columns early, and of these only the cells of that
        shared block take part. They hold prompt tokens and are not targets. Without this copy, the
        tail would have to be read from the clean half, where it has seen the answer.
        """
        if pad_mask is None:
            pad_mask = torch.ones(1, length, dtype=torch.bool, device=device)
        begin, early = None, min(block_size - 1, response_start)
        if origin == "response":
            begin, early = response_start, 0
        blocks = block_numbers(pad_mask, block_size, origin=begin)
        columns = torch.arange(length, device=blocks.device)
        noisy = columns[response_start - early :]
        source = torch.cat([columns, noisy])
        layout = cls(
            source=source,
            copy=torch.cat([torch.full_like(columns, -1), torch.zeros_like(noisy)]),
            blocks=blocks[:, source],
            real=pad_mask.bool()[:, source],
        )
        if early == 0:
            return layout
        # The early columns of earlier blocks are not part of the noisy copy.
        first_block = blocks[:, response_start : response_start + 1]
        taken = ~layout.is_noisy | (layout.blocks >= first_block)
        return replace(layout, real=taken & layout.real)

    @property
    def is_noisy(self) -> Tensor:
        """``(N,)`` bool: slots of noisy copies."""
        return self.copy >= 0

    def packed(self, copies: int) -> Slots:
        """Returns the layout with several noisy copies, each of which sees what one alone would."""
        noisy, clean = self.is_noisy.nonzero()[:, 0], (~self.is_noisy).nonzero()[:, 0]
        slots = torch.cat([clean, noisy.repeat(copies)])
        number = torch.arange(copies, device=slots.device).repeat_interleave(len(noisy))
        return Slots(
            source=self.source[slots],
            copy=torch.cat([self.copy[clean], number]),
            blocks=self.blocks[:, slots],
            real=self.real[:, slots],
        )

    def in_whole_tiles(self) -> Slots:
        """Returns the layout with unused slots at its end, up to a multiple of :data:`TILE`."""
        extra = (0, -len(self.copy) % TILE)
        parts = (self.source, self.blocks, self.real)
        source, blocks, real = (F.pad(part, extra) for part in parts)
        return Slots(source, F.pad(self.copy, extra, value=-1), blocks, real)

    def _used(self, num_copies: Tensor | None) -> Tensor:
        """Returns the slots that take part if rows use only some of the copies."""
        if num_copies is None:
            return self.real
        return (self.copy < num_copies[:, None]) & self.real  # (B, N)

    def visibility(self, num_copies: Tensor | None = None) -> Tensor:
        """``(S or B, 1, N, N)`` bool, ``True`` where the query (third axis) may see the key.

        A slot that takes no part is seen by no other slot. Each row uses its first ``num_copies``
        ``(B,)`` copies, or all.
        """
        # A noisy query sees strictly earlier clean blocks: of its own, the clean copy holds the
        # answer. Clean queries never see noise, so they are the context of every copy alike.
        query, key = self.blocks[:, None, :, None], self.blocks[:, None, None, :]
        noisy_query, noisy_key = self.is_noisy[:, None], self.is_noisy[None, :]
        sees_clean = torch.where(noisy_query, query > key, query >= key)
        sees_noisy = (self.copy[:, None] == self.copy[None, :]) & (query == key)
        visible = torch.where(noisy_key, sees_noisy, sees_clean)
        return hide_padding(visible, self._used(num_copies))

    def block_mask(self, num_copies: Tensor | None = None) -> BlockMask:
        """Returns the same for FlexAttention (arXiv:2412.05496), without an ``(N, N)`` matrix.

        It differs only for slots that take no part, which always see themselves here.
        """
        copy, length, device = self.copy, len(self.copy), self.copy.device
        real = self._used(num_copies)
        blocks = self.blocks.expand(len(real), -1)
        # Copy and block in one number: noisy slots with equal numbers see each other. Compared in
        # the kernel for every pair, so one comparison instead of two counts.
        own = copy * 2**32 + blocks

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            del head
            at = row % len(real)
            later = blocks[at, query] > blocks[at, key]
            same = own[at, query] == own[at, key]
            return (later & (copy[key] < 0) | same) & real[at, key] | (query == key)

        # Which tiles to visit, without looking at pairs: the smallest and largest number in each
        # tile decide. A range may hold numbers that no slot has, so a visited tile may turn out to
        # be empty, but none that is visible is left out. Tiles where all pairs are visible skip
        # ``sees`` altogether. The last tile repeats its last slot, which changes neither bound.
        last = torch.arange(-(-length // TILE) * TILE, device=device).clamp_max(length - 1)
        clean, noisy = real & (copy < 0), real & (copy >= 0)

        def in_tiles(values: Tensor) -> Tensor:
            return values[:, last.view(-1, TILE)]  # (S or B, T, TILE)

        def least(values: Tensor, among: Tensor) -> Tensor:
            return in_tiles(torch.where(among, values, _FAR)).amin(-1)

        low, high = least(own, noisy), -least(-own, noisy)
        sees_noisy = (low[..., None] <= high[:, None]) & (low[:, None] <= high[..., None])
        sees_clean = -least(-blocks, real)[..., None] >= least(blocks, clean)[:, None]
        later = least(blocks, real)[..., None] > -least(-blocks, clean)[:, None]
        every = sees_clean & later & in_tiles(clean).all(-1)[:, None]
        some = (sees_clean | sees_noisy) & ~every
        # Queries without any key would divide by zero; here each sees itself.
        some |= torch.eye(some.shape[-1], dtype=torch.bool, device=device)

        def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
            order = tiles.int().argsort(dim=-1, descending=True, stable=True)
            return tiles.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]

        return BlockMask.from_kv_blocks(
            *listed(some), *listed(every), TILE, sees, seq_lengths=(length, length)
        )

    def predictors(self) -> Tensor:
        """``(S, N)`` int64: the slot that predicts each slot in a model with shift 1.

        It is the slot before; for the first cell of a noisy block, it is the clean token before the
        block, as in a decode, where earlier blocks are final.
        """
        # Of a noisy slot at the head of its block, the slot before belongs to another block, which
        # is noise, or to the end of another copy: neither is what decoding reads there.
        before = (torch.arange(len(self.copy), device=self.copy.device) - 1).clamp_min(0)
        same = (self.copy[before] == self.copy) & (self.blocks[:, before] == self.blocks)
        # Slots of the clean copy are numbered like columns.
        return torch.where(same | ~self.is_noisy, before, (self.source - 1).clamp_min(0))

    def positions(self, canvas_positions: Tensor) -> Tensor:
        """``(B, N)`` position ids from ``(B, length)``; a noisy slot has that of its clean twin."""
        return canvas_positions[:, self.source]
