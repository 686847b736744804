"""Fitting the projector: the first small step of trace generation with features.

The components are found on intermediate canvases of a few decoded prompts and kept in the run
folder, so that a resumed run uses the same projector and so do training and decoding.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.heads.projection import Projector
from lit_dlm.modules.state_batch import StateBatch, collate_states, trace_state
from lit_dlm.trajectories.record import Trajectory

logger = logging.getLogger(__name__)

STATES_PER_TRACE = 4
"""States of a trace that the projector is fitted on."""


@torch.no_grad()
def state_snapshots(
    backbone: Backbone,
    batch: StateBatch,
    *,
    hidden_layers: Sequence[int] = (-3, -2, -1),
    with_prompt: bool = False,
) -> Tensor:
    """Hidden snapshots at the response positions of some states.

    Args:
        backbone: the frozen denoiser.
        batch: states, on the backbone's device.
        hidden_layers: which snapshots.
        with_prompt: also prompt positions.

    Returns:
        ``(N, H, D)``: the chosen positions of all states, row by row.
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


def trace_states(
    traces: Iterable[Trajectory],
    *,
    states_per_trace: int = STATES_PER_TRACE,
    batch_size: int = 16,
    seed: int = 0,
) -> Iterator[StateBatch]:
    """Batches of states at evenly spread random steps of each trace, in order.

    Args:
        traces: decoded prompts.
        states_per_trace: states of each; one per equal part of its steps.
        batch_size: states of a batch.
        seed: seed of the steps.
    """
    rng = np.random.default_rng(seed)
    waiting = []
    for trace in traces:
        edges = np.linspace(0, trace.num_steps, states_per_trace + 1)
        steps = {int(step) for step in rng.uniform(edges[:-1], edges[1:])}
        waiting += [trace_state(trace, step) for step in sorted(steps) if step < trace.num_steps]
        while len(waiting) >= batch_size:
            yield collate_states(waiting[:batch_size])
            waiting = waiting[batch_size:]
    if waiting:
        yield collate_states(waiting)


def cached_projector(folder: str | Path, fit: Callable[[], Projector]) -> Projector:
    """The projector of a run folder; fitted and stored there at the first call.

    The folder appears at once and complete (written beside it, then renamed). Distributed runs
    call this on the first rank, then on the others behind a barrier.

    Args:
        folder: where it is kept.
        fit: makes it; called only when the folder does not exist.
    """
    folder = Path(folder)
    if not folder.exists():
        draft = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        projector = fit()
        projector.save(draft)
        try:
            draft.rename(folder)
        except OSError:
            # Another process was faster; its projector is the one to use.
            shutil.rmtree(draft)
            if not folder.exists():
                raise
        logger.info("fitted projector %s in %s", projector.digest()[:12], folder)
    return Projector.load(folder)
