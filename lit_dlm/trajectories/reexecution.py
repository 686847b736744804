"""Verification by re-execution: teacher-forced (V3) and free-running (V4).

Teacher-forced, every recorded canvas is fed to the model again, the step is decided by the very
function that the decode loop calls, and the result is compared with the next recorded canvas. One
difference does not lead to others. Free-running, the prompt is decoded again from its seed, and
everything after the first difference follows from it.

Records are executed in batches, in their stored order. With the batch size of the run, a batch has
the rows and the padding that it had when it was recorded, so that even the last bits can agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone, Denoised
from lit_dlm.decoding.caches import NoCache
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.engine import Decision, decide, enter_block, initial_state, needs
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import (
    Canvas,
    DecodeResult,
    DecodeState,
    Proposal,
    StepRecord,
    prompt_canvas,
)
from lit_dlm.decoding.windows import default_window, first_column
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.replay import BatchedReplay
from lit_dlm.trajectories.step_comparison import compare_step
from lit_dlm.trajectories.verdict import (
    TOLERANCE,
    RecordTally,
    RecordVerdict,
    describe_difference,
    tally_step,
)
from lit_dlm.trajectories.withheld import WithheldTrajectory


def teacher_forced(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    tolerance: float = TOLERANCE,
    steps: frozenset[int] | None = None,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
    on_step: Callable[[int], None] | None = None,
) -> list[RecordVerdict]:
    """Decides recorded steps again (V3).

    Args:
        backbone: the denoiser.
        decoder: the plugs that the records were made with.
        records: records of one batch: one response length, one mask id.
        tolerance: margin below which a differing decision is explained.
        steps: only these steps; all by default.
        captured: what the run's capture asked of each step, such as ``region``: more columns in
            one product can change its last bits.
        device: where to compute.
        on_step: called with the number of records in each executed step.

    Returns:
        One verdict per record.

    Raises:
        ValueError: the records cannot be executed with this backbone.
    """
    decoder.check(backbone)
    if steps is not None and not isinstance(decoder.cache, NoCache):
        raise ValueError(
            f"steps: with {type(decoder.cache).__name__} a step depends on the ones before it, so "
            "all have to be executed; leave the selection of steps out"
        )
    window = decoder.window or default_window(backbone.spec)
    sampler = _WatchedSampler(decoder.sampler)
    requires, hidden_layers = needs(decoder.policy)
    replay = BatchedReplay(records, device=device)
    margins = _stored_margins(records, device)
    tallies = [RecordTally(record) for record in records]
    with torch.no_grad():
        canvas = decoder.prepared(canvas_of(records, backbone, device=device), backbone)
        state = initial_state(backbone, canvas)
        session = decoder.cache.start(backbone, state, window=window, hidden_layers=hidden_layers)
        while True:
            running = replay.num_steps[state.rows] > state.step
            full = running & ~state.masked.any(1)
            for row in state.rows[full].tolist():
                tallies[row].fail(state.step, "the canvas was full before this recorded step")
            keep = (running & ~full).nonzero()[:, 0]
            if not len(keep):
                break
            if len(keep) < len(state.rows):
                state = state.take(keep)
                if session is not None:
                    session.take(keep.tolist(), keep)
            state = replace(state, frontier=tuple(first_column(state.masked).tolist()))
            after = state.ids.clone()
            after[:, state.start :] = replay.states_at(state.step + 1)[state.rows].long()
            if steps is None or state.step in steps:
                decision = decide(
                    backbone,
                    state,
                    window=window,
                    quota=decoder.quota,
                    sampler=sampler,
                    policy=decoder.policy,
                    settings=decoder.settings,
                    requires=requires | captured(state.step),
                    hidden_layers=hidden_layers,
                    session=session,
                )
                state = decision.record.state
                stored = None if margins is None else margins[state.rows]
                compared = compare_step(decision, after, sampler.last, decoder, stored)
                tally_step(tallies, decision, after, compared.margin, decoder)
                if on_step is not None:
                    on_step(len(state.rows))
            else:
                state = enter_block(state, window.view(state))
            state = _advanced(state, after)
    return [tally.verdict(tolerance, independent=True) for tally in tallies]


def free_running(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    tolerance: float = TOLERANCE,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
    on_step: Callable[[int], None] | None = None,
) -> list[RecordVerdict]:
    """Decodes the prompts again from their seeds (V4).

    A record is ``explained`` when the first step that differs was a near tie; later differences
    follow from that one. Arguments and errors are those of :func:`teacher_forced`.

    Returns:
        One verdict per record.
    """
    watched = copy.copy(decoder)
    watched.sampler = _WatchedSampler(decoder.sampler)
    canvas = canvas_of(records, backbone, device=device)
    observer = _FirstDifference(records, watched, captured, device=device, on_step=on_step)
    result = watched(backbone, canvas, [observer])
    response = result.ids[:, result.start :].cpu().numpy()
    for row, tally in enumerate(observer.tallies):
        record = tally.record
        tally.num_tokens = max(record.num_generated, 1)
        tally.num_equal = int((response[row] == record.tokens).sum())
        num_steps, status = int(result.num_steps[row]), result.status[row]
        if (num_steps, status) != (record.num_steps, record.status) and tally.first_step is None:
            tally.fail(
                min(num_steps, record.num_steps),
                f"{record.num_steps} steps, {record.status} recorded; "
                f"{num_steps} steps, {status} now",
            )
    return [tally.verdict(tolerance, independent=False) for tally in observer.tallies]


def canvas_of(
    records: Sequence[Trajectory], backbone: Backbone, *, device: torch.device | str = "cpu"
) -> Canvas:
    """The canvas that a batch of records was decoded from.

    Raises:
        ValueError: a prompt is withheld or empty, response lengths differ, or the mask id or the
            vocabulary does not fit the backbone.
    """
    lengths = sorted({record.num_generated for record in records})
    if len(lengths) != 1:
        raise ValueError(f"re-execution: expected one response length in a batch, got {lengths}")
    for record in records:
        where = f"trajectory {record.uid!r}"
        if isinstance(record, WithheldTrajectory):
            raise ValueError(f"{where}: its prompt is withheld, so it cannot be executed again")
        if record.mask_id != backbone.spec.mask_id:
            raise ValueError(
                f"{where}: recorded with mask id {record.mask_id}, "
                f"the backbone has {backbone.spec.mask_id}"
            )
        if record.vocab_size != backbone.vocab_size:
            raise ValueError(
                f"{where}: recorded with a vocabulary of {record.vocab_size}, "
                f"the backbone has {backbone.vocab_size}"
            )
    canvas = prompt_canvas(
        [record.prompt_ids.tolist() for record in records],
        response_length=lengths[0],
        spec=backbone.spec,
        seeds=[signed_seed(record.seed) for record in records],
        device=device,
    )
    if all(record.given is None for record in records):
        return canvas
    ids, editable = canvas.ids.clone(), canvas.editable.clone()
    for row, record in enumerate(records):
        if record.given is not None:
            given = torch.from_numpy(record.given).to(device)
            tokens = torch.from_numpy(record.tokens).long().to(device)
            ids[row, canvas.start :][given] = tokens[given]
            editable[row, canvas.start :] = ~given
    return replace(canvas, ids=ids, editable=editable)


class _WatchedSampler(Sampler):
    """A sampler that keeps the forward that it was shown, for the margins."""

    last: Denoised

    def __init__(self, inner: Sampler) -> None:
        self.__dict__.update(vars(inner))

    def propose(self, state: DecodeState, denoised: Denoised, requires: frozenset[str]) -> Proposal:
        """Proposes as the inner sampler does."""
        self.last = denoised
        return super().propose(state, denoised, requires)


class _FirstDifference:
    """Observer that compares a decode with records until each first differs."""

    def __init__(
        self,
        records: Sequence[Trajectory],
        decoder: Decoder,
        captured: Callable[[int], frozenset[str]],
        *,
        device: torch.device | str,
        on_step: Callable[[int], None] | None,
    ) -> None:
        self.requires = captured(0)
        self._captured = captured
        self.tallies = [RecordTally(record) for record in records]
        self._replay = BatchedReplay(records, device=device)
        self._margins = _stored_margins(records, device)
        self._decoder = decoder
        self._on_step = on_step

    def on_start(self, state: DecodeState) -> None:
        """Nothing to prepare."""

    def on_step(self, record: StepRecord) -> None:
        """Compares the canvases; margins only for rows that never differed before."""
        state = record.state
        self.requires = self._captured(state.step + 1)
        after = state.ids.clone()
        after[:, state.start :] = self._replay.states_at(state.step + 1)[state.rows].long()
        stalled = torch.zeros_like(state.rows, dtype=torch.bool)
        stored = None if self._margins is None else self._margins[state.rows]
        sampler = self._decoder.sampler
        assert isinstance(sampler, _WatchedSampler)
        decision = Decision(record, stalled, stalled)
        compared = compare_step(decision, after, sampler.last, self._decoder, stored)
        differs, margins = compared.differs.tolist(), compared.margin.tolist()
        for i, row in enumerate(state.rows.tolist()):
            tally = self.tallies[row]
            tally.num_checked += 1
            if not differs[i]:
                tally.num_agreeing += 1
            elif tally.first_step is None:
                different = record.new_ids[i] != after[i]
                reason = describe_difference(different, after[i], record, i)
                tally.differ(state.step, margins[i], reason)
            else:  # follows from the first one
                tally.differing_steps.append(state.step)
        if self._on_step is not None:
            self._on_step(len(state.rows))

    def on_end(self, result: DecodeResult) -> None:
        """Nothing to finish."""


def _advanced(state: DecodeState, ids: Tensor) -> DecodeState:
    """The state before the next step, with the recorded canvas."""
    return replace(
        state,
        ids=ids,
        masked=state.editable & (ids == state.mask_id),
        step=state.step + 1,
        block_step=state.block_step + 1,
        written=ids != state.ids,
    )


def _stored_margins(records: Sequence[Trajectory], device: torch.device | str) -> Tensor | None:
    """``(B, P + G)`` stored selection margins, not a number outside the response."""
    if not any("commit_margin" in record.signals for record in records):
        return None
    width = max(record.num_prompt for record in records)
    margins = np.full((len(records), width + records[0].num_generated), np.nan, dtype=np.float32)
    for row, record in enumerate(records):
        if "commit_margin" in record.signals:
            margins[row, width:] = record.signals["commit_margin"]
    return torch.from_numpy(margins).to(device)


def signed_seed(seed: int) -> int:
    """A stored seed as the signed 64-bit integer that the loop works with."""
    return seed - 2**64 if seed >= 2**63 else seed
