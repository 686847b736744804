"""Prompts with finished responses: one example each, and batches of them.

A :class:`SupervisedBatch` is the input of every training method. Maskings draw states from it
(:mod:`lit_dlm.training.states`), and :func:`lit_dlm.training.layout.lay_out` makes rows of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.visibility import canvas_blocks, first_column
from lit_dlm.decoding.api import text_cells
from lit_dlm.system.options import refuse
from lit_dlm.tensors.batches import TensorBatch
from lit_dlm.tensors.order import non_ltr_positions
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.vision.base import PromptPictures, batch_prompts


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
    superseded: NDArray[np.int32] | None = None
    """``(K, 3)`` writes (step, position, token) of the decode that were later overwritten."""
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
        """Returns the number of tokens up to the first end of text after given ones, included.

        All tokens if there is none; 0 on copies.
        """
        if not self.is_real:
            return 0
        # Ends in the fill do not count: a model must not learn to end where an answer was cut off.
        is_end = np.isin(self.response_ids, spec.eos_ids)
        if self.given is not None and self.given.any():  # ends before a marker end only their part
            is_end[: np.flatnonzero(self.given)[-1] + 1] = False
        ends = np.flatnonzero(is_end)
        return int(ends[0]) + 1 if len(ends) else len(self.response_ids)


@dataclass(frozen=True, eq=False, kw_only=True)
class SupervisedBatch(TensorBatch):
    """Prompts with responses of one length ``G``, on a canvas of ``L = start + G`` columns.

    Made by :func:`collate`. What it says of a response depends on that response alone.
    """

    ids: Tensor  # (B, L) int64: left padding, prompt, response filled with end of text
    pad_mask: Tensor | None
    """``(B, L)`` bool, ``True`` on real tokens, the fill included; ``None`` without padding."""
    start: int  # First response column
    num_prompt: Tensor  # (B,) int64 tokens of each prompt, padding left out
    maskable: Tensor
    """``(B, G)`` bool: positions that may be a target."""
    steps: Tensor
    """``(B, G)`` int64 step that wrote each position, -1 where none did; without a decode, one
    position a step from the left."""
    seeds: Tensor
    """``(B,)`` int64 seed of each sample in this pass over the data."""
    blocks: Tensor | None = None
    """``(B, G)`` int64 block of each position, for a model with block attention."""
    given: Tensor | None = None
    """``(B, G)`` bool, shown in every state and never a target; ``None`` if nothing is given."""
    early: Tensor | None = None
    """``(B, G, W, 2)`` int64 step and token of the writes that were overwritten later, in order; -1
    for the mask as a token, and where there is none. ``None`` if no sample has any."""
    decode_entropy: Tensor | None = None  # (B, G) float32 nats; None where a sample has none
    non_ltr: Tensor | None = None
    """``(B, G)`` bool, decoded out of order; ``None`` where no sample has a list of its own."""
    pictures: list[tuple[str, ...]] = field(default_factory=list)
    """``B`` tuples of digests: the pictures that ids beyond the vocabulary stand for
    (:func:`~lit_dlm.vision.base.batch_prompts`)."""
    uids: list[str] = field(default_factory=list)  # B names
    first_picture: int = 2**62  # ids from here on represent pictures

    def take(self, rows: Tensor, length: int | None = None) -> SupervisedBatch:
        """Returns some rows, on the CPU, with their first ``length`` response positions.

        They are as if they alone had been collated: without padding that they do not need, and with
        pictures numbered by what is left.
        """
        G = length or self.steps.shape[1]
        spare = 0 if self.pad_mask is None else int(first_column(self.pad_mask[rows]).min())
        columns = slice(spare, self.start + G)
        found: dict[str, Any] = {"start": self.start - spare}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("ids", "pad_mask"):
                found[one.name] = None if value is None else value[rows, columns]
            elif isinstance(value, Tensor):
                found[one.name] = value[rows] if value.ndim == 1 else value[rows, :G]
            elif isinstance(value, list):
                found[one.name] = [value[row] for row in rows.tolist()]
        # As ``collate`` says it: None where no row has any.
        if found["pad_mask"] is not None and found["pad_mask"].all():
            found["pad_mask"] = None
        if self.given is not None and not found["given"].any():
            found["given"] = None
        _number_pictures(found["ids"], found["pictures"], self.first_picture)
        return replace(self, **found)


def collate(
    examples: Sequence[SupervisedExample],
    *,
    response_length: int,
    spec: BackboneSpec,
    seed: int,
    num_padding: int | None,
    cut: bool = False,
) -> SupervisedBatch:
    """Left-pads prompts and fills responses, on the CPU; rejected responses have the next row.

    Args:
        examples: with at most ``response_length`` tokens each.
        spec: says what ends an answer, and where blocks begin.
        seed: seed of all noise; a sample's own also depends on its uid and pass.
        num_padding: how many positions of fill behind an answer may be targets; ``None`` for all.
        cut: with a block model, leaves out the blocks behind those of the last targets. No
            prediction depends on them.
    """
    examples = [row for example in examples for row in example.rows()]
    longest = max(examples, key=lambda example: len(example.response_ids))
    if len(longest.response_ids) > response_length:
        most = f"at most response_length = {response_length} tokens"
        refuse(longest.uid, most, len(longest.response_ids))

    def every(name: str) -> list[Any]:
        return [getattr(example, name) for example in examples]

    # Blocks see no later ones, so those behind the last targets only cost time.
    G = response_length
    if cut:
        shape: dict[str, Any] = {"response_length": G, "spec": spec, "num_padding": num_padding}
        G = max(needed_positions(example, **shape) for example in examples)
    prompts, pictures = batch_prompts(every("prompt_ids"), every("pictures"))
    prompt, real = _left_padded(prompts, spec.pad_id)
    start, real = prompt.shape[1], F.pad(real, (0, G), value=True)
    response = _filled(every("response_ids"), G, spec.eos_ids[0])
    ids, pad_mask = torch.cat([prompt, response], dim=1), None if real.all() else real
    # Samples with and without a decode may share a batch; each missing list has its own meaning.
    from_the_left = np.tile(np.arange(G), (len(examples), 1))
    steps = _filled(every("steps"), G, -1, instead=from_the_left)
    by_steps = non_ltr_positions(steps).numpy()
    marked = [one if one is not None and one.any() else None for one in every("given")]
    given = _filled_if_any(marked, G, False, instead=from_the_left < 0)
    # Recorded of all or of none: nothing stands for an entropy.
    entropy = None
    if all(one is not None for one in every("decode_entropy")):
        entropy = _filled(every("decode_entropy"), G, np.float32(0))
    blocks = None
    if spec.attention == "block":
        blocks = canvas_blocks(spec, ids, pad_mask, start)[:, start:].expand_as(response)
    length = torch.tensor([example.answer_length(spec) for example in examples])
    return SupervisedBatch(
        ids=ids,
        pad_mask=pad_mask,
        start=start,
        num_prompt=torch.tensor(list(map(len, prompts))),
        maskable=_maskable(response, length, given, spec, num_padding),
        steps=steps,
        # Not of the number in the batch, so that noise does not depend on what a batch holds.
        seeds=torch.tensor([sample_seed(seed, f"{one.epoch}:{one.uid}") for one in examples]),
        blocks=blocks,
        given=given,
        early=_early_writes(every("superseded"), G, spec.mask_id),
        decode_entropy=entropy,
        non_ltr=_filled_if_any(every("non_ltr"), G, False, instead=by_steps),
        pictures=pictures,
        uids=every("uid"),
        first_picture=min((one.first_id for one in every("pictures") if one), default=2**62),
    )


def _left_padded(prompts: Sequence[NDArray[np.int32]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Returns ``(B, P)`` int64 prompts that end in the same column, and bool real tokens."""
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    tokens = pad([torch.tensor(one, dtype=torch.long) for one in prompts], padding_value=pad_id)
    return tokens, pad([torch.ones(len(one), dtype=torch.bool) for one in prompts])


