"""Batches of prompts with finished responses, and their layout as training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.visibility import position_ids_for
from lit_dlm.losses.states import NoisyStates, Responses
from lit_dlm.losses.views import hidden_prompt
from lit_dlm.ops.alignment import first_real_columns
from lit_dlm.ops.batches import TensorBatch
from lit_dlm.ops.cuts import non_ltr_positions
from lit_dlm.ops.masking import (
    TwoCopyLayout,
    block_causal_visibility,
    block_numbers,
    wants_block_mask,
)
from lit_dlm.ops.noise import sample_seed
from lit_dlm.vision.prompts import PromptPictures, batch_pictures, batch_prompts


@dataclass(frozen=True, eq=False, kw_only=True)
class SupervisedExample:
    """One prompt with its response, tokenised. Host memory."""

    uid: str
    """Stable name of the sample."""
    prompt_ids: NDArray[np.int32]
    """``(P,)`` token ids, chat template included."""
    response_ids: NDArray[np.int32]
    """``(n,)`` token ids; shorter than the response region is fine, it gets filled."""
    pictures: PromptPictures | None = None
    """What ids of the prompt behind the vocabulary stand for."""
    steps: NDArray[np.int32] | None = None
    """``(n,)`` step that wrote each token, -1 where none did; ``None`` without a decode."""
    decode_entropy: NDArray[np.float32] | None = None
    """``(n,)`` predictive entropy in nats at the step that wrote each token, where recorded."""
    non_ltr: NDArray[np.bool_] | None = None
    """``(n,)`` bool, tokens decoded out of order by the data's own list; ``None`` takes what the
    steps say."""
    given: NDArray[np.bool_] | None = None
    """``(n,)`` bool, tokens that stood on the canvas before the first step: shown in every state
    and never a target; ``None`` for none."""
    epoch: int = 0
    """Pass over the data; random masks differ from pass to pass."""
    is_real: bool = True
    """``False`` on a copy that only fills a batch: nothing of it is supervised."""


@dataclass
class SupervisedBatch(TensorBatch):
    """Prompts with responses of one length ``G``, on a canvas of ``L = start + G`` columns."""

    ids: Tensor
    """``(B, L)`` int64: left padding, prompt, response filled with end of text."""
    pad_mask: Tensor | None
    """``(B, L)`` bool, ``True`` on real tokens, the fill included; ``None`` without padding."""
    start: int
    """First response column."""
    answer_length: Tensor
    """``(B,)`` int64 response cells up to the first end of text, which counts; all that were given
    where there is none; 0 on copies."""
    steps: Tensor | None
    """``(B, G)`` int64 steps, -1 where none wrote; ``None`` where no sample has a decode."""
    decode_entropy: Tensor | None
    """``(B, G)`` float32 nats; ``None`` where a sample has none."""
    has_steps: Tensor | None = None
    """``(B,)`` bool samples with a decode; ``None`` where all or none have one."""
    non_ltr: Tensor | None = None
    """``(B, G)`` bool, decoded out of order; ``None`` where no sample has a list of its own."""
    given: Tensor | None = None
    """``(B, G)`` bool, shown in every state and never a target; ``None`` where nothing is."""
    pictures: list[tuple[str, ...]] = field(default_factory=list)
    """``B`` tuples of digests: what ids behind the vocabulary stand for
    (:func:`~lit_dlm.vision.prompts.batch_prompts`)."""
    uids: list[str] = field(default_factory=list)
    """``B`` names."""
    epochs: list[int] = field(default_factory=list)
    """``B`` passes over the data."""

    def still_hidden(self, states: NoisyStates) -> Tensor:
        """``(R, G)`` bool: cells that states hide, without those that were given."""
        return states.hidden if self.given is None else states.hidden & ~self.given[states.sample]

    def seeds(self, seed: int) -> Tensor:
        """``(B,)`` int64: a seed for every sample and pass, on the device of the batch.

        Args:
            seed: base seed.
        """
        pairs = zip(self.uids, self.epochs, strict=True)
        seeds = [sample_seed(seed, f"{epoch}:{uid}") for uid, epoch in pairs]
        return torch.tensor(seeds, dtype=torch.long, device=self.ids.device)


def whole_blocks(num_cells: int, num_prompt: int, spec: BackboneSpec) -> int:
    """Response cells up to the end of the block in which the last of some lies.

    Blocks behind it are seen by none of them, so a forward that is asked for them needs no more.

    Args:
        num_cells: the cells, counted from the start of the response; at least one.
        num_prompt: tokens of the prompt, padding excluded.
        spec: of a model with block attention.
    """
    assert spec.block_size is not None
    offset = num_prompt if spec.block_origin == "sequence" else 0
    return -(-(offset + num_cells) // spec.block_size) * spec.block_size - offset


def needed_cells(
    example: SupervisedExample, *, response_length: int, spec: BackboneSpec, num_padding: int | None
) -> int:
    """Response cells that take part in the prediction of an example's targets.

    Args:
        example: the example.
        response_length: cells of the response region.
        spec: of the model; with full attention every cell takes part.
        num_padding: cells of fill behind the answer that may be targets; ``None`` for all.
    """
    if spec.attention != "block" or num_padding is None:
        return response_length
    last = max(1, _answer_length(example, spec) + num_padding)
    return min(response_length, whole_blocks(last, len(example.prompt_ids), spec))


def row_tokens(
    num_prompt: int, num_cells: int, spec: BackboneSpec, *, copies: int = 1
) -> tuple[int, int]:
    """Tokens of a training row by part, prompt and response, as :func:`lay_out` makes it.

    Args:
        num_prompt: tokens of the prompt.
        num_cells: cells of the response.
        spec: of the model.
        copies: noisy copies of the response in one row, for block models.
    """
    if spec.attention != "block":
        return num_prompt, num_cells
    assert spec.block_size is not None
    early = spec.block_size - 1 if spec.block_origin == "sequence" else 0
    return num_prompt, num_cells + copies * (num_cells + early)


def _answer_length(example: SupervisedExample, spec: BackboneSpec) -> int:
    """See :attr:`SupervisedBatch.answer_length`."""
    if not example.is_real:
        return 0
    # Not in the fill: an answer that was cut off before its end must not learn to end.
    ends = np.flatnonzero(np.isin(example.response_ids, spec.eos_ids))
    return int(ends[0]) + 1 if len(ends) else len(example.response_ids)


def collate_supervised(
    examples: Sequence[SupervisedExample],
    *,
    response_length: int,
    spec: BackboneSpec,
    num_padding: int | None = None,
) -> SupervisedBatch:
    """Left-pads prompts and fills responses.

    Args:
        examples: at least one.
        response_length: cells of every response; none may be longer.
        spec: gives padding, end of text and mask ids, and the attention.
        num_padding: cells of fill behind an answer that may be targets; ``None`` for all.

    Returns:
        The batch, on the CPU. Of a block model, blocks behind those of the last targets are cut
        off, which changes no prediction: ``G`` is then less than ``response_length``.
    """
    start = max(len(example.prompt_ids) for example in examples)
    B = len(examples)
    G = max(
        needed_cells(example, response_length=response_length, spec=spec, num_padding=num_padding)
        for example in examples
    )
    ids = np.full((B, start + G), spec.eos_ids[0], dtype=np.int64)
    real = np.ones((B, start + G), dtype=bool)
    prompts, pictures = batch_prompts(
        [example.prompt_ids for example in examples], [example.pictures for example in examples]
    )
    answer_length = np.zeros(B, dtype=np.int64)
    steps = np.full((B, G), -1, dtype=np.int64)
    entropy = np.zeros((B, G), dtype=np.float32)
    given_cells = np.zeros((B, G), dtype=bool)
    for row, example in enumerate(examples):  # ragged lists, on the host
        first, given = start - len(example.prompt_ids), len(example.response_ids)
        if given > response_length:
            raise ValueError(
                f"{example.uid}: expected at most response_length = {response_length} tokens, "
                f"got {given}"
            )
        size = min(given, G)
        ids[row, :first] = spec.pad_id
        real[row, :first] = False
        ids[row, first:start] = prompts[row]
        response = ids[row, start:]
        response[:size] = example.response_ids[:size]
        answer_length[row] = _answer_length(example, spec)
        if example.steps is not None:
            steps[row, :size] = example.steps[:size]
        if example.given is not None:
            given_cells[row, :size] = example.given[:size]
        if example.decode_entropy is not None:
            entropy[row, :size] = example.decode_entropy[:size]
    has_steps = np.array([example.steps is not None for example in examples])
    has_entropy = all(example.decode_entropy is not None for example in examples)
    return SupervisedBatch(
        ids=torch.from_numpy(ids),
        pad_mask=None if real.all() else torch.from_numpy(real),
        start=start,
        answer_length=torch.from_numpy(answer_length),
        steps=torch.from_numpy(steps) if has_steps.any() else None,
        decode_entropy=torch.from_numpy(entropy) if has_entropy else None,
        has_steps=None if has_steps.all() == has_steps.any() else torch.from_numpy(has_steps),
        non_ltr=_non_ltr(examples, torch.from_numpy(steps)),
        given=torch.from_numpy(given_cells) if given_cells.any() else None,
        pictures=pictures,
        uids=[example.uid for example in examples],
        epochs=[example.epoch for example in examples],
    )


def _non_ltr(examples: Sequence[SupervisedExample], steps: Tensor) -> Tensor | None:
    """``(B, G)`` bool: lists of the data, and what the steps say in rows without one."""
    if all(example.non_ltr is None for example in examples):
        return None
    found = non_ltr_positions(steps)
    for row, example in enumerate(examples):  # ragged lists, on the host
        if example.non_ltr is not None:
            listed = torch.from_numpy(example.non_ltr[: found.shape[1]])
            found[row] = False
            found[row, : len(listed)] = listed
    return found


def responses_of(
    batch: SupervisedBatch, spec: BackboneSpec, *, seed: int, num_padding: int | None
) -> Responses:
    """What a corruption sees of a batch.

    Args:
        batch: the batch.
        spec: attention layout, and the mask id: a cell that holds it is never a target.
        seed: base seed of the noise.
        num_padding: cells of fill behind the answer that may be targets, counted from its end, or
            from its last given token where it has none; ``None`` for all.

    Returns:
        The responses.
    """
    tokens = batch.ids[:, batch.start :]
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    length = batch.answer_length[:, None]
    maskable = columns < (length + num_padding if num_padding is not None else len(columns))
    maskable = maskable & (length > 0) & (tokens != spec.mask_id)
    if batch.given is not None:
        maskable &= ~batch.given
    blocks = None
    if spec.attention == "block":
        assert spec.block_size is not None
        origin = batch.start if spec.block_origin == "response" else None
        canvas = batch.ids.shape[1] if batch.pad_mask is None else batch.pad_mask
        blocks = block_numbers(canvas, spec.block_size, origin=origin, device=tokens.device)
        blocks = blocks[:, batch.start :].expand_as(tokens)
    has_prompt = None
    if batch.pad_mask is not None:
        has_prompt = batch.pad_mask[:, : batch.start].any(1)
    elif batch.start == 0:
        has_prompt = torch.zeros_like(batch.answer_length, dtype=torch.bool)
    return Responses(
        maskable=maskable,
        seeds=batch.seeds(seed),
        steps=batch.steps,
        blocks=blocks,
        has_steps=batch.has_steps,
        non_ltr=batch.non_ltr,
        has_prompt=has_prompt,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingRows:
    """Input of one forward; the arguments of a backbone's ``score_tokens``. ``N`` slots a row."""

    ids: Tensor
    """``(R, N)`` int64 as the model sees them."""
    targets: Tensor
    """``(R, N)`` int64 clean tokens."""
    rows: Tensor
    """``(R, N)`` bool slots to score, in the order of the states' supervised cells."""
    mask: Tensor | BlockMask | None
    """``(R, N)`` bool padding mask, or ``(R or 1, 1, N, N)`` bool attention mask, or one by blocks,
    or ``None``."""
    position_ids: Tensor | None
    """``(R, N)`` int64; ``None`` lets the backbone count."""
    response_start: int | None
    """First response slot, where the row is a plain canvas."""
    pictures: tuple[str, ...]
    """Digests of what ids behind the vocabulary stand for, in order."""
    predictors: Tensor | None = None
    """``(R or 1, N)`` int64 slots that predict each slot; ``None``: the model's shift says it."""

    def context(self) -> dict[str, Any]:
        """All but ids, targets and slots."""
        names = ("mask", "position_ids", "response_start", "predictors", "pictures")
        return {name: getattr(self, name) for name in names}


