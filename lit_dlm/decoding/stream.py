"""From encoded prompts to decoded texts: the one way that prompts are decoded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.backbones.vision import TokenVision
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.endings import text_cells
from lit_dlm.decoding.engine import NotANumberError
from lit_dlm.decoding.observers import Observer, QueueObserver
from lit_dlm.decoding.queue import WorkQueue, decode_queued_prompts, joined_results
from lit_dlm.decoding.state import DecodeResult
from lit_dlm.pictures import as_text

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
                    (image,) = self._vision.pictures(response[row : row + 1, :-1])
                    texts[row] = as_text(image)
        return Responses(ids, texts, is_text.sum(1).tolist())


@dataclass(frozen=True)
class Responses:
    """Text of responses, one entry each."""

    ids: list[list[int]]
    """Tokens of the text: masks are left out and, unless ``cut_at_eos`` is off, what stands behind
    the first end of text (with a layout, that of every part)."""
    texts: list[str]  # The text; a response of picture tokens becomes the picture
    num_tokens: list[int]  # Tokens before the first end of text


class DecodePrompt(NamedTuple):
    """A prompt as the model is given it."""

    uid: str
    ids: Sequence[int]
    seed: int  # Usually :func:`~lit_dlm.ops.noise.sample_seed` of the uid


@dataclass(frozen=True)
class DecodedRows:
    """Responses that have ended."""

    numbers: list[int]  # Numbers of their prompts
    result: DecodeResult
    responses: Responses
    is_last: bool  # Whether this process has none left


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
    limit = getattr(backbone, "max_positions", sys.maxsize)
    numbers: list[int] = []
    results: list[DecodeResult] = []
    opened: dict[int, str] = {}

    def tokens(number: int) -> tuple[Sequence[int], int]:
        uid, ids, seed = prompt(number)
        if len(ids) + response_length > limit:
            raise ValueError(
                f"response_length: {uid} has {len(ids)} + {response_length} tokens of prompt and "
                f"response, expected at most the {limit} positions that the model was made for"
            )
        opened[number] = uid
        return ids, seed

    try:
        for ended, result in decode_queued_prompts(
            backbone,
            decoder,
            queue,
            tokens,
            response_length=response_length,
            num_slots=batch_size,
            observers=cast(Sequence[QueueObserver], observers),
        ):
            numbers += ended
            results.append(result)
            for number in ended:
                del opened[number]
            # Single rows end at any step: their results are gathered, so that what follows (texts,
            # records, grades) is done for many at once.
            if len(numbers) >= batch_size or not opened:
                joined = joined_results(results, pad_id=backbone.spec.pad_id)
                given = None if joined.given is None else joined.given[:, joined.start :]
                responses = detokenizer(joined.ids[:, joined.start :], given)
                yield DecodedRows(numbers, joined, responses, is_last=not opened)
                numbers, results = [], []
    except NotANumberError as error:
        raise ValueError(f"{', '.join(opened[row] for row in error.rows)}: {error}") from error
