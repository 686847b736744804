"""Capture: an observer that turns a decode into trajectories.

Per step it copies the response canvas into a buffer on the device, and nothing else at level
``tokens``: no host copy, no synchronisation. Commit steps and overwritten writes are derived from
that buffer when the decode has ended, so every policy is covered without its help, re-masking and
edits included.

Levels: ``tokens`` (the record alone), ``signals`` (also probability, entropy and proposal at every
masked position of every step, and probability and selection margin of every write), ``features``
(the record, and features and proposals at kept steps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dlm.decoding import DecodeResult, DecodeState, StepRecord
from lit_dlm.trajectories.features import Layout, Scheme, StepFeatures
from lit_dlm.trajectories.kept_steps import KeptSteps
from lit_dlm.trajectories.record import Trajectory

Level = Literal["tokens", "signals", "features"]

_CHUNK = 64  # steps per buffer


@dataclass(frozen=True, kw_only=True)
class FeatureCapture:
    """What to keep at level ``features``."""

    function: Callable[..., Tensor]
    """Called as ``function(hidden, prob, entropy=..., margin=...)`` with ``(b, R, H, D)`` hidden
    snapshots and ``(b, R)`` scores; returns ``(b, R, F)``. Must treat rows independently."""
    hidden_layers: tuple[int, ...]
    """Snapshots to ask of the backbone."""
    groups: tuple[int, ...]
    """Sizes of the feature groups, which sum to F."""
    projector_digest: str
    """Digest of the function, stored beside the features."""
    step_ratio: float = 0.1
    """Fraction of steps that keep features."""
    scheme: Scheme = "int8"
    """How features are stored."""
    layout: Layout = "generation"
    """Response rows only, or prompt rows too."""
    scores: frozenset[str] = frozenset({"entropy", "margin"})
    """Scores besides the probability that the function needs."""


@dataclass
class _Kept:
    """Features of one step, for the rows that keep it."""

    step: int
    rows: list[int]
    features: Tensor  # (n, R, F) float32
    proposals: Tensor  # (n, R) int32


@dataclass
class _Signals:
    """Per-step and per-write scores on the device."""

    prob: _Buffer
    entropy: _Buffer
    proposal: _Buffer
    commit_prob: Tensor  # (B, G) float16
    commit_margin: Tensor  # (B, G) float16


class _Buffer:
    """``(T, B, G)`` on the device, grown in chunks. Rows that left the batch hold no values."""

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
        self.shape = (_CHUNK, num_rows, num_columns)
        self.dtype = dtype
        self.chunks: list[Tensor] = []
        self.length = 0

    def append(self, rows: Tensor, values: Tensor) -> None:
        at = self.length % _CHUNK
        if at == 0:
            self.chunks.append(torch.empty(self.shape, dtype=self.dtype, device=values.device))
        if len(values) == self.shape[1]:  # rows only ever leave, so all are here, in order
            self.chunks[-1][at].copy_(values)
        else:
            self.chunks[-1][at].index_copy_(0, rows, values.to(self.dtype))
        self.length += 1

    def stacked(self) -> Tensor:
        return torch.cat(self.chunks)[: self.length]


@dataclass
class _Finished:
    """One finished decode on the host."""

    prompts: list[NDArray[np.int32]]
    tokens: NDArray[np.int32]  # (B, G)
    commit_step: NDArray[np.int32]  # (B, G)
    given: NDArray[np.bool_]  # (B, G)
    events: list[NDArray[np.int32]]  # per row (K, 3)
    num_steps: list[int]
    seeds: list[int]
    status: list[str]
    signals: dict[str, NDArray[Any]] = field(default_factory=dict)
    kept: list[_Kept] = field(default_factory=list)


class TrajectoryCapture:
    """Observer of one decode at a time; use :meth:`trajectories` after it."""

    def __init__(
        self, *, vocab_size: int, level: Level = "tokens", features: FeatureCapture | None = None
    ) -> None:
        """Sets what is captured.

        Args:
            vocab_size: bound of the token ids, stored with every record.
            level: how much to keep.
            features: needed at level ``features``, and only there.

        Raises:
            ValueError: If the level is unknown or does not fit ``features``.
        """
        if level not in ("tokens", "signals", "features"):
            raise ValueError(
                f"capture level: expected 'tokens', 'signals' or 'features', got {level!r}"
            )
        if (level == "features") != (features is not None):
            raise ValueError(f"capture level {level!r} and features={features} do not fit")
        self.vocab_size = vocab_size
        self.level = level
        self.features = features
        self.hidden_layers: tuple[int, ...] = features.hidden_layers if features else ()
        needs = {"signals": {"region", "entropy"}, "features": {"region", "hidden"}}
        self.requires: frozenset[str] = frozenset(needs.get(level, ()))
        if features:
            self.requires |= features.scores
        self._start: DecodeState | None = None
        self._finished: _Finished | None = None

    def on_start(self, state: DecodeState) -> None:
        """Allocates the buffers."""
        self._start, self._finished = state, None
        size = len(state.rows), state.ids.shape[1] - state.start
        self._canvas = _Buffer(*size, torch.int32)
        self._signals: _Signals | None = None
        if self.level == "signals":
            unknown = torch.full(size, torch.nan, dtype=torch.float16, device=state.ids.device)
            self._signals = _Signals(
                prob=_Buffer(*size, torch.float16),
                entropy=_Buffer(*size, torch.float16),
                proposal=_Buffer(*size, torch.int32),
                commit_prob=unknown,
                commit_margin=unknown.clone(),
            )
        self._kept: list[_Kept] = []
        if self.features is not None:
            self._plan = KeptSteps(state.seeds.tolist(), ratio=self.features.step_ratio)

    def on_step(self, record: StepRecord) -> None:
        """Copies what the level keeps; never waits for the device."""
        state = record.state
        self._canvas.append(state.rows, record.new_ids[:, state.start :])
        if self._signals is not None:
            self._add_signals(self._signals, record)
        if self.features is not None:
            rows = self._plan.rows(state.step)
            if rows:
                self._kept.append(self._features_of(self.features, record, rows))

    def on_end(self, result: DecodeResult) -> None:
        """Derives the records' arrays and copies them to the host."""
        start = self._start
        assert start is not None, "on_end without on_start"
        response = slice(start.start, None)
        if bool(start.editable[:, : start.start].any()):
            raise ValueError(
                f"capture: editable columns must not lie before column {start.start}, where the "
                "response begins"
            )
        num_steps = result.num_steps.to(start.ids.device)
        first = start.ids[:, response].int()
        tokens, commit_step, writes = _derive(first, self._canvas, num_steps)
        ids, real = start.ids.cpu(), None if start.pad_mask is None else start.pad_mask.cpu()
        prompts = [
            (row[: start.start] if real is None else row[: start.start][real[i, : start.start]])
            for i, row in enumerate(ids)
        ]
        events = writes.cpu().numpy().astype(np.int32)
        self._finished = _Finished(
            prompts=[prompt.numpy().astype(np.int32) for prompt in prompts],
            tokens=tokens.cpu().numpy(),
            commit_step=commit_step.cpu().numpy(),
            given=(first != start.mask_id).cpu().numpy(),
            events=[events[events[:, 0] == row, 1:] for row in range(len(ids))],
            num_steps=num_steps.tolist(),
            seeds=[seed % 2**64 for seed in result.seeds.tolist()],
            status=list(result.status),
            signals=self._host_signals(),
            kept=self._kept,
        )
        self._mask_id = start.mask_id
        self._start, self._signals, self._kept = None, None, []

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
        done = self._finished
        if done is None:
            raise ValueError("capture: no decode has ended yet")
        num_rows = len(done.prompts)
        if len(uids) != num_rows or (metas is not None and len(metas) != num_rows):
            raise ValueError(
                f"capture: expected {num_rows} uids (and metas), got {len(uids)} and "
                f"{'none' if metas is None else len(metas)}"
            )
        features = self._host_features(done)
        return [
            Trajectory(
                uid=uid,
                prompt_ids=done.prompts[row],
                tokens=done.tokens[row],
                commit_step=done.commit_step[row],
                num_steps=done.num_steps[row],
                mask_id=self._mask_id,
                vocab_size=self.vocab_size,
                seed=done.seeds[row],
                status=done.status[row],  # type: ignore[arg-type]  # the loop's are ours
                given=done.given[row],
                superseded=done.events[row],
                signals=_signals_of(done, row, self._mask_id),
                features=features[row],
                meta=dict(metas[row]) if metas is not None else {},
            )
            for row, uid in enumerate(uids)
        ]

    # -- signals -------------------------------------------------------------------------------

    @staticmethod
    def _add_signals(signals: _Signals, record: StepRecord) -> None:
        state, proposal = record.state, record.proposal
        rows, response = state.rows, slice(state.start, None)
        assert proposal.entropy is not None
        signals.prob.append(rows, proposal.prob[:, response])
        signals.entropy.append(rows, proposal.entropy[:, response])
        signals.proposal.append(rows, proposal.ids[:, response])
        passed_over = record.candidates & ~record.commit
        best = record.scores.masked_fill(~passed_over, -torch.inf).amax(1, keepdim=True)
        written = (record.new_ids != state.ids)[:, response]
        commit = record.commit[:, response]
        for target, values in (
            (signals.commit_prob, proposal.prob[:, response]),
            # Without an alternative the gap is infinite: nothing else could have been chosen.
            (signals.commit_margin, (record.scores - best)[:, response]),
        ):
            # A write that is no commit (an end-of-text fill) was not scored.
            new = torch.where(commit, values, torch.nan).to(target.dtype)
            target.index_copy_(0, rows, torch.where(written, new, target[rows]))

    def _host_signals(self) -> dict[str, NDArray[Any]]:
        signals = self._signals
        if signals is None or not signals.prob.chunks:
            return {}
        return {
            "commit_prob": signals.commit_prob.cpu().numpy(),
            "commit_margin": signals.commit_margin.cpu().numpy(),
            "step_prob": signals.prob.stacked().cpu().numpy(),
            "step_entropy": signals.entropy.stacked().cpu().numpy(),
            "step_proposal": signals.proposal.stacked().cpu().numpy(),
        }

    # -- features ------------------------------------------------------------------------------

    @staticmethod
    def _features_of(settings: FeatureCapture, record: StepRecord, rows: list[int]) -> _Kept:
        """Features of the planned rows.

        Rows that have left the batch get another row's values, which are dropped at the end: asking
        which have left would wait for the device.
        """
        state, proposal = record.state, record.proposal
        device = state.ids.device
        wanted = torch.tensor(rows, device=device)
        slots = (state.rows[None, :] == wanted[:, None]).int().argmax(1)
        columns = slice(0 if settings.layout == "all" else state.start, None)
        assert proposal.hidden is not None
        scores = {
            name: getattr(proposal, name)[slots, columns]
            for name in ("entropy", "margin")
            if name in settings.scores
        }
        features = settings.function(
            proposal.hidden[slots, columns], proposal.prob[slots, columns], **scores
        )
        # Columns that were not looked at (the prompt) propose what stands there.
        looked_at = torch.arange(state.ids.shape[1], device=device) >= state.start
        proposals = torch.where(looked_at, proposal.ids, state.ids)[slots, columns]
        return _Kept(state.step, rows, features.float(), proposals.int())

    def _host_features(self, done: _Finished) -> list[StepFeatures | None]:
        settings = self.features
        if settings is None:
            return [None] * len(done.prompts)
        steps: list[list[int]] = [[] for _ in done.prompts]
        features: list[list[Tensor]] = [[] for _ in done.prompts]
        proposals: list[list[Tensor]] = [[] for _ in done.prompts]
        for kept in done.kept:
            host_features, host_proposals = kept.features.cpu(), kept.proposals.cpu()
            for i, row in enumerate(kept.rows):
                if kept.step < done.num_steps[row]:
                    # Left padding goes; the response has the same columns in every row.
                    length = done.tokens.shape[1]
                    if settings.layout == "all":
                        length += len(done.prompts[row])
                    steps[row].append(kept.step)
                    features[row].append(host_features[i, -length:])
                    proposals[row].append(host_proposals[i, -length:])
        return [
            StepFeatures.quantize(
                torch.stack(features[row]).numpy(),
                kept_steps=np.array(steps[row]),
                proposals=torch.stack(proposals[row]).numpy(),
                groups=settings.groups,
                scheme=settings.scheme,
                layout=settings.layout,
                projector_digest=settings.projector_digest,
            )
            if steps[row]
            else None
            for row in range(len(done.prompts))
        ]


