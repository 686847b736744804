"""Capture: an observer that turns a decode into trajectories.

Every step's response canvas goes into a buffer on the device, and nothing else at level ``tokens``:
no host copy, no synchronisation. When the decode has ended, one copy brings the buffer to the host.
Commit steps and overwritten writes are derived there from the canvases of all steps (a change
between two of them is a write), so every policy is covered without its help, re-masking and edits
included. That takes longer than the copying during the decode, so it is left to whoever asks for
the records, such as the writer's thread.

Levels: ``tokens`` (the record alone), ``signals`` (also probability, entropy and proposal at every
masked position of every step, and probability and selection margin of every write), ``features``
(the record, and features and proposals at kept steps). At any level the most probable tokens of
every masked position and the duration of every step can be kept as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dlm.decoding import DecodeResult, DecodeState, StepRecord
from lit_dlm.ops.noise import uniform_noise
from lit_dlm.trajectories.features import only_masked
from lit_dlm.trajectories.record import (
    TOP_SIGNALS,
    FeatureLayout,
    FeatureScheme,
    StepFeatures,
    Trajectory,
    derive,
)

Level = Literal["tokens", "signals", "features"]


@dataclass(frozen=True, kw_only=True)
class FeatureCapture:
    """What to keep at level ``features``."""

    function: Callable[..., Tensor]
    """Called as ``function(hidden, prob, entropy=..., margin=...)`` with ``(b, R, H, D)`` hidden
    snapshots and ``(b, R)`` scores of the model's own distribution, whatever the sampler scores;
    returns ``(b, R, F)``. Must treat rows independently."""
    hidden_layers: tuple[int, ...]
    """Snapshots to ask of the backbone."""
    groups: tuple[int, ...]
    """Sizes of the feature groups, which sum to F."""
    projector_digest: str
    """Digest of the function, stored beside the features."""
    step_ratio: float = 0.1
    """Fraction of steps that keep features."""
    scheme: FeatureScheme = "int8"
    """How features are stored."""
    layout: FeatureLayout = "generation"
    """Response rows only, or prompt rows too."""
    scores: frozenset[str] = frozenset({"entropy", "margin"})
    """Scores besides the probability that the function needs."""


@dataclass
class _Signals:
    """Per-step and per-write scores on the device."""

    prob: StepBuffer
    entropy: StepBuffer
    proposal: StepBuffer
    commit_prob: Tensor  # (B, G) float16
    commit_margin: Tensor  # (B, G) float16
    commit_score: Tensor  # (B, G) float16


class TrajectoryCapture:
    """Observer of one decode at a time; use :meth:`trajectories` after it."""

    def __init__(
        self,
        *,
        vocab_size: int,
        level: Level = "tokens",
        features: FeatureCapture | None = None,
        top_k: int = 0,
        step_times: bool = False,
    ) -> None:
        """Sets what is captured.

        Args:
            vocab_size: bound of the token ids, stored with every record.
            level: how much to keep.
            features: needed at level ``features``, and only there.
            top_k: most probable tokens to keep of every masked position of every step.
            step_times: keep the duration of every step of the batch.

        Raises:
            ValueError: If the level is unknown or does not fit ``features``, or ``top_k`` is out of
                range.
        """
        if level not in ("tokens", "signals", "features"):
            raise ValueError(
                f"capture level: expected 'tokens', 'signals' or 'features', got {level!r}"
            )
        if (level == "features") != (features is not None):
            raise ValueError(f"capture level {level!r} and features={features} do not fit")
        if not 0 <= top_k <= vocab_size:
            raise ValueError(f"top_k: expected 0 to {vocab_size}, got {top_k}")
        self.vocab_size = vocab_size
        self.level = level
        self.features = features
        self.top_k = top_k
        self.step_times = step_times
        self.hidden_layers: tuple[int, ...] = features.hidden_layers if features else ()
        needs = {"signals": {"region", "entropy"}, "features": {"hidden"}}
        self._always = frozenset({"region", "logits"} if top_k else ())
        self.requires: frozenset[str] = self._always.union(needs.get(level, ()))
        self._start: DecodeState | None = None
        self._captured: CapturedDecode | None = None

    def on_start(self, state: DecodeState) -> None:
        """Prepares the buffers."""
        self._start, self._captured = state, None
        device = state.ids.device
        B, (P, G) = len(state.rows), (state.start, state.ids.shape[1] - state.start)
        self._copies = HostCopies(device)
        self._canvas = canvas_buffer(B, P, G, self._copies)
        self._top = TopTokens(B, G, self.top_k, self._copies) if self.top_k else None
        buffer = partial(StepBuffer, B, G, copies=self._copies, expected_steps=G, first_column=P)
        self._signals: _Signals | None = None
        if self.level == "signals":
            unknown = torch.full((B, G), torch.nan, dtype=torch.float16, device=device)
            self._signals = _Signals(
                prob=buffer(torch.float16),
                entropy=buffer(torch.float16),
                proposal=buffer(torch.int32),
                commit_prob=unknown,
                commit_margin=unknown.clone(),
                commit_score=unknown.clone(),
            )
        self._kept: list[KeptStep] = []
        if self.features is not None:
            self._plan = KeptSteps(state.seeds.tolist(), ratio=self.features.step_ratio)
            self.requires = self._required(self.features, state.step)
        self._step_seconds: list[float] = []
        self._clock = time.perf_counter()

    def on_step(self, record: StepRecord) -> None:
        """Copies what the level keeps; never waits for the device."""
        state = record.state
        if self.step_times:
            self._step_seconds.append(time.perf_counter() - self._clock)
        self._canvas.append(state.rows, record.new_ids)
        if self._top is not None:
            assert record.denoised is not None
            columns = record.denoised.columns - state.start
            self._top.append(state.rows, record.denoised.logits, columns)
        if self._signals is not None:
            self._add_signals(self._signals, record)
        if self.features is not None:
            rows = self._plan.rows(state.step)
            if rows:
                self._kept.append(self._features_of(self.features, record, rows))
            self.requires = self._required(self.features, state.step + 1)
        if self.step_times:
            self._clock = time.perf_counter()

    def on_end(self, result: DecodeResult) -> None:
        """Sends the buffers to the host, the canvases and all small facts as one piece."""
        start = self._start
        assert start is not None, "on_end without on_start"
        (B, L), P = start.ids.shape, start.start
        canvases, facts = finished_canvases(
            self._canvas,
            start.ids,
            P,
            pad_mask=start.pad_mask,
            num_steps=result.num_steps,
            seeds=result.seeds,
            prompt_editable=start.editable[:, :P].any()[None],
        )
        self._captured = CapturedDecode(
            copies=self._copies,
            canvases=canvases,
            facts=facts,
            shape=(B, P, L - P),
            status=tuple(result.status),
            mask_id=start.mask_id,
            vocab_size=self.vocab_size,
            signals=self._sent_signals() | (self._top.finish() if self._top is not None else {}),
            step_seconds=self._step_seconds,
            kept=self._kept,
            features=self.features,
        )
        self._start, self._signals, self._kept = None, None, []

    def captured(self) -> CapturedDecode:
        """The last decode; its records can be made at any time and in any thread.

        Raises:
            ValueError: If no decode has ended.
        """
        if self._captured is None:
            raise ValueError("capture: no decode has ended yet")
        return self._captured

    def trajectories(
        self, uids: Sequence[str], metas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Trajectory]:
        """The records of the last decode.

        Args:
            uids: one name per row of the starting canvas, in its order.
            metas: small JSON values per row.

        Returns:
            One record per row.

        Raises:
            ValueError: If no decode has ended, or the number of names differs from that of rows.
        """
        return self.captured().trajectories(uids, metas)

    # -- signals -------------------------------------------------------------------------------

    @staticmethod
    def _add_signals(signals: _Signals, record: StepRecord) -> None:
        state, proposal = record.state, record.proposal
        rows, response = state.rows, slice(state.start, None)
        assert proposal.entropy is not None
        signals.prob.append(rows, proposal.prob)
        signals.entropy.append(rows, proposal.entropy)
        signals.proposal.append(rows, proposal.ids)
        passed_over = record.candidates & ~record.commit
        best = record.scores.masked_fill(~passed_over, -torch.inf).amax(1, keepdim=True)
        written = (record.new_ids != state.ids)[:, response]
        commit = record.commit[:, response]
        for target, values in (
            (signals.commit_prob, proposal.prob[:, response]),
            # Without an alternative the gap is infinite: nothing else could have been chosen.
            (signals.commit_margin, (record.scores - best)[:, response]),
            (signals.commit_score, record.scores[:, response]),
        ):
            # A write that is no commit (an end-of-text fill) was not scored.
            new = torch.where(commit, values, torch.nan).to(target.dtype)
            target.index_copy_(0, rows, torch.where(written, new, target[rows]))

    def _sent_signals(self) -> dict[str, list[Tensor]]:
        signals = self._signals
        if signals is None:
            return {}
        return {
            "commit_prob": [self._copies.add(signals.commit_prob)],
            "commit_margin": [self._copies.add(signals.commit_margin)],
            "commit_score": [self._copies.add(signals.commit_score)],
            "step_prob": signals.prob.finish()[0],
            "step_entropy": signals.entropy.finish()[0],
            "step_proposal": signals.proposal.finish()[0],
        }

    # -- features ------------------------------------------------------------------------------

    def _required(self, settings: FeatureCapture, step: int) -> frozenset[str]:
        """What a step must compute: the scores of the whole response only where they are kept."""
        if not self._plan.rows(step):
            return self._always | {"hidden"}
        scores = {f"raw_{name}" for name in settings.scores}
        return self._always | {"hidden", "region", "raw_prob"} | scores

    def _features_of(
        self, settings: FeatureCapture, record: StepRecord, rows: list[int]
    ) -> KeptStep:
        """Features of the planned rows.

        Rows that have left the batch get another row's values, which are dropped at the end: asking
        which have left would wait for the device.
        """
        state, proposal = record.state, record.proposal
        device = state.ids.device
        wanted = torch.tensor(rows).to(device, non_blocking=True)
        slots = (state.rows[None, :] == wanted[:, None]).int().argmax(1)
        columns = slice(0 if settings.layout == "all" else state.start, None)
        assert proposal.hidden is not None
        scores = {
            name: getattr(proposal, f"raw_{name}")[slots, columns]
            for name in ("prob", *sorted(settings.scores))
        }
        features = settings.function(proposal.hidden[slots, columns], **scores)
        # Columns that were not looked at (the prompt) propose what stands there.
        looked_at = torch.arange(state.ids.shape[1], device=device) >= state.start
        proposals = torch.where(looked_at, proposal.ids, state.ids)[slots, columns]
        add = self._copies.add
        return KeptStep(state.step, rows, add(features.float()), add(proposals.int()))


# -- a decode on the host --------------------------------------------------------------------------


@dataclass
class KeptStep:
    """Features of one step, for the rows that keep it."""

    step: int
    rows: list[int]
    features: Tensor  # (n, R, F) float32
    proposals: Tensor  # (n, R) int32


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedDecode:
    """A finished decode: buffers that are on the host or on their way there, and its records."""

    copies: HostCopies
    """Tells when the tensors below have arrived."""
    canvases: list[Tensor]
    """Parts ``(t, B, G)`` int32 of the response canvas after every step. Rows count only below
    their number of steps."""
    facts: Tensor
    """One int32 row: the response before step 0 ``(B, G)``, prompt columns ``(B, P)``, which of
    them are real ``(B, P)``, numbers of steps ``(B,)``, seeds as pairs ``(B, 2)``, and whether a
    prompt column was editable ``(1,)``."""
    shape: tuple[int, int, int]
    """B, P (columns) and G."""
    status: Sequence[str]
    """How each row ended."""
    mask_id: int
    vocab_size: int
    signals: Mapping[str, list[Tensor]] = field(default_factory=dict)
    """``commit_*`` as one part ``(B, G)``, ``step_*`` in parts ``(t, B, G)``, the most probable
    tokens in parts ``(t, B, G k)``."""
    step_seconds: Sequence[float] = ()
    """Duration of every step; empty when it was not captured."""
    kept: Sequence[KeptStep] = ()
    features: FeatureCapture | None = None
    """What was kept at level ``features``, and how it is stored."""

    @property
    def num_rows(self) -> int:
        """B, the number of records."""
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory that waits until the records are made, in bytes."""
        tensors = [*self.canvases, self.facts]
        tensors += [part for parts in self.signals.values() for part in parts]
        tensors += [tensor for kept in self.kept for tensor in (kept.features, kept.proposals)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def trajectories(
        self, uids: Sequence[str], metas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Trajectory]:
        """Derives the records; may be called from any thread.

        Args:
            uids: one name per row of the starting canvas, in its order.
            metas: small JSON values per row.

        Returns:
            One record per row.

        Raises:
            ValueError: If the number of names differs from that of rows, or columns before the
                response were editable.
        """
        B, P, G = self.shape
        if len(uids) != B or (metas is not None and len(metas) != B):
            raise ValueError(
                f"capture: expected {B} uids (and metas), got {len(uids)} and "
                f"{'none' if metas is None else len(metas)}"
            )
        self.copies.wait()
        sizes = np.cumsum([B * G, B * P, B * P, B, 2 * B])
        first, ids, real, num_steps, seeds, editable = np.split(self.facts.numpy(), sizes)
        if editable.any():
            raise ValueError(
                f"capture: editable columns must not lie before column {P}, where the response "
                "begins"
            )
        first, ids, real = first.reshape(B, G), ids.reshape(B, P), real.reshape(B, P) != 0
        tokens, commit_step, events = derive(first, _joined(self.canvases), num_steps)
        given = first != self.mask_id
        unsigned = np.ascontiguousarray(seeds).view(np.uint64).tolist()
        signals = {name: _joined(parts) for name, parts in self.signals.items()}
        records = [
            Trajectory(
                uid=uid,
                prompt_ids=ids[row][real[row]],
                tokens=tokens[row],
                commit_step=commit_step[row],
                num_steps=int(num_steps[row]),
                mask_id=self.mask_id,
                vocab_size=self.vocab_size,
                seed=unsigned[row],
                status=self.status[row],  # type: ignore[arg-type]  # the loop's are ours
                given=given[row],
                superseded=events[row],
                meta=dict(metas[row]) if metas is not None else {},
            )
            for row, uid in enumerate(uids)
        ]
        for row, record in enumerate(records):
            record.signals.update(_signals_of(record, signals, row))
            if self.step_seconds:
                times = np.rint(1e6 * np.array(self.step_seconds[: record.num_steps]))
                record.signals["step_time_us"] = times.clip(0, 2**32 - 1).astype(np.uint32)
        return records if self.features is None else self._with_features(records, self.features)

    def _with_features(self, records: list[Trajectory], form: FeatureCapture) -> list[Trajectory]:
        B, _, G = self.shape
        steps: list[list[int]] = [[] for _ in range(B)]
        features: list[list[Tensor]] = [[] for _ in range(B)]
        proposals: list[list[Tensor]] = [[] for _ in range(B)]
        for kept in self.kept:
            for i, row in enumerate(kept.rows):
                if kept.step < records[row].num_steps:
                    # Left padding goes; the response has the same columns in every row.
                    length = G + (records[row].num_prompt if form.layout == "all" else 0)
                    steps[row].append(kept.step)
                    features[row].append(kept.features[i, -length:])
                    proposals[row].append(kept.proposals[i, -length:])
        with_features = []
        for row, record in enumerate(records):
            if steps[row]:
                stored = StepFeatures.quantize(
                    torch.stack(features[row]).numpy(),
                    kept_steps=np.array(steps[row]),
                    proposals=torch.stack(proposals[row]).numpy(),
                    groups=form.groups,
                    scheme=form.scheme,
                    layout="all" if form.layout == "all" else "generation",
                    projector_digest=form.projector_digest,
                )
                if form.layout == "masked":
                    stored = only_masked(record, stored)
                record = replace(record, features=stored)
            with_features.append(record)
        return with_features


def _joined(parts: Sequence[Tensor]) -> NDArray[Any]:
    """Parts as one array, without copying a single one."""
    array: NDArray[Any] = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).numpy()
    return array


