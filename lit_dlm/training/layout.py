"""Batches of prompts with finished responses, and their layout as training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.utils.rnn import pad_sequence

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.attention import canvas_blocks, position_ids_for
from lit_dlm.decoding.api import text_cells
from lit_dlm.tensors.batches import TensorBatch, first_column
from lit_dlm.tensors.cuts import non_ltr_positions
from lit_dlm.tensors.masking import (
    TwoCopyLayout,
    block_causal_visibility,
    wants_block_mask,
)
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.training.masking import hidden_prompt
from lit_dlm.training.states import NoisyStates, Responses
from lit_dlm.vision.base import PromptPictures, batch_pictures, batch_prompts


@dataclass(frozen=True, eq=False, kw_only=True)
class SupervisedExample:
    """One prompt with its response, tokenised. Host memory."""

    uid: str  # stable name of the sample
    prompt_ids: NDArray[np.int32]  # ``(P,)`` token ids, chat template included
    response_ids: NDArray[np.int32]
    """``(n,)`` token ids; may be shorter than the response region, whose rest is filled."""
    pictures: PromptPictures | None = None
    """Pictures that ids of the prompt beyond the vocabulary stand for."""
    steps: NDArray[np.int32] | None = None
    """``(n,)`` step that wrote each token, -1 where none did; ``None`` without a decode."""
    decode_entropy: NDArray[np.float32] | None = None
    """``(n,)`` predictive entropy in nats at the step that wrote each token, where recorded."""
    non_ltr: NDArray[np.bool_] | None = None
    """``(n,)`` bool, tokens that the data's own list calls decoded out of order; ``None`` derives
    them from the steps."""
    given: NDArray[np.bool_] | None = None
    """``(n,)`` bool, tokens that were on the canvas before the first step: shown in every state and
    never a target; ``None`` for none."""
    epoch: int = 0  # pass over the data; random masks differ from pass to pass
    is_real: bool = True  # ``False`` on a copy that only fills a batch: nothing of it is supervised
    rejected: SupervisedExample | None = None
    """The worse response to the same prompt, in a preference pair."""

    def rows(self) -> list[SupervisedExample]:
        """Returns the example, followed by its rejected response if it has one."""
        if self.rejected is None:
            return [self]
        return [self, replace(self.rejected, epoch=self.epoch, is_real=self.is_real)]

    def answer_length(self, spec: BackboneSpec) -> int:
        """Returns the number of cells up to and including the first end of text after given tokens.

        All cells if there is none; 0 on copies.
        """
        if not self.is_real:
            return 0
        # Ends in the fill do not count: a model must not learn to end where an answer was cut off.
        is_end = np.isin(self.response_ids, spec.eos_ids)
        if self.given is not None and self.given.any():  # ends before a marker end only their part
            is_end[: np.flatnonzero(self.given)[-1] + 1] = False
        ends = np.flatnonzero(is_end)
        return int(ends[0]) + 1 if len(ends) else len(self.response_ids)


@dataclass
class SupervisedBatch(TensorBatch):
    """Prompts with responses of one length ``G``, on a canvas of ``L = start + G`` columns."""

    ids: Tensor  # (B, L) int64: left padding, prompt, response filled with end of text
    pad_mask: Tensor | None
    """``(B, L)`` bool, ``True`` on real tokens, the fill included; ``None`` without padding."""
    start: int  # First response column
    answer_length: Tensor  # (B,) int64, see :meth:`SupervisedExample.answer_length`
    steps: Tensor
    """``(B, G)`` int64 step that wrote each cell, -1 where none did; without a decode, one cell per
    step from the left."""
    decode_entropy: Tensor | None = None  # (B, G) float32 nats; None where a sample has none
    non_ltr: Tensor | None = None
    """``(B, G)`` bool, decoded out of order; ``None`` where no sample has a list of its own."""
    given: Tensor | None = None
    """``(B, G)`` bool, shown in every state and never a target; ``None`` if no cell is given."""
    pictures: list[tuple[str, ...]] = field(default_factory=list)
    """``B`` tuples of digests: the pictures that ids beyond the vocabulary stand for
    (:func:`~lit_dlm.vision.base.batch_prompts`)."""
    uids: list[str] = field(default_factory=list)  # B names
    epochs: list[int] = field(default_factory=list)  # B passes over the data

    def seeds(self, seed: int) -> Tensor:
        """``(B,)`` int64: a seed for every sample and pass, on the device of the batch."""
        pairs = zip(self.uids, self.epochs, strict=True)
        seeds = [sample_seed(seed, f"{epoch}:{uid}") for uid, epoch in pairs]
        return torch.tensor(seeds, dtype=torch.long, device=self.ids.device)


def whole_blocks(num_cells: int, num_prompt: int, spec: BackboneSpec) -> int:
    """Rounds up a number of response cells, at least one, to the end of the last one's block.

    None of them sees a later block. ``num_prompt`` is without padding.
    """
    assert spec.block_size is not None
    offset = num_prompt if spec.block_origin == "sequence" else 0
    return -(-(offset + num_cells) // spec.block_size) * spec.block_size - offset


def needed_cells(
    example: SupervisedExample, *, response_length: int, spec: BackboneSpec, num_padding: int | None
) -> int:
    """Returns how many response cells take part in predicting an example's targets."""
    if spec.attention != "block" or num_padding is None:
        return response_length
    last = max(1, example.answer_length(spec) + num_padding)
    return min(response_length, whole_blocks(last, len(example.prompt_ids), spec))