def _derive(first: Tensor, canvas: _Buffer, num_steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Final tokens, commit steps and overwritten writes of a history.

    Args:
        first: ``(B, G)`` int32 response canvas before step 0.
        canvas: the canvas after every step; rows count only below their number of steps.
        num_steps: ``(B,)`` int64.

    Returns:
        ``(B, G)`` int32 tokens, ``(B, G)`` int32 commit steps (-1: none), and ``(K, 4)`` int64 rows
        (row, step, position, token) sorted by (step, row, position).
    """
    if canvas.length == 0:
        empty = torch.empty((0, 4), dtype=torch.int64, device=first.device)
        return first, torch.full_like(first, -1), empty
    after = canvas.stacked()
    steps = torch.arange(len(after), dtype=torch.int32, device=first.device)[:, None, None]
    changed = torch.empty(after.shape, dtype=torch.bool, device=first.device)
    torch.ne(after[0], first, out=changed[0])
    torch.ne(after[1:], after[:-1], out=changed[1:])
    changed &= steps < num_steps[:, None]
    commit_step = torch.where(changed, steps, -1).amax(0)
    last = (num_steps - 1).clamp_min(0)
    tokens = after[last, torch.arange(len(first), device=first.device)]
    tokens = torch.where((num_steps > 0)[:, None], tokens, first)
    if int(changed.sum()) == int((commit_step >= 0).sum()):  # each position was written once
        return tokens, commit_step, torch.empty((0, 4), dtype=torch.int64, device=first.device)
    early = (changed & (steps < commit_step)).nonzero()
    writes = torch.cat([early[:, [1, 0, 2]], after[tuple(early.T)][:, None].long()], dim=1)
    return tokens, commit_step, writes


def _signals_of(done: _Finished, row: int, mask_id: int) -> dict[str, NDArray[Any]]:
    """The signals of one record, the per-step ones in the row order of ``masked_rows``."""
    if not done.signals:
        return {}
    commit = {name: done.signals[name][row].copy() for name in ("commit_prob", "commit_margin")}
    probe = Trajectory(
        uid="probe",
        prompt_ids=done.prompts[row],
        tokens=done.tokens[row],
        commit_step=done.commit_step[row],
        num_steps=done.num_steps[row],
        mask_id=mask_id,
        vocab_size=1,
        given=done.given[row],
        superseded=done.events[row],
    )
    step, position = probe.masked_rows().T
    return commit | {
        name: done.signals[name][step, row, position]
        for name in ("step_prob", "step_entropy", "step_proposal")
    }
