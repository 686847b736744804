"""Where two records of one prompt part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.record import Int32, Trajectory


@dataclass(frozen=True, eq=False, kw_only=True)
class TrajectoryDiff:
    """Where two records of one prompt part, and what was decided there."""

    same: bool
    """Whether prompts, writes and lengths are equal (equal digests)."""
    same_prompt: bool
    """Whether the prompt ids are equal."""
    first_step: int | None
    """First step whose writes differ; ``None`` when the writes of all shared steps are equal."""
    only_a: NDArray[np.int64]
    """Positions that only the first record wrote at that step."""
    only_b: NDArray[np.int64]
    """Positions that only the second record wrote at that step."""
    tokens: Int32
    """``(K, 3)`` int32 rows (position, token of a, token of b): both wrote, but differently."""
    num_final_differing: int
    """Final tokens that differ, over the common length, plus the difference in length."""
    num_steps: tuple[int, int]
    """Steps of both records."""
    margins: tuple[NDArray[Any] | None, NDArray[Any] | None]
    """Stored ``commit_margin`` at the positions each record alone wrote, or ``None``."""


def diff(a: Trajectory, b: Trajectory) -> TrajectoryDiff:
    """Compares two records step by step.

    Args:
        a: first record.
        b: second record.

    Returns:
        The first step at which they differ, the position sets and tokens there, and stored margins.
    """
    events_a, events_b = a.events(), b.events()
    shared = min(len(events_a), len(events_b))
    unequal = np.flatnonzero((events_a[:shared] != events_b[:shared]).any(axis=1))
    if len(unequal):
        at = int(unequal[0])
        first = int(min(events_a[at, 0], events_b[at, 0]))
    elif len(events_a) != len(events_b):
        longer = events_a if len(events_a) > len(events_b) else events_b
        first = int(longer[shared, 0])
    else:
        first = -1
    at_a = events_a[events_a[:, 0] == first]
    at_b = events_b[events_b[:, 0] == first]
    both, in_a, in_b = np.intersect1d(at_a[:, 1], at_b[:, 1], return_indices=True)
    pairs = np.stack([both, at_a[in_a, 2], at_b[in_b, 2]], axis=1).astype(np.int32)
    only_a = np.setdiff1d(at_a[:, 1], both).astype(np.int64)
    only_b = np.setdiff1d(at_b[:, 1], both).astype(np.int64)
    common = min(a.num_generated, b.num_generated)
    final = int((a.tokens[:common] != b.tokens[:common]).sum())
    final += abs(a.num_generated - b.num_generated)
    margin_a, margin_b = a.signals.get("commit_margin"), b.signals.get("commit_margin")
    return TrajectoryDiff(
        same=a.digest() == b.digest(),
        same_prompt=np.array_equal(a.prompt_ids, b.prompt_ids),
        first_step=None if first < 0 else first,
        only_a=only_a,
        only_b=only_b,
        tokens=pairs[pairs[:, 1] != pairs[:, 2]],
        num_final_differing=final,
        num_steps=(a.num_steps, b.num_steps),
        margins=(
            None if margin_a is None else margin_a[only_a],
            None if margin_b is None else margin_b[only_b],
        ),
    )