def row_tokens(
    num_prompt: int, num_cells: int, spec: BackboneSpec, *, copies: int = 1
) -> tuple[int, int]:
    """Returns how many prompt and response tokens a row of :func:`lay_out` has, copies included."""
    if spec.attention != "block":
        return num_prompt, num_cells
    assert spec.block_size is not None
    early = spec.block_size - 1 if spec.block_origin == "sequence" else 0
    return num_prompt, num_cells + copies * (num_cells + early)


def collate_supervised(
    examples: Sequence[SupervisedExample],
    *,
    response_length: int,
    spec: BackboneSpec,
    num_padding: int | None = None,
) -> SupervisedBatch:
    """Left-pads prompts and fills responses, on the CPU; rejected responses have the next row.

    With a block model, blocks after those of the last targets are cut off, which changes no
    prediction: ``num_padding`` cells of fill after an answer may be targets, all with ``None``.
    """
    examples = [row for example in examples for row in example.rows()]
    longest = max(examples, key=lambda example: len(example.response_ids))
    if len(longest.response_ids) > response_length:
        raise ValueError(
            f"{longest.uid}: expected at most response_length = {response_length} tokens, "
            f"got {len(longest.response_ids)}"
        )

    def every(name: str) -> list[Any]:
        return [getattr(example, name) for example in examples]

    G = max(
        needed_cells(example, response_length=response_length, spec=spec, num_padding=num_padding)
        for example in examples
    )
    prompts, pictures = batch_prompts(every("prompt_ids"), every("pictures"))
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = pad([torch.tensor(one, dtype=torch.long) for one in prompts], padding_value=spec.pad_id)
    real = pad([torch.ones(len(one), dtype=torch.bool) for one in prompts])
    response = _filled(every("response_ids"), G, spec.eos_ids[0])
    real = F.pad(real, (0, G), value=True)
    from_the_left = np.tile(np.arange(G), (len(examples), 1))
    batch = SupervisedBatch(
        ids=torch.cat([ids, response], dim=1),
        pad_mask=None if real.all() else real,
        start=ids.shape[1],
        answer_length=torch.tensor([example.answer_length(spec) for example in examples]),
        steps=_filled(every("steps"), G, -1, instead=from_the_left),
        pictures=pictures,
        uids=every("uid"),
        epochs=every("epoch"),
    )
    if all(entropy is not None for entropy in every("decode_entropy")):
        batch.decode_entropy = _filled(every("decode_entropy"), G, np.float32(0))
    if any(listed is not None for listed in every("non_ltr")):
        by_steps = non_ltr_positions(batch.steps).numpy()
        batch.non_ltr = _filled(every("non_ltr"), G, False, instead=by_steps)
    if any(given is not None and given.any() for given in every("given")):
        batch.given = _filled(every("given"), G, False, instead=from_the_left < 0)
    return batch


