"""Batches of intermediate canvases taken from trajectories.

A state is the input of one forward: the canvas before a step of a trace, together with the tokens
that the trace ended with. The projector of a run is fitted on such states of a few prompts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.backbones.projection import Projector
from lit_dlm.tensors.batches import TensorBatch
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.vision.base import batch_pictures, batch_prompts, prompt_pictures

logger = logging.getLogger(__name__)

STATES_PER_TRACE = 4  # number of states of each trace that the projector is fitted on
_BATCH_SIZE = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class StateBatch(TensorBatch):
    """States of one batch: prompts padded on the left, responses on the right."""

    ids: Tensor  # (B, L) int64 canvas before the step; padding holds 0
    target: Tensor
    """``(B, L)`` int64 canvas the trace ended with; the mask id where nothing was written."""
    masked: Tensor  # (B, L) bool: response positions that hold a mask in ids
    pad_mask: Tensor  # (B, L) bool, True on real tokens
    is_real: Tensor  # (B,) bool: False on copies that only fill the batch
    start: int  # First response column, the same in every row
    mask_id: int  # Id of the mask token
    is_correct: Tensor | None = None
    """``(B,)`` bool: the trace's answer was not graded as wrong; ``None`` if a trace of the batch
    was never graded."""
    features: Tensor | None = None
    """``(B, R, F)`` stored features of the last ``R`` columns (``R = L - start`` or ``L``)."""
    proposals: Tensor | None = None  # (B, R) int64 stored proposals
    pictures: list[tuple[str, ...]] = field(default_factory=list)
    """``B`` tuples of digests: the pictures that ids beyond the vocabulary stand for
    (:func:`~lit_dlm.vision.base.batch_prompts`)."""

    def shown(self) -> dict[str, Any]:
        """Returns arguments of a backbone's forward: where responses begin, and any pictures."""
        found = batch_pictures(self.pictures)
        return {"response_start": self.start} | ({"pictures": found} if found else {})


def states_at(traces: Sequence[Trajectory], steps: Sequence[int]) -> list[NDArray[np.int32]]:
    """Returns the response canvas of each trace before one of its steps."""
    if any(trace.superseded is not None for trace in traces):
        return [trace.state_at(step) for trace, step in zip(traces, steps, strict=True)]
    # Without overwritten tokens all are replayed together: calls cost more than the replay.
    lengths = [len(trace.tokens) for trace in traces]
    states = np.concatenate([trace.tokens for trace in traces])
    commit_step = np.concatenate([trace.commit_step for trace in traces])
    shown = np.repeat(np.asarray(steps, dtype=commit_step.dtype), lengths)
    np.putmask(states, commit_step >= shown, traces[0].mask_id)
    return np.split(states, np.cumsum(lengths)[:-1])