def _signals_of(
    record: Trajectory, signals: Mapping[str, NDArray[Any]], row: int
) -> dict[str, NDArray[Any]]:
    """The signals of one record, the per-step ones in the row order of ``masked_rows``."""
    if not signals:
        return {}
    step, position = record.masked_rows().T
    own = {}
    for name, values in signals.items():
        if name.startswith("commit_"):
            own[name] = values[row].copy()
        elif name in TOP_SIGNALS:
            per_position = values[:, row].reshape(len(values), record.num_generated, -1)
            own[name] = per_position[step, position]
        else:
            own[name] = values[step, row, position]
    return own


# -- which steps keep features ---------------------------------------------------------------------

_STREAM = 17  # apart from the draws of samplers and policies
_STRATA = 256  # planned at a time


class KeptSteps:
    """Which steps of a decode keep their features: one at random in every stratum of steps.

    The number of steps is not known beforehand (a threshold policy ends when it ends), so steps
    cannot be drawn from the whole decode. Stratum ``j`` covers the steps from ``ceil(j / ratio)``
    up to the start of the next one, and a hash of (sample seed, ``j``) picks one of them. So every
    step is kept with probability about ``ratio``, time is covered evenly, and the choice depends on
    nothing but the sample's seed: neither on its batch nor on how long it decodes.
    """

    def __init__(self, seeds: Sequence[int], *, ratio: float) -> None:
        """Starts a plan.

        Args:
            seeds: one seed per row, as int64.
            ratio: fraction of steps to keep, in (0, 1].
        """
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"step_ratio: expected a number in (0, 1], got {ratio}")
        self.ratio = ratio
        self._seeds = torch.tensor(list(seeds), dtype=torch.int64)
        self._planned = 0
        self._rows: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """The rows that keep ``step``, ascending."""
        while step >= self._start(self._planned):
            self._plan()
        return self._rows.get(step, [])

    def steps(self, row: int, num_steps: int) -> list[int]:
        """The steps below ``num_steps`` that ``row`` keeps, ascending."""
        return [step for step in range(num_steps) if row in self.rows(step)]

    def _start(self, stratum: int) -> int:
        return math.ceil(stratum / self.ratio)

    def _plan(self) -> None:
        strata = torch.arange(self._planned, self._planned + _STRATA)
        starts = [self._start(j) for j in range(self._planned, self._planned + _STRATA + 1)]
        draws = uniform_noise(self._seeds, 0, strata.expand(len(self._seeds), -1), stream=_STREAM)
        first = torch.tensor(starts[:-1])
        width = torch.tensor(starts[1:]) - first
        chosen = first + (draws * width).long()
        for row, steps in enumerate(chosen.tolist()):
            for step in steps:
                self._rows.setdefault(step, []).append(row)
        self._planned += _STRATA