def _maskable(
    response: Tensor,
    length: Tensor,
    given: Tensor | None,
    spec: BackboneSpec,
    num_padding: int | None,
) -> Tensor:
    """Returns ``(B, G)`` bool targets of answers with ``(B,)`` int64 lengths, 0 on copies."""
    positions, length = torch.arange(response.shape[1]), length[:, None]
    maskable = positions < (len(positions) if num_padding is None else length + num_padding)
    # A mask in a response was never written: nobody knows what belongs there.
    maskable = maskable & (length > 0) & (response != spec.mask_id)
    if given is not None:
        maskable &= ~given
        # Nor the fill of a part that ends before a given token: the model would learn to fill every
        # part to its marker. The position behind a text is its end of text, which is learnt.
        if num_padding is not None:
            text = text_cells(response, spec.eos_ids, given)
            is_last = given.flip(1).cumsum(1).flip(1) == 0
            maskable &= is_last | F.pad(text[:, :-1], (1, 0), value=True)
    return maskable


def _number_pictures(ids: Tensor, pictures: list[tuple[str, ...]], first: int) -> None:
    """Numbers picture ids through rows, in place, as ``batch_prompts`` does for whole batches."""
    # Rows of the same pictures share their ids, which stand for rows of one table of embeddings.
    starts: dict[tuple[str, ...], int] = {}
    count = 0
    for row, own in zip(ids, pictures, strict=True):
        if not own:
            continue
        is_picture = row >= first
        if own not in starts:
            starts[own], count = count, count + int(is_picture.sum())
        row += is_picture * (first + starts[own] - row[is_picture].min())


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


