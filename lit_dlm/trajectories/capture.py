"""Capture: an observer that turns a decode into trajectories.

Every step's response canvas goes into a buffer on the device, without a host copy or a
synchronisation. When rows have ended, one copy brings the buffer to the host. Commit steps and
overwritten writes are derived there (a change between consecutive canvases is a write), so every
policy is covered without code of its own, re-masking and edits included. Deriving takes longer than
copying, so it waits until the records are requested, for example by the writer's thread.

Levels: ``tokens`` (the record alone), ``signals`` (also probability, entropy and proposal at every
masked position of every step, and probability, selection score and margin of every write),
``features`` (the record, and features and proposals at kept steps), ``logits`` (the same with the
logits of all masked positions instead of features).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dlm.decoding import DecodeResult, DecodeState, StepRecord
from lit_dlm.system.options import refuse, within
from lit_dlm.tensors.sampling import uniform_noise
from lit_dlm.trajectories.features import (
    ONLY_MASKED,
    FeatureLayout,
    FeatureScheme,
    StepFeatures,
)
from lit_dlm.trajectories.members import only_masked
from lit_dlm.trajectories.record import MAX_LENGTH, SIGNAL_DTYPES, Trajectory, derive

Level = Literal["tokens", "signals", "features", "logits"]
MAX_LOGIT_BYTES = 2**29
"""Most bytes of a record's logits; a reader takes twice that for a block."""


@dataclass(frozen=True, kw_only=True)
class FeatureCapture:
    """What to keep at level ``features``, or at level ``logits``."""

    function: Callable[..., Tensor] | None
    """Called as ``function(hidden, prob, entropy=..., margin=...)`` with ``(b, R, H, D)`` hidden
    snapshots and ``(b, R)`` scores of the model's own distribution (with ``CreditPolicy``'s
    credit), whatever the sampler scores; returns ``(b, R, F)``. Must treat rows independently.
    ``None`` (layout ``logits``) keeps the logits instead, as the sampler reads them: after guidance
    and ``CreditPolicy``'s credit, before temperature and filters.
    """
    hidden_layers: tuple[int, ...]  # snapshots to request from the backbone
    groups: tuple[int, ...]  # sizes of the feature groups, which sum to F
    projector_digest: str  # digest of the function, stored beside the features
    steps: Callable[[int], Container[int]] = lambda _seed: range(MAX_LENGTH + 1)
    """Which steps keep features: called with the seed (int64) of a row, so that its batch cannot
    matter. By default all; :class:`KeptSteps` chooses some."""
    whole_response: bool = True
    """Whether all response positions need scores, or only the candidates of a kept step."""
    scheme: FeatureScheme = "int8"  # how features are stored
    layout: FeatureLayout = "generation"  # see StepFeatures.layout
    scores: frozenset[str] = frozenset({"entropy", "margin"})
    """Scores that the function needs besides the probability."""


StepSignal = Callable[[StepRecord], Tensor]
"""Returns the values ``(b, at least G)`` of a step, of which the last G columns are kept."""


def _entropy(step: StepRecord) -> Tensor:
    assert step.proposal.entropy is not None
    return step.proposal.entropy


_STEP_SIGNALS: dict[str, StepSignal] = {
    "step_prob": lambda step: step.proposal.prob,
    "step_entropy": _entropy,
    "step_proposal": lambda step: step.proposal.ids,
}