# -- buffers of steps ------------------------------------------------------------------------------

MAX_CHUNK_BYTES = 64 * 2**20
"""Device memory of one buffer; longer decodes spill to the host in parts of this size."""
_STEPS_AT_ONCE = 16


def canvas_buffer(
    num_rows: int, num_prompt: int, num_response: int, copies: HostCopies
) -> StepBuffer:
    """The buffer for the response canvas after every step, see :func:`finished_canvases`.

    Most policies commit a token or more per step, so that as many steps as cells are expected.
    """
    return StepBuffer(
        num_rows,
        num_response,
        torch.int32,
        copies,
        expected_steps=num_response,
        first_column=num_prompt,
        tail=num_rows * (num_response + 2 * num_prompt + 3) + 1,
    )


def finished_canvases(
    buffer: StepBuffer,
    ids: Tensor,
    start: int,
    *,
    pad_mask: Tensor | None,
    num_steps: Tensor,
    seeds: Tensor,
    prompt_editable: Tensor,
) -> tuple[list[Tensor], Tensor]:
    """Sends canvases and all small facts to the host, see :class:`CapturedDecode`.

    Args:
        buffer: a :func:`canvas_buffer` with all steps.
        ids: ``(B, L)`` canvas before step 0.
        start: first response column.
        pad_mask: ``(B, L)`` bool, ``True`` on real tokens; ``None`` when nothing is padded.
        num_steps: ``(B,)`` integer.
        seeds: ``(B,)`` int64.
        prompt_editable: ``(1,)`` bool.
    """
    prompt = ids[:, :start]
    real = torch.ones_like(prompt) if pad_mask is None else pad_mask[:, :start]
    return buffer.finish(
        ids[:, start:],
        prompt,
        real,
        num_steps.to(ids.device),
        seeds.to(ids.device).view(torch.int32),
        prompt_editable,
    )


