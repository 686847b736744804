"""From encoded prompts to decoded texts: the one way that prompts are decoded.

Prompts wait for a free slot in the batch of one process or of several. A process takes the next
prompts when rows of its batch end, so that none is idle while prompts are waiting. Which process
decodes a prompt changes neither its noise nor its result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.batch import NotANumberError
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.loop import decode_queue
from lit_dlm.decoding.state import (
    Canvas,
    DecodeResult,
    DecodeState,
    Observer,
    QueueObserver,
    StepRecord,
    prompt_canvas,
)
from lit_dlm.tensors.batches import row_index
from lit_dlm.vision.pictures import picture_to_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_names = count()


class WorkQueue:
    """Hands out the numbers from 0 on, each once, to one process or to all processes of a run.

    A shared queue is a counter in the store of the process group, which answers while the processes
    compute. All processes must create their shared queues in the same order.
    """

    is_open: bool = False
    """Whether more may come: such a queue is asked before every step, see :func:`decode_stream`."""

    def __init__(self, size: int, *, shared: bool = False) -> None:
        self.size = size
        self.num_processes = dist.get_world_size() if shared and dist.is_initialized() else 1
        self._taken = 0
        self._reserved: list[int] = []
        self._store: dist.Store | None = None
        if self.num_processes > 1:
            # The one store that every process group has; torch gives it no public name.
            self._store = dist.distributed_c10d._get_default_store()
            self._name = f"lit_dlm/queue/{next(_names)}"

    def take(self, number: int) -> list[int]:
        """Returns the next numbers: as many as requested, fewer or none at the end."""
        if self._reserved:
            numbers, self._reserved = self._reserved, []
            return numbers
        if self._store is None:
            self._taken += number
            end = self._taken
        else:
            # The store adds for one process after the other, so every number is handed out once.
            end = self._store.add(self._name, number)
        return list(range(min(end - number, self.size), min(end, self.size)))

    def reserve(self, number: int) -> bool:
        """Takes what the next call of :meth:`take` will return; returns whether there is any."""
        self._reserved = self.take(number)
        return bool(self._reserved)

    def abandoned(self) -> Collection[int]:
        """Numbers of an open queue whose responses nobody waits for any longer."""
        return ()

    def slots(self, most: int) -> int:
        """Returns how many rows each process decodes together, so that every one gets some."""
        return max(min(most, -(-self.size // self.num_processes)), 1)


class Occupancy(QueueObserver):
    """Observer that counts how many slots of a batch are at work in every step."""

    requires: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.slot_steps = 0  # steps of the observed batches, times their slots
        self.row_steps = 0  # steps of the rows of these batches, added up
        self._num_slots = 0

    def on_start(self, state: DecodeState) -> None:
        self._num_slots = len(state.rows)

    def on_step(self, record: StepRecord) -> None:
        self.slot_steps += self._num_slots
        self.row_steps += len(record.state.rows)

    @property
    def share(self) -> float:
        """Share of the slots that were at work, in (0, 1]; 0 before the first step."""
        return self.row_steps / max(self.slot_steps, 1)


class SampledWrites(QueueObserver):
    """Observer that keeps how each response token was written.

    That are the log-probability with which it was drawn and the step. In greedy decodes, whose
    tokens are not drawn, it is the model's own. An open decode needs the number of its slots.
    """

    requires: frozenset[str] = frozenset({"drawn"})

    def __init__(self, num_slots: int | None = None) -> None:
        self._num_slots = num_slots
        self._table = torch.empty(0, dtype=torch.float32)  # (B, G, 2), by slot
        self._ended: list[Tensor] = []

    def on_start(self, state: DecodeState) -> None:
        shape = (self._num_slots or len(state.rows), state.ids.shape[1] - state.start, 2)
        self._table = torch.full(shape, torch.nan, dtype=torch.float32, device=state.ids.device)
        self._ended = []

    def on_step(self, record: StepRecord) -> None:
        state, region = record.state, slice(record.state.start, None)
        written = (record.new_ids != state.ids)[:, region, None]
        # After temperature and filters, even where raw scores decide the order of writing: it is
        # compared with the training forward, which has this temperature.
        assert record.proposal.drawn is not None
        log_prob = record.proposal.drawn[:, region].float().log()
        # What an end-of-text fill wrote was not drawn.
        log_prob = torch.where(record.commit[:, region], log_prob, torch.nan)
        new = torch.stack([log_prob, state.step[:, None].expand_as(log_prob)], -1)
        before: Tensor = self._table[state.rows]
        self._table.index_copy_(0, state.rows, torch.where(written, new, before))

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        self.on_end(result)
        self._table.index_fill_(0, state.rows, torch.nan)

    def on_end(self, result: DecodeResult) -> None:
        self._ended.append(self._table[row_index(result.rows, self._table.device)])

    def ended(self) -> Tensor:
        """Returns ``(n, G, 2)`` float32 of rows that ended since the last call.

        Log-probabilities, NaN: not drawn; and steps, NaN: not written.
        """
        ended, self._ended = self._ended, []
        return torch.cat(ended)


def text_cells(response: Tensor, eos_ids: Sequence[int], prefilled: Tensor) -> Tensor:
    """``(B, G)`` bool: the cells before the first end of text, and all prefilled cells.

    Where cells are prefilled, such as the markers of a template, an end of text ends only its part
    and not the response: the text continues at the next prefilled cell.

    Args:
        response: ``(B, G)`` int64.
        prefilled: ``(B, G)`` bool: cells whose tokens were set before the first step.
    """
    is_end = torch.isin(response, torch.tensor(list(eos_ids), device=response.device))
    ends = (is_end & ~prefilled).cumsum(1)
    before = torch.where(prefilled, ends, 0).cummax(1).values  # left of the last prefilled cell
    return (ends == before) | prefilled


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Returns a text up to the first of some strings that it contains."""
    return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=None)]


