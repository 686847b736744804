"""Decodes for many who ask at any time: one thread, whose batch rows enter as slots become free."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import HFBackbone
from lit_dlm.decoding import Decoder, DecodeResult, DecodeState, StepRecord
from lit_dlm.decoding.api import (
    DecodedRows,
    DecodePrompt,
    Detokenizer,
    SampledWrites,
    WorkQueue,
    decode_stream,
    prompt_limit,
)
from lit_dlm.decoding.decoder import with_option

logger = logging.getLogger(__name__)


class UnavailableError(RuntimeError):
    """No answer can be given: too many wait, the server ends, or a decode has failed."""


class Settings(NamedTuple):
    """What rows that decode together have in common."""

    response_length: int
    temperature: float | None = None  # None: the decoder's own
    top_p: float | None = None


class Ended(NamedTuple):
    """A response that has ended: its place among others that ended with it."""

    rows: DecodedRows
    place: int
    writes: Tensor  # (G, 2), see SampledWrites


@dataclass(eq=False, kw_only=True)
class Row:
    """A response that somebody waits for."""

    prompt: DecodePrompt
    settings: Settings
    tell: Callable[[str | Ended | UnavailableError], None]
    """Called by the decoding thread: with text that is final, if streamed, and with the end."""
    is_streamed: bool = False
    is_recorded: bool = False  # whether its writes are asked for
    is_gone: bool = False  # set by who waited: the row leaves the batch before its next step
    num_final: int = 0  # cells whose text was told


class Engine(WorkQueue):
    """A queue that any thread may fill, and the decode that empties it.

    Rows that decode together share their settings. They are taken as they came: one with other
    settings waits until the running ones have ended, and none overtakes it.
    """

    is_open = True

    def __init__(
        self,
        backbone: HFBackbone,
        tokenizer: PreTrainedTokenizerBase,
        decoder: Decoder,
        *,
        num_slots: int,
        max_waiting: int,
    ) -> None:
        super().__init__(num_slots)
        self.backbone, self.tokenizer = backbone, tokenizer
        self.detokenizer = Detokenizer(backbone, tokenizer)
        self._decoder = decoder.on(backbone.spec).encoded(
            lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
        )
        self._decoder.check(backbone)
        self.running: dict[int, Row] = {}  # by number
        self.entered: list[Row] = []  # those that were taken last
        self.is_closed = False
        self.num_requests = self.num_tokens = self.num_forwards = 0  # so far
        self._waiting: list[Row] = []
        self._most = num_slots + max_waiting
        self._numbers = count()
        self._changed = threading.Condition()

    @property
    def waiting(self) -> list[Row]:
        return [row for row in self._waiting if not row.is_gone]

    def check(self, ids: Sequence[int], settings: Settings) -> None:
        """Refuses what would fail in the batch, where others decode."""
        self._with(settings)
        vocab_size, mask_id = self.backbone.vocab_size, self.backbone.spec.mask_id
        if not ids or not all(0 <= one < vocab_size and one != mask_id for one in ids):
            raise ValueError(f"prompt: expected one or more ids below {vocab_size}, and no mask")
        positions = self.backbone.architecture.max_positions
        most, why = prompt_limit(self.backbone, settings.response_length, positions)
        if len(ids) > most:
            raise ValueError(f"prompt: expected at most {why}, got {len(ids)}")

    def put(self, rows: Sequence[Row]) -> None:
        with self._changed:
            held = len(self.waiting) + len(self.running)
            if self.is_closed or held + len(rows) > self._most:
                why = "the server ends" if self.is_closed else f"{held} responses wait or decode"
                raise UnavailableError(f"{why}; try again later")
            self._waiting = [*self.waiting, *rows]
            self.num_requests += 1
            self._changed.notify()

    def take(self, number: int) -> list[int]:
        with self._changed:
            waiting = self.waiting
            alike = takewhile(lambda row: row.settings == self._settings, waiting[:number])
            taken = {next(self._numbers): row for row in alike}
            self.entered, self._waiting = [*taken.values()], waiting[len(taken) :]
            self.running |= taken
        return list(taken)

    def abandoned(self) -> Collection[int]:
        return [number for number, row in self.running.items() if row.is_gone]

    def close(self) -> None:
        """Refuses all rows that are not decoding, now and from now on."""
        with self._changed:
            self.is_closed = True
            refused, self._waiting = self.waiting, []
            self._changed.notify()
        _refuse(refused, "the server ends")

    def run(self) -> None:
        """Answers until the queue is closed; in a thread that does nothing else."""
        try:
            while self._wait():
                try:
                    self._decode(self._with(self._settings))
                # What the decode of some rows needs, such as memory, those of others may not.
                except (ValueError, RuntimeError) as error:
                    logger.error("a decode has failed: %s", " ".join(str(error).split()))
                    _refuse(self.running.values(), "the decode has failed")
                    self.running.clear()
        finally:
            self.close()
            _refuse(self.running.values(), "the server has failed")

    def _wait(self) -> bool:
        """Waits for rows and begins with the settings of the first; returns false once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting or self.is_closed)
            if self.waiting:
                self._settings = self.waiting[0].settings
            return not self.is_closed

    def _with(self, settings: Settings) -> Decoder:
        decoder = self._decoder
        for name in ("temperature", "top_p"):
            if (value := getattr(settings, name)) is not None:
                decoder = with_option(decoder, f"sampler.{name}", value)
        return decoder

    def _decode(self, decoder: Decoder) -> None:
        watcher, before = Watcher(self, decoder.policy.takes_back), self.num_forwards
        for rows in decode_stream(
            self.backbone,
            decoder,
            self,
            lambda number: self.running[number].prompt,
            response_length=self._settings.response_length,
            batch_size=self.size,
            detokenizer=self.detokenizer,
            observers=[watcher],
        ):
            self.num_forwards = before + rows.result.num_forwards
            self.num_tokens += sum(rows.responses.num_tokens)
            for place, writes in enumerate(watcher.ended().cpu()):
                self.running.pop(rows.numbers[place]).tell(Ended(rows, place, writes))