class TrajectoryCapture:
    """Observer of one decode at a time; call :meth:`trajectories` afterwards."""

    def __init__(
        self,
        *,
        vocab_size: int,
        level: Level = "tokens",
        features: FeatureCapture | None = None,
        signals: Mapping[str, StepSignal] | None = None,
    ) -> None:
        """Sets up an observer; ``signals`` are further ``step_*`` by name, at any level."""
        needed = level in ("features", "logits")
        assert needed == (features is not None), "features belong to those levels"
        self.vocab_size = vocab_size
        self.level = level
        self.features = features
        self.step_signals = {**(_STEP_SIGNALS if level == "signals" else {}), **(signals or {})}
        self.hidden_layers: tuple[int, ...] = features.hidden_layers if features else ()
        needs = {"signals": {"region", "entropy"}, "features": {"hidden"}}
        self.requires: frozenset[str] = frozenset(needs.get(level, ()))
        self._ended: list[CapturedRow] = []
        self._captured: CapturedDecode | None = None

    def on_start(self, state: DecodeState) -> None:
        device = state.ids.device
        B, G = len(state.rows), state.ids.shape[1] - state.start
        self._copies = HostCopies(device)
        buffer = partial(StepBuffer, B, G, copies=self._copies)
        self._canvas = buffer(torch.int32)
        self._signals = {
            name: buffer(getattr(torch, SIGNAL_DTYPES[name].name)) for name in self.step_signals
        }
        self._tables: dict[str, Tensor] = {}  # commit_* by name, (B, G) float16
        if self.level == "signals":
            for name in ("commit_prob", "commit_margin", "commit_score"):
                self._tables[name] = torch.full((B, G), torch.nan, device=device).half()
        self._mask_id = state.mask_id
        self._step = 0
        self._open: dict[int, CapturedRow] = {}  # by slot
        self._plans: dict[int, Container[int]] = {}
        self._ended, self._captured = [], None
        self._kept: list[KeptStep] = []
        self._enter(state, range(B))

    def _enter(self, state: DecodeState, slots: Sequence[int]) -> None:
        """Notes what rows start from, and begins its copy to the host."""
        ids, P = state.ids, state.start
        seeds = state.seeds.to(ids.device).view(torch.int32)
        real = torch.ones_like(ids) if state.pad_mask is None else state.pad_mask
        parts = (ids[:, P:], ids[:, :P], real[:, :P], seeds)
        joined = torch.cat([part.int().flatten() for part in parts])
        start = StartingRows(self._copies.add(joined), (len(ids), P, ids.shape[1] - P))
        for index, slot in enumerate(slots):
            self._open[slot] = CapturedRow(start, index, slot, self._step)
        if self.features is not None:
            for seed, slot in zip(state.seeds.tolist(), slots, strict=True):
                self._plans[slot] = self.features.steps(seed)
                if self.features.function is None:
                    self._check_size(self.features, self._plans[slot], ids.shape[1] - P)
            self.requires = self._required(self.features)

    def on_step(self, record: StepRecord) -> None:
        """Copies what the level keeps; never waits for the device."""
        state = record.state
        self._canvas.append(state.rows, record.new_ids)
        for name, signal in self.step_signals.items():
            self._signals[name].append(state.rows, signal(record))
        if self._tables:
            self._note_commits(record)
        if self.features is not None and (slots := self._due()):
            self._kept.append(self._features_of(self.features, record, slots))
        self._step += 1
        if self.features is not None:
            self.requires = self._required(self.features)

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        """Ends rows, and begins others in their slots."""
        self._end(result)  # first: the new rows have the same slots
        for table in self._tables.values():
            table.index_fill_(0, state.rows, torch.nan)
        self._enter(state, state.rows.tolist())

    def on_end(self, result: DecodeResult) -> None:
        self._end(result)

    def _end(self, result: DecodeResult) -> None:
        if self._captured is not None:  # those that ended before were handed out
            self._ended, self._captured = [], None
        tables: dict[str, Tensor] = {}
        if self._tables:
            index = torch.tensor(result.rows).to(result.ids.device, non_blocking=True)
            tables = {k: self._copies.add(table[index]) for k, table in self._tables.items()}
        steps = result.num_steps.tolist()
        for at, (slot, status) in enumerate(zip(result.rows, result.status, strict=True)):
            ended = replace(
                self._open.pop(slot),
                num_steps=steps[at],
                status=status,
                tables={name: table[at] for name, table in tables.items()},
            )
            self._ended.append(ended)

    def captured(self) -> CapturedDecode:
        """Returns the rows that have ended and were not returned before, in the order of results.

        Until other rows end, further calls return the same ones. Their records can be made at any
        time and in any thread.
        """
        if self._captured is None:  # once: copying what is left of a buffer is not free
            assert self._ended, "no decode has ended yet"
            self._captured = CapturedDecode(
                copies=self._copies,
                rows=self._ended,
                canvases=self._canvas.parts(),
                mask_id=self._mask_id,
                vocab_size=self.vocab_size,
                signals={name: buffer.parts() for name, buffer in self._signals.items()},
                kept=self._kept,
                features=self.features,
            )
            # Only these records still need the steps before the first one of an open row. Otherwise
            # a long queue of prompts would keep the canvases of all its steps.
            first_step = min((row.first_step for row in self._open.values()), default=self._step)
            for buffer in (self._canvas, *self._signals.values()):
                buffer.forget(first_step)
            self._kept = [kept for kept in self._kept if kept.step >= first_step]
        return self._captured

    def trajectories(
        self, uids: Sequence[str], metas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Trajectory]:
        """The records of :meth:`captured`."""
        return self.captured().trajectories(uids, metas)

    # -- signals -------------------------------------------------------------------------------

    def _note_commits(self, record: StepRecord) -> None:
        """Overwrites the ``commit_*`` values of the positions that this step wrote."""
        state, proposal = record.state, record.proposal
        rows, response = state.rows, slice(state.start, None)
        # The gap of a commit is that to the best score that was passed over in the same step.
        passed_over = record.candidates & ~record.commit
        best = record.scores.masked_fill(~passed_over, -torch.inf).amax(1, keepdim=True)
        written = (record.new_ids != state.ids)[:, response]
        commit = record.commit[:, response]
        for name, values in (
            ("commit_prob", proposal.prob),
            # Without an alternative the gap is infinite: nothing else could have been chosen.
            ("commit_margin", record.scores - best),
            ("commit_score", record.scores),
        ):
            target = self._tables[name]
            # A write that is not a commit (an end-of-text fill) was not scored.
            # Written again, a position has the values of its last write, as its commit step does.
            new = torch.where(commit, values[:, response], torch.nan).to(target.dtype)
            target.index_copy_(0, rows, torch.where(written, new, target[rows]))

    # -- features ------------------------------------------------------------------------------

    def _due(self) -> list[int]:
        """Slots whose rows keep features at the coming step, if they are still in the batch."""
        return [
            slot
            for slot, row in self._open.items()
            if self._step - row.first_step in self._plans[slot]
        ]

    def _check_size(
        self, settings: FeatureCapture, steps: Container[int], num_columns: int
    ) -> None:
        """Refuses logits that a reader would not take, before anything is decoded."""
        kept = sum(step in steps for step in range(num_columns))
        size = kept * num_columns * self.vocab_size * (1 if settings.scheme == "int8" else 2)
        if size > MAX_LOGIT_BYTES:
            got = f"{size} ({kept} steps of {num_columns} positions and {self.vocab_size} ids)"
            refuse("step_ratio", f"at most {MAX_LOGIT_BYTES} bytes of logits a response", got)

    def _required(self, settings: FeatureCapture) -> frozenset[str]:
        """What a step must compute: scores of the whole response only if features are kept."""
        if settings.function is None:
            return frozenset({"logits", "region"} if self._due() else ())
        if not self._due():
            return frozenset({"hidden"})
        # More columns in a matrix product take time and can change its last bits, so a step that
        # keeps nothing asks for no more than the policy does.
        scores = {f"raw_{name}" for name in settings.scores}
        region = {"region"} if settings.whole_response else set()
        return frozenset({"hidden", "raw_prob"} | region | scores)

    def _features_of(
        self, settings: FeatureCapture, record: StepRecord, slots: list[int]
    ) -> KeptStep:
        """Features of the planned rows, by slot.

        Rows that have left the batch get another row's values, which are dropped at the end: asking
        which have left would wait for the device.
        """
        state, proposal = record.state, record.proposal
        device = state.ids.device
        wanted = torch.tensor(slots).to(device, non_blocking=True)
        rows = (state.rows[None, :] == wanted[:, None]).int().argmax(1)
        columns = slice(0 if settings.layout == "all" else state.start, None)
        if settings.function is None:
            assert record.denoised is not None
            features = record.denoised.logits[rows]  # of the response: the step required "region"
        else:
            assert proposal.hidden is not None
            scores = {
                name: getattr(proposal, f"raw_{name}")[rows, columns]
                for name in ("prob", *sorted(settings.scores))
            }
            features = settings.function(proposal.hidden[rows, columns], **scores)
        # Columns without proposals (the prompt) propose their own tokens.
        is_response = torch.arange(state.ids.shape[1], device=device) >= state.start
        proposals = torch.where(is_response, proposal.ids, state.ids)[rows, columns]
        add = self._copies.add
        return KeptStep(self._step, slots, add(features), add(proposals.int()))


