"""Counts what re-execution finds for one record, and sums it up in a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.engine import Decision
from lit_dlm.decoding.state import StepRecord
from lit_dlm.trajectories.record import Trajectory

Outcome = Literal["exact", "explained", "failed"]

TOLERANCE = 0.01
"""Margin below which a differing decision counts as a near tie."""

MANY_TIES = 4
"""From so many differing steps on, they must not be more than half of the checked ones, if a record
is to count as explained: a model whose distributions are flat finds near ties everywhere."""

_STATUS_OPEN = "step_limit"


@dataclass(frozen=True, kw_only=True)
class RecordVerdict:
    """What re-execution says of one record."""

    uid: str
    """The record."""
    outcome: Outcome
    """``exact``: every decision is the recorded one; ``explained``: every differing decision was a
    near tie, and near ties are the exception (see :data:`MANY_TIES`); ``failed``."""
    num_checked: int
    """Steps that were compared."""
    num_agreeing: int
    """Steps after which the canvas is the recorded one."""
    token_agreement: float
    """Share of equal tokens: of those that the checked steps wrote (teacher-forced), or of the
    final response (free-running)."""
    first_step: int | None
    """First step that differs, or ``None``."""
    differing_steps: tuple[int, ...]
    """All checked steps that differ; the others agree."""
    margin: float
    """Largest margin among the differing decisions; infinite when no near tie explains one."""
    reason: str
    """What differs, in words; empty when nothing does."""


class RecordTally:
    """Counts of one record while it is executed."""

    def __init__(self, record: Trajectory) -> None:
        self.record = record
        self.num_checked = 0
        self.num_agreeing = 0
        self.num_tokens = 0
        self.num_equal = 0
        self.first_step: int | None = None
        self.differing_steps: list[int] = []
        self.margin = 0.0
        self.reason = ""

    def differ(self, step: int, margin: float, reason: str) -> None:
        """A step decided otherwise, by a margin."""
        self.differing_steps.append(step)
        if self.first_step is None:
            self.first_step, self.reason = step, f"step {step}: {reason}"
        self.margin = max(self.margin, margin)

    def fail(self, step: int, reason: str) -> None:
        """Something that no near tie can explain."""
        self.differing_steps.append(step)
        if self.margin < float("inf"):  # the reason that fails it is the one to tell
            self.reason = f"step {step}: {reason}"
        self.first_step = step if self.first_step is None else self.first_step
        self.margin = float("inf")

    def verdict(self, tolerance: float, *, independent: bool) -> RecordVerdict:
        """The sum of it.

        Args:
            tolerance: margin below which a differing decision is explained.
            independent: whether the differing steps were decided independently; otherwise all but
                the first may follow from it, and their number says nothing.
        """
        outcome: Outcome = "exact"
        if self.first_step is not None:
            num = len(self.differing_steps)
            too_many = independent and num >= MANY_TIES and 2 * num > self.num_checked
            outcome = "explained" if self.margin < tolerance and not too_many else "failed"
        return RecordVerdict(
            uid=self.record.uid,
            outcome=outcome,
            num_checked=self.num_checked,
            num_agreeing=self.num_agreeing,
            token_agreement=self.num_equal / self.num_tokens if self.num_tokens else 1.0,
            first_step=self.first_step,
            differing_steps=tuple(self.differing_steps),
            margin=self.margin,
            reason=self.reason,
        )


def tally_step(
    tallies: Sequence[RecordTally],
    decision: Decision,
    after: Tensor,
    margin: Tensor,
    decoder: Decoder,
) -> None:
    """Adds a teacher-forced step to the tallies of its rows."""
    step = decision.record
    state = step.state
    wrote = after != state.ids
    num_tokens = wrote.sum(1).tolist()
    num_equal = (wrote & (step.new_ids == after)).sum(1).tolist()
    differing = step.new_ids != after
    is_open = (state.editable & (step.new_ids == state.mask_id)).any(1)
    status = [
        "complete" if not left else "eos" if ended else _STATUS_OPEN
        for left, ended in zip(is_open.tolist(), decision.ended.tolist(), strict=True)
    ]
    for i, row in enumerate(state.rows.tolist()):
        tally = tallies[row]
        tally.num_checked += 1
        tally.num_tokens += num_tokens[i]
        tally.num_equal += num_equal[i]
        if bool(differing[i].any()):
            reason = describe_difference(differing[i], after[i], step, i)
            tally.differ(state.step, float(margin[i]), reason)
            continue
        wrong_end = _wrong_end(tally.record, state.step, status[i], decoder)
        if wrong_end:
            tally.fail(state.step, wrong_end)
        else:
            tally.num_agreeing += 1


def _wrong_end(record: Trajectory, step: int, status: str, decoder: Decoder) -> str:
    """Why a record may not go on, or end, after an agreeing step; empty when it may."""
    if step < record.num_steps - 1:
        return "" if status == _STATUS_OPEN else f"the record goes on, the loop ends ({status})"
    if record.status == "aborted":
        return ""
    if status != record.status:
        return f"the record ends here ({record.status}), the loop says {status}"
    num_masks = int((record.initial() == record.mask_id).sum())
    budget = decoder.settings.max_steps or num_masks
    if status == _STATUS_OPEN and record.num_steps < budget:
        return f"the record stops at {record.num_steps} steps, the loop has {budget}"
    return ""


def describe_difference(differing: Tensor, after: Tensor, step: StepRecord, row: int) -> str:
    """The first difference of a row, in words."""
    column = int(differing.nonzero()[0, 0])
    state = step.state
    old, ours, theirs = (int(x[column]) for x in (state.ids[row], step.new_ids[row], after))

    def spoken(token: int) -> str:
        return "nothing" if token == old else f"token {token}"

    return (
        f"position {column - state.start}: {spoken(theirs)} recorded, {spoken(ours)} now "
        f"({int(differing.sum())} positions differ)"
    )