def collate_states(
    traces: Sequence[Trajectory],
    states: Sequence[NDArray[np.int32]],
    *,
    is_real: Sequence[bool] | None = None,
    features: Sequence[tuple[NDArray[np.floating], NDArray[np.int32]]] | None = None,
) -> StateBatch:
    """Pads ``(G,)`` response canvases to one canvas, on the CPU.

    ``is_real`` is ``False`` for copies that only fill the batch. ``features`` are the stored
    ``(R, F)`` features and ``(R,)`` proposals of each trace, all of one layout.
    """
    mask_ids = {trace.mask_id for trace in traces}
    if len(mask_ids) > 1:
        raise ValueError(f"collate_states: expected one mask id, got {sorted(mask_ids)}")
    mask_id = mask_ids.pop()
    prompts, pictures = batch_prompts(
        [trace.prompt_ids for trace in traces],
        [prompt_pictures(trace.meta, trace.vocab_size) for trace in traces],
    )
    num_prompt = np.array([len(trace.prompt_ids) for trace in traces])
    num_generated = np.array([len(trace.tokens) for trace in traces])
    start = int(num_prompt.max())
    L = start + int(num_generated.max())
    columns = np.arange(L)
    is_prompt = (columns < start) & (columns >= start - num_prompt[:, None])
    is_response = (columns >= start) & (columns < start + num_generated[:, None])
    pad_mask = is_prompt | is_response
    ids = np.zeros((len(traces), L), dtype=np.int64)
    # A mask selects row by row, which is the order of the concatenated rows.
    ids[is_prompt] = np.concatenate(prompts)
    target = ids.copy()
    ids[is_response] = np.concatenate(states)
    target[is_response] = np.concatenate([trace.tokens for trace in traces])
    # Wrong is what was graded so: a trace that no grader knew counts as right, beside graded ones.
    are_graded = all("correct" in trace.meta for trace in traces)
    grades = [trace.meta.get("correct") is not False for trace in traces]
    batch = StateBatch(
        ids=torch.from_numpy(ids),
        target=torch.from_numpy(target),
        masked=torch.from_numpy((ids == mask_id) & is_response),
        pad_mask=torch.from_numpy(pad_mask),
        is_real=torch.tensor([True] * len(traces) if is_real is None else is_real),
        start=start,
        mask_id=mask_id,
        is_correct=torch.tensor(grades) if are_graded else None,
        pictures=pictures,
    )
    if features is None:
        return batch
    # Features are stored for the response, or for prompt and response.
    begin = 0 if len(features[0][0]) > num_generated[0] else start
    rows = pad_mask[:, begin:]
    stored, proposals = (np.concatenate(part) for part in zip(*features, strict=True))
    return replace(batch, features=_spread(stored, rows), proposals=_spread(proposals, rows))


def _spread(values: NDArray[Any], rows: NDArray[np.bool_]) -> Tensor:
    """``(B, R, ...)`` float32 or int64: the values in the chosen rows, 0 elsewhere."""
    kind = np.float32 if values.dtype.kind == "f" else np.int64
    found = np.zeros((*rows.shape, *values.shape[1:]), dtype=kind)
    found[rows] = values
    return torch.from_numpy(found)


@torch.no_grad()
def state_snapshots(
    backbone: Backbone,
    batch: StateBatch,
    *,
    hidden_layers: Sequence[int] = (-3, -2, -1),
    with_prompt: bool = False,
) -> Tensor:
    """``(N, H, D)`` hidden snapshots at the response positions of all states, row by row."""
    # Only hidden states are wanted, but one column has to go through the head.
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
        chosen[:, : batch.start] = False
    return denoised.hidden[chosen]


def trace_states(traces: Iterable[Trajectory], *, seed: int = 0) -> Iterator[StateBatch]:
    """Yields batches of states at evenly spread random steps of each trace, in order."""
    rng = np.random.default_rng(seed)
    waiting: list[tuple[Trajectory, int]] = []
    for trace in traces:
        # One per equal part of the trace's steps: early states activate the model unlike late ones.
        edges = np.linspace(0, trace.num_steps, STATES_PER_TRACE + 1)
        steps = {int(step) for step in rng.uniform(edges[:-1], edges[1:])}
        waiting += [(trace, step) for step in sorted(steps) if step < trace.num_steps]
    for first in range(0, len(waiting), _BATCH_SIZE):
        part, steps_of = zip(*waiting[first : first + _BATCH_SIZE], strict=True)
        yield collate_states(part, states_at(part, steps_of))


def cached_projector(folder: str | Path, fit: Callable[[], Projector]) -> Projector:
    """Returns the projector of a run folder; it is fitted and stored there at the first call.

    In a distributed run only the first rank calls this; the others load it after a barrier.
    """
    # A refitted projector would make other features than are stored, so the first one is kept.
    folder = Path(folder)
    if not folder.exists():
        projector = fit()
        # Written beside it and renamed, so that the folder appears at once and complete.
        draft = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        projector.save(draft)
        draft.rename(folder)
        logger.info("fitted projector %s in %s", projector.digest()[:12], folder)
    return Projector.load(folder)