def _early_writes(rows: Sequence[NDArray[np.int32] | None], G: int, mask_id: int) -> Tensor | None:
    """Returns :attr:`SupervisedBatch.early` of records' overwritten writes, sorted by step."""
    none = np.empty((0, 3), dtype=np.int32)
    kept = [none if one is None else one[one[:, 1] < G] for one in rows]
    if not any(map(len, kept)):
        return None
    most = max(int(np.bincount(one[:, 1], minlength=1).max()) for one in kept)
    found = np.full((len(rows), G, most, 2), -1)
    for number, events in enumerate(kept):  # ragged lists, on the host
        events = events[np.argsort(events[:, 1], kind="stable")]
        step, position, token = events.T
        nth = np.arange(len(events)) - np.searchsorted(position, position)  # write of its position
        found[number, position, nth, 0] = step
        found[number, position, nth, 1] = np.where(token == mask_id, -1, token)
    return torch.from_numpy(found)


def _filled_if_any(rows: Sequence[NDArray[Any] | None], *args: Any, **rest: Any) -> Tensor | None:
    """Returns :func:`_filled` rows, ``None`` if all are missing."""
    return None if all(row is None for row in rows) else _filled(rows, *args, **rest)


def whole_blocks(num_positions: int, num_prompt: int, spec: BackboneSpec) -> int:
    """Rounds up a number of response positions, at least one, to the end of the last one's block.

    None of them sees a later block. ``num_prompt`` is without padding.
    """
    assert spec.block_size is not None
    offset = num_prompt if spec.block_origin == "sequence" else 0
    return -(-(offset + num_positions) // spec.block_size) * spec.block_size - offset


def needed_positions(
    example: SupervisedExample, *, response_length: int, spec: BackboneSpec, num_padding: int | None
) -> int:
    """Returns how many response positions take part in predicting an example's targets."""
    # The teacher of D2F, which such models are for, sees all.
    if spec.attention != "block" or num_padding is None or spec.whole_prompt:
        return response_length
    last = max(1, example.answer_length(spec) + num_padding)
    return min(response_length, whole_blocks(last, len(example.prompt_ids), spec))