class TopTokens:
    """The most probable tokens of every response position of every step."""

    def __init__(self, num_rows: int, num_response: int, k: int, copies: HostCopies) -> None:
        """Sets up buffers of ``(T, B, G k)``."""
        self.num_response, self.k = num_response, k
        buffer = partial(
            StepBuffer, num_rows, num_response * k, copies=copies, expected_steps=num_response
        )
        self._ids, self._log_probs = buffer(torch.int32), buffer(torch.float16)

    def append(self, rows: Tensor, logits: Tensor, columns: Tensor) -> None:
        """Stores one step.

        Args:
            rows: ``(b,)`` int64 rows of the starting batch.
            logits: ``(b, K, V)`` aligned.
            columns: ``(b, K)`` int64 response position of each; the others keep zeros.
        """
        values, ids = logits.topk(self.k, dim=-1)
        # Row by row: a float32 copy of all logits would be larger than they are.
        total = torch.stack([row.float().logsumexp(-1) for row in logits])
        log_probs = (values.float() - total[..., None]).half()
        place = columns[..., None].expand_as(ids)
        for buffer, found in ((self._ids, ids.int()), (self._log_probs, log_probs)):
            spread = found.new_zeros(len(rows), self.num_response, self.k).scatter_(1, place, found)
            buffer.append(rows, spread.flatten(1))

    def finish(self) -> dict[str, list[Tensor]]:
        """The signals, on their way to the host."""
        parts = (self._ids.finish()[0], self._log_probs.finish()[0])
        return dict(zip(TOP_SIGNALS, parts, strict=True))


