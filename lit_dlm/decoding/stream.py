"""From encoded prompts to decoded texts: the one way that prompts are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.endings import text_cells
from lit_dlm.decoding.engine import NotANumberError
from lit_dlm.decoding.observers import Observer, QueueObserver
from lit_dlm.decoding.queue import WorkQueue
from lit_dlm.decoding.state import Canvas, DecodeResult, prompt_canvas
from lit_dlm.ops.alignment import shifted
from lit_dlm.vision.pictures import picture_to_text
from lit_dlm.vision.tokens import TokenVision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Makes text of responses as graders take it."""

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

    def __call__(self, response: Tensor, given: Tensor | None = None) -> Responses:
        """Reads ``(B, G)`` int64 responses; ``given`` cells stood there before the first step."""
        response = response.cpu()
        is_text = text_cells(response, self._spec.eos_ids, None if given is None else given.cpu())
        kept = response != self._spec.mask_id
        if self._cut_at_eos:
            kept &= is_text
        ids = [row[cells].tolist() for row, cells in zip(response, kept, strict=True)]
        texts = []
        if self._tokenizer is not None:
            decode = partial(self._tokenizer.decode, skip_special_tokens=True)
            texts = [str(decode(row)) for row in ids]
            if isinstance(self._vision, TokenVision):
                for row in (response >= self._vision.first_id).any(1).nonzero()[:, 0].tolist():
                    # The mark of the end is no part of the picture.
                    (image,) = self._vision.draw(response[row : row + 1, :-1])
                    texts[row] = picture_to_text(image)
        return Responses(ids, texts, is_text.sum(1).tolist())


@dataclass(frozen=True)
class Responses:
    """Text of responses, one entry each."""

    # Tokens of the text: masks are left out and, unless cut_at_eos is off, what stands behind
    # the first end of text (with a layout, that of every part)
    ids: list[list[int]]
    texts: list[str]  # the text; a response of picture tokens becomes the picture
    num_tokens: list[int]  # tokens before the first end of text


class DecodePrompt(NamedTuple):
    """A prompt as the model is given it."""

    uid: str
    ids: Sequence[int]
    seed: int  # usually :func:`~lit_dlm.ops.noise.sample_seed` of the uid


@dataclass(frozen=True)
class DecodedRows:
    """Responses that have ended."""

    numbers: list[int]  # numbers of their prompts
    result: DecodeResult
    responses: Responses
    is_last: bool  # whether this process has none left


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
    """Decodes what this process takes from a queue, a batch at a time.

    A response that ends makes room for the next prompt, so others stay begun between two batches.
    Which process decodes a prompt, and beside which others, changes no response. Prompts should
    come in descending order of length: the canvas then shrinks with them.

    Args:
        prompt: the prompt of a number; called when there is room for it.
        batch_size: rows decoded together, and responses of a batch at least (but the last).
        detokenizer: makes the texts; without one there are ids alone.
        observers: see every step; those that cannot follow a refill need a queue of one batch.
    """
    detokenizer = detokenizer or Detokenizer(backbone)
    limit, vision = getattr(backbone, "max_positions", None), getattr(backbone, "vision", None)
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
                f"response_length: {longest.uid} has {len(longest.ids)} + {response_length} tokens "
                f"of prompt and response, expected at most the {limit} positions of the model"
            )
        begun.update(zip(taken, prompts, strict=True))
        if number_in:
            entering.extend(taken)
        else:
            number_in.update(enumerate(taken))
        return prompt_canvas(
            [one.ids for one in prompts],
            response_length=response_length,
            spec=backbone.spec,
            seeds=[one.seed for one in prompts],
            device=getattr(backbone, "device", "cpu"),
        )

    decoded = decoder.queue(
        backbone,
        source,
        num_slots=queue.slots(batch_size),
        observers=cast(Sequence[QueueObserver], observers),
    )
    try:
        for result in decoded:
            ended = [number_in[slot] for slot in result.rows]
            number_in.update(zip(result.rows, entering, strict=False))
            entering.clear()
            for number in ended:
                one = begun.pop(number)
                if vision is not None:
                    vision.release(one.ids)
            numbers += ended
            results.append(result)
            # Single rows end at any step: their results are gathered, so that what follows (texts,
            # records, grades) is done for many at once.
            if len(numbers) >= batch_size or not begun:
                joined = _joined(results, pad_id=backbone.spec.pad_id)
                given = None if joined.given is None else joined.given[:, joined.start :]
                responses = detokenizer(joined.ids[:, joined.start :], given)
                yield DecodedRows(numbers, joined, responses, is_last=not begun)
                numbers, results = [], []
    except NotANumberError as error:
        uids = [begun[number_in[slot]].uid for slot in error.rows]
        raise ValueError(f"{', '.join(uids)}: {error}") from error


def _joined(results: Sequence[DecodeResult], *, pad_id: int) -> DecodeResult:
    """Results one behind the other, left-padded to the longest prompts among them."""
    last, start = results[-1], max(result.start for result in results)

    def columns(values: Callable[[DecodeResult], Tensor], fill: int) -> Tensor:
        return torch.cat([shifted(values(one), start - one.start, fill) for one in results])

    def given(one: DecodeResult) -> Tensor:
        in_prompt = torch.arange(one.ids.shape[1], device=one.ids.device) < one.start
        return in_prompt.expand_as(one.ids) if one.given is None else one.given

    tensors: dict[str, Any] = {
        name: torch.cat([getattr(result, name) for result in results])
        for name, value in vars(last).items()
        if isinstance(value, Tensor) and name not in ("ids", "given")
    }
    has_given = any(one.given is not None for one in results)
    return replace(
        last,
        ids=columns(lambda one: one.ids, pad_id),
        given=columns(given, 1) if has_given else None,
        start=start,
        rows=[row for one in results for row in one.rows],
        status=[status for one in results for status in one.status],
        **tensors,
    )