class Detokenizer:
    """Turns responses into the texts that graders receive."""

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        cut_at_eos: bool = True,
    ) -> None:
        """Without a tokenizer there are ids and no texts."""
        self._spec = backbone.spec
        self._vision = getattr(backbone, "vision", None)
        self._tokenizer = tokenizer
        self._cut_at_eos = cut_at_eos

    def __call__(self, response: Tensor, prefilled: Tensor) -> Responses:
        """Reads ``(B, G)`` int64 responses; ``prefilled`` cells were set before the first step."""
        response = response.cpu()
        is_text = text_cells(response, self._spec.eos_ids, prefilled.cpu())
        is_written = response != self._spec.mask_id
        kept = is_written & is_text if self._cut_at_eos else is_written
        ids = [row[cells].tolist() for row, cells in zip(response, kept, strict=True)]
        texts = []
        if self._tokenizer is not None:
            texts = [str(self._tokenizer.decode(row, skip_special_tokens=True)) for row in ids]
            if self._vision is not None:
                for row, image in self._vision.drawn(response).items():
                    texts[row] = picture_to_text(image)
        return Responses(ids, texts, (is_written & is_text).sum(1).tolist())


@dataclass(frozen=True)
class Responses:
    """Texts and tokens of responses, one entry each."""

    # Tokens of the text: without masks and, unless cut_at_eos is off, without the first end of
    # text and what follows it (with a layout, in every part)
    ids: list[list[int]]
    texts: list[str]  # the text; a response of picture tokens becomes the picture
    num_tokens: list[int]  # tokens, not masks, before the first end of text


class DecodePrompt(NamedTuple):
    """A prompt as the model receives it."""

    uid: str
    ids: Sequence[int]
    seed: int  # usually :func:`~lit_dlm.tensors.sampling.sample_seed` of the uid


@dataclass(frozen=True)
class DecodedRows:
    """Responses that have ended."""

    numbers: list[int]  # numbers of their prompts
    result: DecodeResult
    responses: Responses
    is_last: bool  # whether these are the last of this process