def _filled(
    rows: Sequence[NDArray[Any] | None],
    G: int,
    fill: float | np.float32,
    *,
    instead: NDArray[Any] | None = None,
) -> Tensor:
    """Returns ``(B, G)`` rows, cut or filled; a missing row is that of ``instead``."""
    found = np.full((len(rows), G), fill) if instead is None else instead.copy()
    for number, row in enumerate(rows):  # ragged lists, on the host
        if row is not None:
            found[number] = fill
            found[number, : len(row)] = row[:G]
    return torch.from_numpy(found)


def responses_of(
    batch: SupervisedBatch, spec: BackboneSpec, *, seed: int, num_padding: int | None
) -> Responses:
    """Returns what a masking sees of a batch; a cell that holds a mask is never a target.

    ``num_padding`` cells of fill after the ``answer_length`` may be targets, all with ``None``.
    """
    tokens = batch.ids[:, batch.start :]
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    length = batch.answer_length[:, None]
    maskable = columns < (length + num_padding if num_padding is not None else len(columns))
    maskable = maskable & (length > 0) & (tokens != spec.mask_id)
    if batch.given is not None:
        maskable &= ~batch.given
        if num_padding is not None:  # nor the fill of a part that ends before a given token
            text = text_cells(tokens, spec.eos_ids, batch.given)
            is_last = batch.given.flip(1).cumsum(1).flip(1) == 0
            maskable &= is_last | F.pad(text[:, :-1], (1, 0), value=True)
    real = batch.pad_mask
    if real is None:
        real = torch.ones_like(batch.ids, dtype=torch.bool)
    blocks = None
    if spec.attention == "block":
        blocks = canvas_blocks(spec, batch.ids, batch.pad_mask, batch.start)
        blocks = blocks[:, batch.start :].expand_as(tokens)
    return Responses(
        maskable=maskable,
        seeds=batch.seeds(seed),
        steps=batch.steps,
        blocks=blocks,
        non_ltr=batch.non_ltr,
        has_prompt=real[:, : batch.start].any(1),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingRows:
    """Input of one forward: arguments of a backbone's ``score_tokens``. ``N`` slots per row."""

    ids: Tensor  # (R, N) int64 as the model sees them
    targets: Tensor  # (R, N) int64 clean tokens
    rows: Tensor  # (R, N) bool slots to score, in the order of the states' supervised cells
    mask: Tensor | BlockMask | None
    """``(R, N)`` bool padding mask, or ``(R or 1, 1, N, N)`` bool attention mask, or a block
    mask, or ``None``."""
    pictures: tuple[str, ...]  # Digests of pictures for ids beyond the vocabulary, in order
    position_ids: Tensor | None = None  # (R, N) int64; None lets the backbone count
    response_start: int | None = None  # First response slot, if the row is a plain canvas
    predictors: Tensor | None = None
    """``(R or 1, N)`` int64 slots that predict each slot; ``None`` follows the model's shift."""

    def context(self) -> dict[str, Any]:
        """Returns all fields but ids, targets and rows, as arguments."""
        names = ("mask", "position_ids", "response_start", "predictors", "pictures")
        return {name: getattr(self, name) for name in names}


def lay_out(
    batch: SupervisedBatch, states: NoisyStates, spec: BackboneSpec, *, item: Tensor | None = None
) -> TrainingRows:
    """Writes states as rows of one forward, according to the model's attention.

    Full attention sees the canvas of each state. A block model gets the clean canvas and a noisy
    copy of the response in one row, so that all its blocks are learnt in one forward
    (:class:`~lit_dlm.tensors.masking.TwoCopyLayout`); states with the same number in ``item``,
    ``(R,)`` int64 ascending, share a row, with a noisy copy for each. Causal states keep the clean
    canvas under a causal mask.
    """
    clean = batch.ids[states.sample]  # (R, L)
    pad_mask = None if batch.pad_mask is None else batch.pad_mask[states.sample]
    hidden = states.hidden
    if batch.given is not None:
        hidden = hidden & ~batch.given[states.sample]
    hidden = F.pad(hidden, (batch.start, 0))
    canvas = TrainingRows(
        ids=clean,
        targets=clean,
        rows=F.pad(states.supervised, (batch.start, 0)),
        mask=pad_mask,
        pictures=batch_pictures(batch.pictures),
    )
    if not states.causal and spec.attention == "full":
        places = torch.arange(batch.start, device=hidden.device).expand(len(hidden), -1)
        if pad_mask is not None:
            places = places - first_column(pad_mask)[:, None]
        if (prompt := hidden_prompt(states, places)) is not None:
            hidden = torch.cat([prompt, hidden[:, batch.start :]], dim=1)
        shown = clean.masked_fill(hidden, spec.mask_id)
        return replace(canvas, ids=shown, response_start=batch.start)
    if states.prompt_rate:
        raise ValueError(
            "masking: hidden prompt tokens need a model with full attention, "
            f"got {spec.attention} attention"
        )
    columns = torch.arange(clean.shape[1], device=clean.device)
    positions = columns.expand_as(clean)
    if pad_mask is not None:
        positions = position_ids_for(pad_mask, spec.positions)
    canvas = replace(canvas, position_ids=positions)
    if not states.causal:
        return _two_copies(canvas, hidden, item, spec, batch.start)
    if spec.shift != 1:
        raise ValueError(
            "masking: autoregressive training predicts the next token, which needs a model "
            f"with shift 1, got shift {spec.shift}"
        )
    return replace(canvas, mask=block_causal_visibility(columns[None], pad_mask))


def _two_copies(
    canvas: TrainingRows, hidden: Tensor, item: Tensor | None, spec: BackboneSpec, start: int
) -> TrainingRows:
    """Rows of a block model: the clean canvas, then noisy copies of the response.

    Noisy cells see the clean blocks before their own, so one row holds the states of all blocks.
    ``canvas`` has a row for each state and a padding mask, ``hidden`` is ``(R, L)`` bool.
    """
    assert spec.block_size is not None
    clean, positions, pad_mask = canvas.ids, canvas.position_ids, canvas.mask
    assert positions is not None
    assert not isinstance(pad_mask, BlockMask)
    R, L = clean.shape
    rows = torch.arange(R, device=clean.device)
    copies, used, number = 1, None, torch.zeros_like(rows)
    if item is None:
        item = rows
    else:
        used = torch.bincount(item)  # (I,)
        copies, first = int(used.max()), used.cumsum(0) - used
        number = rows - first[item]
        clean, positions = clean[first], positions[first]
        pad_mask = None if pad_mask is None else pad_mask[first]
    layout = TwoCopyLayout.trace(
        start, L, spec.block_size, pad_mask=pad_mask, origin=spec.block_origin, device=clean.device
    )
    if copies > 1:
        layout = layout.packed(copies)
    by_blocks = wants_block_mask(len(layout.source), clean.device)
    if by_blocks:  # few different lengths, and only whole tiles
        layout = layout.in_whole_tiles()

    def spread(cells: Tensor) -> Tensor:  # (R, L) to (I, N)
        planes = cells.new_zeros(len(clean), copies + 1, L)
        planes[item, number] = cells
        return planes[:, layout.copy, layout.source]  # the clean copy, -1, reads an empty plane

    targets = clean[:, layout.source]
    return TrainingRows(
        ids=targets.masked_fill(spread(hidden), spec.mask_id),
        targets=targets,
        rows=spread(canvas.rows),
        mask=layout.block_mask(used) if by_blocks else layout.visibility(used),
        position_ids=layout.positions(positions),
        predictors=layout.predictors() if spec.shift else None,
        pictures=canvas.pictures,
    )