# -- a decode on the host --------------------------------------------------------------------------


@dataclass
class KeptStep:
    """Features of one step of the batch, for the slots whose rows keep it."""

    step: int
    slots: list[int]
    features: Tensor  # (n, R, F) floating point
    proposals: Tensor  # (n, R) int32


@dataclass(frozen=True, eq=False)
class StartingRows:
    """The initial canvases and seeds of rows that began together."""

    joined: Tensor
    """One int32 vector, so that one copy suffices: the response ``(n, G)``, prompt columns
    ``(n, P)``, which of them are real ``(n, P)``, and seeds as pairs ``(n, 2)``."""
    shape: tuple[int, int, int]  # n, P and G

    @cached_property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Response, prompt, real columns, and seeds as uint64; valid after the copies arrived."""
        n, P, G = self.shape
        sizes = np.cumsum([n * G, n * P, n * P])
        first, ids, real, seeds = np.split(self.joined.numpy(), sizes)
        unsigned = np.ascontiguousarray(seeds).view(np.uint64)
        return first.reshape(n, G), ids.reshape(n, P), real.reshape(n, P) != 0, unsigned


def as_recorded(prompt: NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """Returns a prompt as records store it, with picture rows renumbered in order.

    Picture rows have ids from ``vocab_size`` on, which depend on the pictures that the backbone
    holds at the moment; they become ``vocab_size``, ``vocab_size + 1`` and so on.
    """
    is_row = prompt >= vocab_size
    if not is_row.any():
        return prompt
    return np.where(is_row, vocab_size - 1 + np.cumsum(is_row, dtype=np.int32), prompt)


@dataclass(frozen=True, eq=False)
class CapturedRow:
    """A row of a decode, and how it ended if it has."""

    start: StartingRows
    index: int  # among the rows that began with it
    slot: int
    first_step: int  # step of the batch in which it began
    num_steps: int = 0
    status: str = ""
    tables: Mapping[str, Tensor] = field(default_factory=dict)  # commit_*: (G,) each


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedDecode:
    """Rows that have ended: buffers on the host, or on their way, from which records are made."""

    copies: HostCopies  # waits for the tensors below
    rows: Sequence[CapturedRow]
    canvases: StepParts  # (T, B, G) int32, the response canvas after every step
    mask_id: int
    vocab_size: int
    signals: Mapping[str, StepParts] = field(default_factory=dict)  # step_* as (T, B, G)
    kept: Sequence[KeptStep] = ()
    features: FeatureCapture | None = None  # what was kept at level features, and how it is stored

    @property
    def nbytes(self) -> int:
        """Memory that is held until the records are made, in bytes."""
        buffers = (self.canvases, *self.signals.values())
        tensors = [part for buffer in buffers for part in buffer.parts]
        tensors += [tensor for kept in self.kept for tensor in (kept.features, kept.proposals)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def trajectories(
        self, uids: Sequence[str], metas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Trajectory]:
        """Derives the records of all rows, in their order; may be called from any thread."""
        self.copies.wait()
        return [
            self._trajectory(row, uid, {} if metas is None else dict(metas[number]))
            for number, (row, uid) in enumerate(zip(self.rows, uids, strict=True))
        ]

    def _trajectory(self, row: CapturedRow, uid: str, meta: dict[str, Any]) -> Trajectory:
        first, prompt, real, seeds = (array[row.index] for array in row.start.arrays)
        steps = slice(row.first_step, row.first_step + row.num_steps)
        record = Trajectory(
            uid=uid,
            prompt_ids=as_recorded(prompt[real], self.vocab_size),
            vocab_size=self.vocab_size,
            seed=int(seeds),
            status=row.status,  # type: ignore[arg-type]  # a RecordStatus
            meta=meta,
            **derive(first, self.canvases.of(row.slot, steps), self.mask_id),
        )
        record.signals.update({name: table.numpy() for name, table in row.tables.items()})
        if self.signals:
            step, position = record.masked_rows().T
            for name, parts in self.signals.items():
                record.signals[name] = parts.of(row.slot, steps)[step, position]
        return record if self.features is None else self._with_features(record, row, self.features)

    def _with_features(
        self, record: Trajectory, row: CapturedRow, form: FeatureCapture
    ) -> Trajectory:
        kept = [
            (one.step - row.first_step, one, one.slots.index(row.slot))
            for one in self.kept
            # A slot has several rows, one after the other.
            if 0 <= one.step - row.first_step < row.num_steps and row.slot in one.slots
        ]
        if not kept:
            return record
        # Drops left padding, which differs between batches; responses have the same columns.
        length = record.num_generated + (record.num_prompt if form.layout == "all" else 0)
        # Step by step: logits of all steps in float32, several times, could fill the memory.
        stored = StepFeatures.joined(
            [
                StepFeatures.quantize(
                    one.features[at, -length:][None].float().numpy(),
                    kept_steps=np.array([step]),
                    proposals=one.proposals[at, -length:][None].numpy(),
                    groups=form.groups,
                    scheme=form.scheme,
                    layout="generation" if form.layout == "masked" else form.layout,
                    projector_digest=form.projector_digest,
                )
                for step, one, at in kept
            ]
        )
        if form.layout in ONLY_MASKED:
            stored = only_masked(record, stored)
        return replace(record, features=stored)


# -- which steps keep features ---------------------------------------------------------------------

_STREAM = 17  # separate from the draws of samplers and policies
_STRATA = 256  # planned at a time


class KeptSteps:
    """Which steps of a decode keep their features: one at random in every stratum of steps.

    The number of steps is not known beforehand (a threshold policy may end at any step), so steps
    cannot be drawn from the whole decode. Stratum ``j`` covers the steps from ``ceil(j / ratio)``
    up to the start of the next one, and a hash of (sample seed, ``j``) picks one of them. So every
    step is kept with probability about ``ratio``, time is covered evenly, and the choice depends
    only on the sample's seed, neither on its batch nor on the length of its decode.
    """

    def __init__(self, seed: int, *, ratio: float) -> None:
        """Starts the plan of a row from its seed (int64); ``ratio`` is in (0, 1]."""
        within("(0, 1]", step_ratio=ratio)
        self.ratio = ratio
        self._seed = torch.tensor([seed], dtype=torch.int64)
        self._planned = 0
        self._steps: set[int] = set()

    def __contains__(self, step: object) -> bool:
        assert isinstance(step, int)
        while step >= self._start(self._planned):
            self._plan()
        return step in self._steps

    def steps(self, num_steps: int) -> list[int]:
        """The kept steps below ``num_steps``, ascending."""
        return [step for step in range(num_steps) if step in self]

    def _start(self, stratum: int) -> int:
        return math.ceil(stratum / self.ratio)

    def _plan(self) -> None:
        strata = torch.arange(self._planned, self._planned + _STRATA)
        starts = torch.tensor([self._start(self._planned + j) for j in range(_STRATA + 1)])
        # Of the seed and the stratum alone: the same for any batch and any order of planning.
        (draws,) = uniform_noise(self._seed, 0, strata[None], stream=_STREAM)
        self._steps.update((starts[:-1] + (draws * starts.diff()).long()).tolist())
        self._planned += _STRATA


# -- buffers of steps ------------------------------------------------------------------------------

MAX_CHUNK_BYTES = 64 * 2**20
"""Device memory of one buffer; longer decodes spill to the host in parts of this size."""


class HostCopies:
    """Tensors on their way from one device to the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arrival: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a device tensor on the host, valid after :meth:`wait`.

        The device tensor must not be written to afterwards.
        """
        if self.device.type != "cuda":  # on the CPU nothing is copied: this returns the tensor
            return tensor.cpu()
        side, now = _side_stream(self.device), torch.cuda.current_stream(self.device)
        # Pinned memory, or the copy would wait for the device although it is not to block.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        side.wait_event(now.record_event())  # the steps must have been written
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
        # The allocator must not reuse this memory for the decode before the copy has read it.
        tensor.record_stream(side)
        self._arrival = side.record_event()
        return host

    def wait(self) -> None:
        """Waits until every tensor has arrived; may be called from another thread."""
        if self._arrival is not None:
            self._arrival.synchronize()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: creating streams takes time, and copies of one device share its bus anyway.
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class StepParts:
    """Values of every step of a batch, from ``first_step`` on."""

    first_step: int
    parts: Sequence[Tensor]  # (t, B, G) each, on the host once the copies have arrived
    num_columns: int

    def of(self, slot: int, steps: slice) -> NDArray[Any]:
        """Returns the values ``(t, G)`` of one slot at the given steps."""
        own, end = [], self.first_step
        for part in self.parts:
            begin, end = end, end + len(part)
            if begin < steps.stop and end > steps.start:
                own.append(part[max(steps.start - begin, 0) : steps.stop - begin, slot])
        if not own:  # a row that had nothing to fill took part in no step
            return np.empty((0, self.num_columns), dtype=np.int32)
        joined: NDArray[Any] = (own[0] if len(own) == 1 else torch.cat(own)).numpy()
        return joined


class StepBuffer:
    """Values ``(T, B, G)`` of a decode whose number of steps is not known beforehand.

    The values of rows that have left the batch are arbitrary. A step is copied when it is added:
    the tensors of a record are valid only until the next step.

    Nothing here waits for the device while a decode runs. On CUDA a full buffer is copied to pinned
    memory on a separate stream, beside the decode; on the CPU the buffer itself is handed over.
    """

    def __init__(
        self, num_rows: int, num_columns: int, dtype: torch.dtype, copies: HostCopies
    ) -> None:
        """Sets up a buffer of B slots and G columns; memory is allocated when steps arrive.

        Most policies commit at least one token per step, so there are at most as many steps as
        columns; further steps go into further parts, each of at most :data:`MAX_CHUNK_BYTES`.
        """
        self.num_rows, self.num_columns, self.dtype = num_rows, num_columns, dtype
        self._copies = copies
        step_bytes = max(num_rows * num_columns * dtype.itemsize, 1)
        self._chunk_steps = max(1, min(num_columns, MAX_CHUNK_BYTES // step_bytes))
        self._chunk: Tensor | None = None  # (chunk steps, B, G)
        self._sent = self._at = 0  # steps of the chunk
        self._first_step = 0
        self._parts: list[Tensor] = []

    def append(self, rows: Tensor, values: Tensor) -> None:
        """Copies one step.

        Args:
            rows: ``(b,)`` int64, ascending: slots of the rows in the batch.
            values: ``(b, at least G)``, of which the last G columns are taken.
        """
        values = values[:, values.shape[1] - self.num_columns :]
        if self._chunk is None or self._at == self._chunk_steps:
            self._send()
            shape = (self._chunk_steps, self.num_rows, self.num_columns)
            self._chunk = torch.empty(shape, dtype=self.dtype, device=values.device)
            self._sent = self._at = 0
        # A step is written where it belongs: a list of steps would allocate, and torch.stack would
        # need them all once more.
        step = self._chunk[self._at]
        if len(values) == self.num_rows:  # all rows are present, in order: no index is needed
            step.copy_(values)
        else:
            step.index_copy_(0, rows, values.to(self.dtype))
        self._at += 1

    def parts(self) -> StepParts:
        """Returns all steps not forgotten, after sending to the host those not there yet."""
        self._send()
        return StepParts(self._first_step, tuple(self._parts), self.num_columns)

    def forget(self, first_step: int) -> None:
        """Drops the parts that end before ``first_step``, the first step that is still needed."""
        while self._parts and self._first_step + len(self._parts[0]) <= first_step:
            self._first_step += len(self._parts.pop(0))

    def _send(self) -> None:
        if self._chunk is not None and self._at > self._sent:
            self._parts.append(self._copies.add(self._chunk[self._sent : self._at]))
            self._sent = self._at