class HostCopies:
    """Tensors on their way from one device to the host."""

    def __init__(self, device: torch.device) -> None:
        """Prepares copies.

        Args:
            device: where the tensors are. On the CPU nothing is copied.
        """
        self.device = device
        self._arrival: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> Tensor:
        """Starts to copy a tensor.

        Args:
            tensor: on the device; must not be written any more.

        Returns:
            The same values on the host, valid after :meth:`wait`.
        """
        if self.device.type == "cpu":
            return tensor
        if self.device.type != "cuda":
            return tensor.cpu()
        side, now = _side_stream(self.device), torch.cuda.current_stream(self.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        side.wait_event(now.record_event())
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
        # The allocator must not give this memory to the decode before the copy has read it.
        tensor.record_stream(side)
        self._arrival = side.record_event()
        return host

    def wait(self) -> None:
        """Waits until every tensor has arrived; may be called from another thread."""
        if self._arrival is not None:
            self._arrival.synchronize()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all copies from a device."""
    return torch.cuda.Stream(device)


class StepBuffer:
    """Values ``(T, B, G)`` of a decode whose number of steps is not known beforehand.

    Rows that have left the batch hold no values: what stands there is arbitrary. A step costs its
    caller one append to a list. The tensors of some steps are then copied into the buffer by one
    operation: launching an operation right after a forward, with cold caches, takes far longer than
    the copy itself. So a tensor that was handed in must not be written afterwards, which holds for
    whatever the decode loop shows its observers.

    Nothing here waits for the device while a decode runs. On CUDA a full buffer travels to pinned
    memory on a stream of its own, beside the decode; on the CPU the buffer itself is handed over.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        copies: HostCopies,
        *,
        expected_steps: int,
        first_column: int = 0,
        tail: int = 0,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        """Sets up a buffer; memory is taken at the first step.

        Args:
            num_rows: B, rows of the starting batch.
            num_columns: G.
            dtype: values are converted to it.
            copies: brings full parts to the host.
            expected_steps: most likely T; more steps take more parts.
            first_column: values of earlier columns are left out.
            tail: values that :meth:`finish` will append.
            max_chunk_bytes: largest part, unless a single step is larger.
        """
        self.num_rows, self.num_columns, self.dtype = num_rows, num_columns, dtype
        self.length = 0
        """Steps so far."""
        self._copies = copies
        self._first_column = first_column
        self._tail = tail
        step_bytes = max(num_rows * num_columns * dtype.itemsize, 1)
        self._chunk_steps = max(1, min(expected_steps, max_chunk_bytes // step_bytes))
        self._flat: Tensor | None = None
        self._steps: Tensor | None = None
        self._at = 0
        self._parts: list[Tensor] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._room = min(_STEPS_AT_ONCE, self._chunk_steps)

    def append(self, rows: Tensor, values: Tensor) -> None:
        """Stores one step.

        Args:
            rows: ``(b,)`` int64, ascending: rows of the starting batch that are still there. Equal
                rows should be the same tensor.
            values: ``(b, first_column + G)``; must not be written any more.
        """
        self._waiting.append((rows, values))
        self.length += 1
        if len(self._waiting) == self._room:
            self._settle()

    def finish(self, *tail: Tensor) -> tuple[list[Tensor], Tensor]:
        """Ends the buffer and sends its rest to the host, as one piece with the tail.

        Args:
            tail: tensors to send along, as many values as announced.

        Returns:
            Parts ``(t, B, G)`` whose lengths sum to T, and the tail's values in one row; on the
            host, valid once the copies have arrived.
        """
        self._settle()
        if self._flat is None:
            self._begin(self._copies.device)
        assert self._flat is not None
        used = self._at * self.num_rows * self.num_columns
        end = used
        for tensor in tail:
            first, end = end, end + tensor.numel()
            self._flat[first:end].view(tensor.shape).copy_(tensor)
        assert end - used == self._tail, "the tail is not as long as announced"
        host = self._copies.add(self._flat[:end])
        self._parts.append(self._part(host[:used]))
        self._flat = self._steps = None
        return self._parts, host[used:]

    def _settle(self) -> None:
        """Copies the waiting steps into the buffer, which has room for them."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if self._steps is None or self._at == self._chunk_steps:
            self._begin(waiting[0][1].device)
        assert self._steps is not None
        for _, group in groupby(waiting, key=lambda step: id(step[0])):
            same_rows = list(group)
            rows, values = same_rows[0][0], [value for _, value in same_rows]
            target = self._steps[self._at : self._at + len(values)]
            stacked = torch.stack(values)[:, :, self._first_column :]
            if stacked.shape[1] == self.num_rows:  # rows only ever leave: all are here, in order
                target.copy_(stacked)
            else:
                target.index_copy_(1, rows, stacked.to(self.dtype))
            self._at += len(values)
        self._room = min(_STEPS_AT_ONCE, self._chunk_steps - self._at) or min(
            _STEPS_AT_ONCE, self._chunk_steps
        )

    def _begin(self, device: torch.device) -> None:
        size = self.num_rows * self.num_columns
        if self._flat is not None:
            self._parts.append(self._part(self._copies.add(self._flat[: self._at * size])))
        length = self._chunk_steps * size
        self._flat = torch.empty(length + self._tail, dtype=self.dtype, device=device)
        self._steps = self._part(self._flat[:length])
        self._at = 0

    def _part(self, flat: Tensor) -> Tensor:
        if self.num_rows * self.num_columns == 0:
            return flat.view(0, self.num_rows, self.num_columns)
        return flat.view(-1, self.num_rows, self.num_columns)
