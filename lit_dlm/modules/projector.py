"""The projector of a run: fitted on canvases of a few decoded prompts, kept in the run folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.heads.projection import Projector
from lit_dlm.modules.state_batch import StateBatch, collate_states, states_at
from lit_dlm.trajectories.record import Trajectory

logger = logging.getLogger(__name__)

STATES_PER_TRACE = 4
"""States of a trace that the projector is fitted on."""
_BATCH_SIZE = 16


@torch.no_grad()
def state_snapshots(
    backbone: Backbone,
    batch: StateBatch,
    *,
    hidden_layers: Sequence[int] = (-3, -2, -1),
    with_prompt: bool = False,
) -> Tensor:
    """``(N, H, D)`` hidden snapshots at the response positions of all states, row by row.

    Args:
        batch: states, on the backbone's device.
        with_prompt: also prompt positions.
    """
    # Only hidden states are wanted: one column through the head is the least it can do.
    column = torch.full_like(batch.ids[:, :1], batch.start)
    denoised = backbone.denoise(
        batch.ids,
        pad_mask=batch.pad_mask,
        columns=column,
        hidden_layers=hidden_layers,
        **batch.shown(),
    )
    assert denoised.hidden is not None
    chosen = batch.pad_mask & batch.is_real[:, None]
    if not with_prompt:
        chosen = chosen.clone()
        chosen[:, : batch.start] = False
    return denoised.hidden[chosen]


def trace_states(traces: Iterable[Trajectory], *, seed: int = 0) -> Iterator[StateBatch]:
    """Batches of states at evenly spread random steps of each trace, in order."""
    rng = np.random.default_rng(seed)
    waiting: list[tuple[Trajectory, int]] = []
    for trace in traces:
        # One per equal part of the trace's steps.
        edges = np.linspace(0, trace.num_steps, STATES_PER_TRACE + 1)
        steps = {int(step) for step in rng.uniform(edges[:-1], edges[1:])}
        waiting += [(trace, step) for step in sorted(steps) if step < trace.num_steps]
    for first in range(0, len(waiting), _BATCH_SIZE):
        part, steps_of = zip(*waiting[first : first + _BATCH_SIZE], strict=True)
        yield collate_states(part, states_at(part, steps_of))


def cached_projector(folder: str | Path, fit: Callable[[], Projector]) -> Projector:
    """The projector of a run folder; fitted and stored there at the first call.

    Distributed runs call this on the first rank, then on the others behind a barrier.
    """
    folder = Path(folder)
    if not folder.exists():
        projector = fit()
        # Written beside it and renamed, so that the folder appears at once and complete.
        draft = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        projector.save(draft)
        draft.rename(folder)
        logger.info("fitted projector %s in %s", projector.digest()[:12], folder)
    return Projector.load(folder)
