"""Capture: an observer that turns a decode into trajectories.

Every step's response canvas goes into a buffer on the device, and nothing else at level ``tokens``:
no host copy, no synchronisation. When the decode has ended, one copy brings the buffer
to the host; commit steps and overwritten writes are derived there (see
:mod:`lit_dlm.trajectories.captured`), so every policy is covered without its help, re-masking and
edits included.

Levels: ``tokens`` (the record alone), ``signals`` (also probability, entropy and proposal at every
masked position of every step, and probability and selection margin of every write), ``features``
(the record, and features and proposals at kept steps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dlm.decoding import DecodeResult, DecodeState, StepRecord
from lit_dlm.trajectories.captured import CapturedDecode, FeatureForm, KeptStep
from lit_dlm.trajectories.kept_steps import KeptSteps
from lit_dlm.trajectories.record import FeatureLayout, FeatureScheme, Trajectory
from lit_dlm.trajectories.step_buffer import HostCopies, StepBuffer

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
        needs = {"signals": {"region", "entropy"}, "features": {"hidden"}}
        self.requires: frozenset[str] = frozenset(needs.get(level, ()))
        self._start: DecodeState | None = None
        self._captured: CapturedDecode | None = None

    def on_start(self, state: DecodeState) -> None:
        """Prepares the buffers."""
        self._start, self._captured = state, None
        device = state.ids.device
        B, (P, G) = len(state.rows), (state.start, state.ids.shape[1] - state.start)
        self._copies = HostCopies(device)
        # Most policies commit a token or more per step, so that G steps are enough.
        buffer = partial(StepBuffer, B, G, copies=self._copies, expected_steps=G, first_column=P)
        self._canvas = buffer(torch.int32, tail=B * (G + 2 * P + 3) + 1)
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

    def on_step(self, record: StepRecord) -> None:
        """Copies what the level keeps; never waits for the device."""
        state = record.state
        self._canvas.append(state.rows, record.new_ids)
        if self._signals is not None:
            self._add_signals(self._signals, record)
        if self.features is not None:
            rows = self._plan.rows(state.step)
            if rows:
                self._kept.append(self._features_of(self.features, record, rows))
            self.requires = self._required(self.features, state.step + 1)

    def on_end(self, result: DecodeResult) -> None:
        """Sends the buffers to the host, the canvases and all small facts as one piece."""
        start, settings = self._start, self.features
        assert start is not None, "on_end without on_start"
        (B, L), P = start.ids.shape, start.start
        prompt = start.ids[:, :P]
        real = torch.ones_like(prompt) if start.pad_mask is None else start.pad_mask[:, :P]
        device = start.ids.device
        canvases, facts = self._canvas.finish(
            start.ids[:, P:],
            prompt,
            real,
            result.num_steps.to(device),
            result.seeds.to(device).view(torch.int32),
            start.editable[:, :P].any()[None],
        )
        self._captured = CapturedDecode(
            copies=self._copies,
            canvases=canvases,
            facts=facts,
            shape=(B, P, L - P),
            status=tuple(result.status),
            mask_id=start.mask_id,
            vocab_size=self.vocab_size,
            signals=self._sent_signals(),
            kept=self._kept,
            form=None
            if settings is None
            else FeatureForm(
                groups=settings.groups,
                projector_digest=settings.projector_digest,
                scheme=settings.scheme,
                layout=settings.layout,
            ),
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
            return frozenset({"hidden"})
        return frozenset({"hidden", "region", "raw_prob", *(f"raw_{s}" for s in settings.scores)})

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