def lay_out(
    batch: SupervisedBatch,
    states: NoisyStates,
    spec: BackboneSpec,
    *,
    item: Tensor | None = None,
) -> TrainingRows:
    """Writes states as rows for one forward, by the attention that the model has.

    Full attention sees the canvas of each state. A block model gets the clean canvas and a noisy
    copy of the response in one row, so that all its blocks are learnt in one forward
    (:class:`~lit_dlm.ops.masking.TwoCopyLayout`). Causal states keep the clean canvas under a
    causal mask.

    Args:
        batch: the batch.
        states: states of its samples.
        spec: attention layout, block size and origin, mask id, shift.
        item: ``(R,)`` int64 ascending: of a block model, states of one number share a row, with a
            noisy copy for each. A row for each state by default.

    Returns:
        The rows, ``R`` of them, or as many as items.
    """
    clean = batch.ids[states.sample]  # (R, L)
    hidden = F.pad(batch.still_hidden(states), (batch.start, 0))
    supervised = F.pad(states.supervised, (batch.start, 0))
    pad_mask = None if batch.pad_mask is None else batch.pad_mask[states.sample]
    if states.prompt_rate and (states.causal or spec.attention != "full"):
        raise ValueError(
            "corruption: hidden prompt tokens need a model with full attention, "
            f"got {spec.attention} attention"
        )
    if not states.causal and spec.attention == "full":
        hidden = _with_hidden_prompt(hidden, states, pad_mask, batch.start)
        return TrainingRows(
            ids=clean.masked_fill(hidden, spec.mask_id),
            targets=clean,
            rows=supervised,
            mask=pad_mask,
            position_ids=None,
            response_start=batch.start,
            pictures=batch_pictures(batch.pictures),
        )
    R, L = clean.shape
    positions = torch.arange(L, device=clean.device).expand(R, -1)
    if pad_mask is not None:
        positions = position_ids_for(pad_mask, spec.positions)
    if states.causal:
        if spec.shift != 1:
            raise ValueError(
                "corruption: autoregressive training predicts the next token, which needs a model "
                f"with shift 1, got shift {spec.shift}"
            )
        return TrainingRows(
            ids=clean,
            targets=clean,
            rows=supervised,
            mask=block_causal_visibility(torch.arange(L, device=clean.device)[None], pad_mask),
            position_ids=positions,
            response_start=None,
            pictures=batch_pictures(batch.pictures),
        )
    assert spec.block_size is not None
    copies, used, number = 1, None, torch.zeros_like(states.sample)
    if item is not None:
        used = torch.bincount(item)  # (I,)
        copies, first = int(used.max()), used.cumsum(0) - used
        number = torch.arange(R, device=clean.device) - first[item]
        clean, positions = clean[first], positions[first]
        pad_mask = None if pad_mask is None else pad_mask[first]
    else:
        item = torch.arange(R, device=clean.device)
    # Noisy cells see the clean blocks before their own, so one row holds the states of all blocks.
    layout = TwoCopyLayout.trace(
        batch.start,
        L,
        spec.block_size,
        pad_mask=pad_mask,
        origin=spec.block_origin,
        device=clean.device,
    )
    if copies > 1:
        layout = layout.packed(copies)
    by_blocks = wants_block_mask(len(layout.source), clean.device)
    if by_blocks:  # few lengths, and no tile that ends in one
        layout = layout.in_whole_tiles()

    def spread(cells: Tensor) -> Tensor:  # (R, L) to (I, N)
        canvas = cells.new_zeros(len(clean), copies + 1, L)
        canvas[item, number] = cells
        return canvas[:, layout.copy, layout.source]  # the clean copy, -1, reads an empty plane

    targets = clean[:, layout.source]
    return TrainingRows(
        ids=targets.masked_fill(spread(hidden), spec.mask_id),
        targets=targets,
        rows=spread(supervised),
        mask=layout.block_mask(used) if by_blocks else layout.visibility(used),
        position_ids=layout.positions(positions),
        response_start=None,
        predictors=layout.predictors() if spec.shift else None,
        pictures=batch_pictures(batch.pictures),
    )


def _with_hidden_prompt(
    hidden: Tensor, states: NoisyStates, pad_mask: Tensor | None, start: int
) -> Tensor:
    """Adds the prompt tokens that a state hides to ``(R, L)`` hidden cells."""
    columns = torch.arange(start, device=hidden.device).expand(len(hidden), -1)
    if pad_mask is not None:
        columns = columns - first_real_columns(pad_mask)[:, None]
    prompt = hidden_prompt(states, columns)
    return hidden if prompt is None else torch.cat([prompt, hidden[:, start:]], dim=1)