def _refuse(rows: Iterable[Row], why: str) -> None:
    for row in rows:
        row.tell(UnavailableError(why))


class Watcher(SampledWrites):
    """Tells rows which text is final, and keeps how tokens were written if a row asks for it."""

    def __init__(self, engine: Engine, takes_back: bool) -> None:
        super().__init__(engine.size)
        self._engine, self._takes_back = engine, takes_back
        self._row_in: dict[int, Row] = {}  # by slot

    def on_start(self, state: DecodeState) -> None:
        super().on_start(state)
        self._enter(state)

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        super().on_refill(result, state)
        self._enter(state)

    def _enter(self, state: DecodeState) -> None:
        self._row_in |= zip(state.rows.tolist(), self._engine.entered, strict=False)
        is_recorded = any(row.is_recorded for row in self._engine.running.values())
        self.requires = frozenset({"drawn"} if is_recorded else ())

    def on_step(self, record: StepRecord) -> None:
        if self.requires:
            super().on_step(record)
        # Waits for the device, so only where somebody reads along.
        if any(row.is_streamed for row in self._engine.running.values()):
            self._tell(record)

    def _tell(self, record: StepRecord) -> None:
        state, region = record.state, slice(record.state.start, None)
        ids, prefilled = record.new_ids[:, region].cpu(), ~state.editable[:, region].cpu()
        if self._takes_back:  # in its window, which never moves to the left
            assert state.window is not None
            ends = (state.window[:, 0] - state.start).tolist()
        else:
            ends = [[*row, state.mask_id].index(state.mask_id) for row in ids.tolist()]
        for place, (slot, end) in enumerate(zip(state.rows.tolist(), ends, strict=True)):
            row = self._row_in[slot]
            if row.is_streamed and end > row.num_final:
                row.num_final = end
                final = ids[place : place + 1].clone()
                final[:, end:] = state.mask_id
                row.tell(self._engine.detokenizer(final, prefilled[place : place + 1]).texts[0])
