"""The rows that decode together: their steps, looks at them, and how they leave and enter."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, islice

import torch

from lit_dlm.backbones.base import Backbone
from lit_dlm.backbones.visibility import first_column
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.state import (
    BROKEN,
    RUNNING,
    STATUS,
    STEP_LIMIT,
    Canvas,
    DecodeResult,
    DecodeState,
    StepRecord,
)
from lit_dlm.decoding.step import Decision, advance, decide
from lit_dlm.tensors.batches import row_index
from lit_dlm.tensors.precision import without_autocast


class NotANumberError(ValueError):
    """Probabilities of a decode are not numbers; ``rows`` are the slots concerned."""

    def __init__(self, rows: list[int], *, step: int) -> None:
        super().__init__(
            f"the model's probabilities are not numbers at step {step} (rows {rows} of the batch); "
            "look at its weights and at the precision it computes in"
        )
        self.rows = rows


@dataclass(frozen=True)
class Row:
    """What the host knows of a row: its slot, and the batch's clocks when it entered."""

    slot: int
    prompt_length: int
    seconds: float
    policy_seconds: float


class Batch:
    """The rows that are decoding, and the results of those that have ended.

    Steps change only ``state``. The host knows of it what it saw at the last :meth:`look`.
    """

    def __init__(
        self, backbone: Backbone, canvas: Canvas, decoder: Decoder, hidden_layers: tuple[int, ...]
    ) -> None:
        self.state = self._kept(decoder.begin(backbone, canvas))
        self.first_mask: list[int] = []
        """The leftmost unfinished column of every row, at the last look."""
        self.status: list[int] = []
        """The status of every row, at the last look."""
        self._backbone, self._decoder = backbone, decoder
        self._forwards = decoder.forwards(backbone, self.state, hidden_layers)
        # Clocks of a row that was there from the start. They only grow, and a row's time is what
        # they gained since it entered: nothing is kept for each step.
        self._seconds = self._policy_seconds = 0.0  # of a row that was there from the start
        self._policy_timer = Stopwatch(canvas.ids.device)
        self.rows = self._entered(self.state, range(len(canvas.ids)))
        self.frozen: set[int] = set()
        """Rows that have ended and still take a place, which only graphs of steps need."""
        self.ended: list[DecodeResult] = []  # that no result contains yet

    def _entered(self, state: DecodeState, slots: Iterable[int]) -> list[Row]:
        length = state.ids.shape[1] - state.start
        prompt_lengths = (state.positions[:, -1] + 1 - length).tolist()
        return [
            Row(slot, prompt_length, self._seconds, self._policy_seconds)
            for slot, prompt_length in zip(slots, prompt_lengths, strict=True)
        ]

    @property
    def running(self) -> list[int]:
        """Rows that no result contains yet."""
        return [row for row in range(len(self.rows)) if row not in self.frozen]

    def _kept(self, state: DecodeState) -> DecodeState:
        """Returns a state, of rows that have changed, as steps will find it."""
        return state

    def look(self) -> None:
        """Tells the host where rows are and how they have ended; waits for the device."""
        # Together, since the host would wait for each transfer of its own. For a step this is the
        # only one: it is also where a number that is not one is noticed.
        looked = torch.stack([first_column(self.state.unfinished), self.state.status])
        self.first_mask, self.status = looked.tolist()
        broken = [row for row, status in enumerate(self.status) if status == BROKEN]
        if broken:
            last_step = int(self.state.step[broken[0]]) - 1
            raise NotANumberError([self.rows[row].slot for row in broken], step=last_step)

    def prepare(self) -> None:
        """Does what the host has to do before a step: plans, prompts of new rows."""
        first_mask = [-1 if row in self.frozen else at for row, at in enumerate(self.first_mask)]
        with self._own_precision():
            self._forwards.prepare(self.state, first_mask)

    def step(self, requires: frozenset[str]) -> StepRecord:
        """Takes a step."""
        with self._own_precision():
            decision = self._decide(self.state, requires)
        self.state = advance(decision)
        return decision.record

    def _decide(self, state: DecodeState, requires: frozenset[str]) -> Decision:
        return decide(
            state, self._decoder, self._forwards, requires=requires, policy_timer=self._policy_timer
        )

    def watched(self, record: StepRecord) -> StepRecord:
        """Returns a record as observers see it: of the rows that are decoding."""
        if not self.frozen:
            return record
        return record.take(row_index(self.running, self.state.ids.device))

    def _own_precision(self) -> AbstractContextManager[object]:
        # Half-precision weights compute in their own dtype: a trainer's autocast would add casts.
        if self._backbone.is_half:
            return without_autocast(self.state.ids.device)
        return nullcontext()

    def add_seconds(self, seconds: float) -> None:
        """Divides the time of a finished step equally among its rows."""
        self._seconds += seconds / len(self.running)
        self._policy_seconds += self._policy_timer.seconds() / len(self.running)

    def end_rows(self) -> list[int]:
        """Stores the results of the rows that have ended; returns the rows' numbers."""
        ended = [row for row in self.running if self.status[row] != RUNNING]
        if ended:
            self.ended.append(self._result(ended))
        return ended

    def abandon(self, slots: Collection[int]) -> None:
        """Ends rows by their slots, as if their steps were used up."""
        for row, place in enumerate(self.rows):
            if place.slot in slots and self.status[row] == RUNNING:
                self.status[row] = STEP_LIMIT
                self.state.status[row] = STEP_LIMIT

    def refill(self, ended: list[int], canvas: Canvas | None) -> tuple[DecodeResult, DecodeState]:
        """Replaces ended rows; returns the result of all that have ended, and the new rows.

        If more rows enter than have ended, the batch grows: these get the lowest free slots.
        """
        result = self.result()
        if canvas is None:
            return result, self.state.take(row_index([], self.state.ids.device))
        if (num_more := len(canvas.ids) - len(ended)) > 0:
            ended = self._with_room(ended, num_more)
        ended = ended[: len(canvas.ids)]
        state, entering = self.state, self._decoder.begin(self._backbone, canvas)
        slots = [self.rows[row].slot for row in ended]
        for row, entered in zip(ended, self._entered(entering, slots), strict=True):
            self.rows[row] = entered
        present = {row for row, status in enumerate(self.status) if status == RUNNING}
        longest = max(self.rows[row].prompt_length for row in present.union(ended))
        # Prompts are padded on the left so that responses begin in one column: a window, a quota or
        # a layout then needs no offset for each row. For prompts of other lengths the canvas grows
        # on the left, or shrinks if at least an eighth of it would be padding in every row.
        by = longest - state.start
        by = by if by > 0 or -8 * by >= state.ids.shape[1] else 0
        pad_id = self._backbone.spec.pad_id
        state = state.shifted(by, pad_id=pad_id)
        entering = entering.shifted(state.start - entering.start, pad_id=pad_id)
        index = row_index(ended, state.ids.device)
        # New rows take over slots, not numbers of their own: observers and results go by slots.
        entering = replace(entering, rows=row_index(slots, state.ids.device))
        # No mask means no padding. Once either has some, both need one, else they cannot be joined.
        if state.pad_mask is not None or entering.pad_mask is not None:
            state, entering = (
                replace(one, pad_mask=torch.ones_like(one.masked)) if one.pad_mask is None else one
                for one in (state, entering)
            )
        self.state = self._kept(state.put(index, entering))
        self._forwards.put(ended, self.state, by=by)
        return result, entering

    def _with_room(self, ended: list[int], number: int) -> list[int]:
        """Makes room in the lowest free slots; returns the places of the ended rows and of these.

        Until it is replaced, a new row is a copy of another.
        """
        row_in = {row.slot: place for place, row in enumerate(self.rows)}
        taken = {self.rows[row].slot for row in self.running}
        slots = [self.rows[row].slot for row in ended]
        slots += islice((slot for slot in count() if slot not in taken), number)
        order = sorted({*row_in, *slots})
        frozen = {self.rows[row].slot for row in self.frozen}.difference(slots)
        if len(order) > len(self.rows):
            self._arrange([row_in.get(slot, 0) for slot in order])
            self.rows = [
                replace(row, slot=slot) for row, slot in zip(self.rows, order, strict=True)
            ]
        self.frozen = {order.index(slot) for slot in frozen}
        return [order.index(slot) for slot in slots]

    def drop(self, ended: list[int]) -> None:
        """Lets rows that have ended leave the batch."""
        self._arrange([row for row in range(len(self.rows)) if row not in set(ended)])

    def _arrange(self, kept: list[int]) -> None:
        """Keeps these rows, in the order of their slots, which observers rely on."""
        index = row_index(kept, self.state.ids.device)
        self.state = self._kept(self.state.take(index))
        self._forwards.take(kept, index)
        self.rows = [self.rows[row] for row in kept]
        self.first_mask = [self.first_mask[row] for row in kept]
        self.status = [self.status[row] for row in kept]

    def result(self) -> DecodeResult:
        """Returns the result of the rows that have ended since the last one, by their slots."""
        ended, self.ended = self.ended or [self._result([])], []
        # Rows end in any order, and may have ended under canvases of different widths.
        joined = DecodeResult.joined(ended, pad_id=self._backbone.spec.pad_id)
        return replace(joined.by_slot(), num_forwards=self._forwards.num_forwards)

    def _result(self, ended: list[int]) -> DecodeResult:
        # What the policy remembers of rows that have ended may be large, and nobody asks for it.
        state = replace(self.state, memory=None).take(row_index(ended, self.state.ids.device))
        rows = [self.rows[row] for row in ended]
        seconds = [self._seconds - row.seconds for row in rows]
        policy_seconds = [self._policy_seconds - row.policy_seconds for row in rows]
        has_fallback = self._decoder.settings.stall_rule == "top1"
        return DecodeResult(
            ids=state.ids,
            rows=[row.slot for row in rows],
            start=state.start,
            seeds=state.seeds,
            num_steps=state.step,
            idle_steps=state.step - state.num_wrote,
            stalled_steps=(state.step - state.num_decided) * has_fallback,
            policy_forwards=state.step * self._decoder.policy.forwards_per_step,
            seconds=torch.tensor(seconds, dtype=torch.float64),
            policy_seconds=torch.tensor(policy_seconds, dtype=torch.float64),
            status=[STATUS[self.status[row]] for row in ended],
            num_forwards=self._forwards.num_forwards,
            prefilled=~state.editable,
        )


class Stopwatch:
    """Measures the seconds between entering and leaving a ``with`` block.

    On a CPU this is a clock; on CUDA, two events in the stream, so that the work is timed and not
    its launch, and nothing waits until :meth:`seconds` is called.
    """

    def __init__(self, device: torch.device) -> None:
        count = 2 if device.type == "cuda" else 0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        self._clock = 0.0
        self.is_on = True

    def __enter__(self) -> Stopwatch:
        if self._events and self.is_on:
            self._events[0].record()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._clock = time.perf_counter() - self._clock
        if self._events and self.is_on:
            self._events[1].record()

    def seconds(self) -> float:
        """Returns the time, 0 if it is off; on CUDA this waits for the end of the block."""
        if not self.is_on or not self._events:
            return self._clock * self.is_on
        start, end = self._events
        end.synchronize()
        return start.elapsed_time(end) / 1e3