def decode_stream(
    backbone: Backbone,
    decoder: Decoder,
    queue: WorkQueue,
    prompt: Callable[[int], DecodePrompt],
    *,
    response_length: int,
    batch_size: int,
    detokenizer: Detokenizer | None = None,
    observers: Sequence[Observer] = (),
) -> Iterator[DecodedRows]:
    """Decodes what this process takes from a queue, and yields responses in batches.

    A response that ends makes room for the next prompt, so others are unfinished between batches.
    No response depends on which process decodes it or on what is decoded beside it. Prompts should
    come in descending order of length: the canvas then shrinks with them.

    Args:
        prompt: returns the prompt with a number; called when there is room for it.
        queue: of an open one, responses are yielded as they end, those that it abandons
            unfinished. The decode ends when none is left.
        batch_size: rows decoded together; a batch but the last has at least as many responses.
        detokenizer: makes the texts; without one there are only ids.
        observers: see every step; those that cannot follow a refill need a queue of one batch.
            If one ends the decode, the responses that have ended by then are the last.
    """
    detokenizer = detokenizer or Detokenizer(backbone)
    limit, vision = backbone.max_positions, getattr(backbone, "vision", None)
    begun: dict[int, DecodePrompt] = {}  # by number
    number_in: dict[int, int] = {}  # by slot
    entering: list[int] = []  # numbers that take the slots of the next result, in their order
    numbers: list[int] = []
    results: list[DecodeResult] = []

    def source(num_free: int) -> Canvas | None:
        taken = queue.take(num_free)
        if not taken:
            return None
        prompts = [prompt(number) for number in taken]
        longest = max(prompts, key=lambda one: len(one.ids))
        if limit is not None and len(longest.ids) + response_length > limit:
            raise ValueError(
                f"response_length: prompt {longest.uid} has {len(longest.ids)} + "
                f"{response_length} tokens of prompt and response, expected at most the {limit} "
                "positions of the model"
            )
        begun.update(zip(taken, prompts, strict=True))
        # The loop asks for new prompts before it yields what has ended in their slots. Until then
        # the slots' entries are those of the old ones.
        if number_in:
            entering.extend(taken)
        else:
            number_in.update(enumerate(taken))
        return prompt_canvas(
            [one.ids for one in prompts],
            response_length=response_length,
            spec=backbone.spec,
            seeds=[one.seed for one in prompts],
            device=backbone.device,
        )

    def gathered() -> DecodedRows:
        joined = DecodeResult.joined(results, pad_id=backbone.spec.pad_id)
        response, prefilled = joined.ids[:, joined.start :], joined.prefilled[:, joined.start :]
        responses = detokenizer(response, prefilled)
        return DecodedRows(numbers, joined, responses, is_last=not begun)

    def abandoned() -> list[int]:
        gone = queue.abandoned()
        return [slot for slot, number in number_in.items() if number in gone]

    num_slots = queue.slots(batch_size)
    decoded = decode_queue(
        backbone,
        decoder,
        source,
        num_slots=num_slots,
        observers=cast(Sequence[QueueObserver], observers),
        is_open=queue.is_open,
        abandoned=abandoned,
    )
    try:
        for result in decoded:
            free = [slot for slot in range(num_slots) if slot not in number_in]
            ended = [number_in.pop(slot) for slot in result.rows]
            # Of a queue at its end fewer rows enter than have ended, of an open one perhaps more.
            number_in.update(zip([*result.rows, *free], entering, strict=False))
            entering.clear()
            for number in ended:
                one = begun.pop(number)
                # What was computed of a prompt's pictures is needed until its row has ended.
                if vision is not None:
                    vision.release(one.ids)
            numbers += ended
            results.append(result)
            # Single rows end at any step: their results are gathered, so that what follows (texts,
            # records, grades) is done for many at once.
            if len(numbers) >= batch_size or (numbers and queue.is_open):
                yield gathered()
                numbers, results = [], []
        if numbers:
            yield gathered()
    except NotANumberError as error:
        uids = [begun[number_in[slot]].uid for slot in error.rows]
        raise ValueError(f"{', '.join(uids)}: {error}") from error


def prompt_limit(backbone: object, response_length: int, most: int) -> tuple[int, str]:
    """Returns how many tokens a prompt may have, and in words what sets this limit.

    That is ``most`` (``max_prompt_length``), or what the response leaves of the model's positions.
    """
    positions = getattr(backbone, "max_positions", None)
    if positions is None or most + response_length <= positions:
        return most, f"max_prompt_length = {most} tokens"
    room = max(positions - response_length, 0)
    leaves = f"response_length = {response_length} leaves of the model's {positions} positions"
    return room, f"the {room} tokens that {leaves}"


def length_buckets(lengths: Sequence[int], *, batch_size: int) -> list[list[int]]:
    """Groups samples of similar length.

    Returns:
        Indices into ``lengths``, each exactly once; buckets from short to long, equal lengths in
        their original order. Only the speed of a decode depends on the buckets, not its results.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
