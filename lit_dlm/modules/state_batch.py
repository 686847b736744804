"""Batches of intermediate canvases taken from trajectories.

A state is the input of one forward: a canvas with masks, together with the tokens that the trace
ended with. It comes from a step of the trace, or from masking a finished trace again at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dlm.ops.batches import TensorBatch
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.vision.prompts import PromptPictures, batch_pictures, batch_prompts


@dataclass(frozen=True, eq=False, kw_only=True)
class StateExample:
    """One state of one trace, on the host."""

    trace: Trajectory
    """Where it comes from: gives the prompt and the final tokens."""
    response: NDArray[np.int32]
    """``(G,)`` int32 response canvas before the step."""
    features: NDArray[np.floating] | None = None
    """``(R, F)`` features captured at that step, where stored ones are used."""
    proposals: NDArray[np.int32] | None = None
    """``(R,)`` int32 tokens proposed at that step, with ``features``."""
    is_real: bool = True
    """``False`` for a copy that only fills a batch; metrics must ignore it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StateBatch(TensorBatch):
    """States of one batch: prompts padded on the left, responses on the right."""

    ids: Tensor
    """``(B, L)`` int64 canvas before the step; padding holds 0."""
    target: Tensor
    """``(B, L)`` int64 canvas the trace ended with; the mask id where nothing was written."""
    masked: Tensor
    """``(B, L)`` bool: response cells that hold a mask in ``ids``."""
    pad_mask: Tensor
    """``(B, L)`` bool, ``True`` on real tokens."""
    is_real: Tensor
    """``(B,)`` bool: ``False`` on copies that only fill the batch."""
    start: int
    """First response column, the same in every row."""
    mask_id: int
    """Id of the mask token."""
    is_correct: Tensor | None = None
    """``(B,)`` bool: the trace's answer was graded as right; ``None`` where a trace of the batch
    has no grade."""
    features: Tensor | None = None
    """``(B, R, F)`` stored features of the last ``R`` columns (``R = L - start`` or ``L``)."""
    proposals: Tensor | None = None
    """``(B, R)`` int64 stored proposals."""
    pictures: list[tuple[str, ...]] = field(default_factory=list)
    """``B`` tuples of digests: what ids behind the vocabulary stand for
    (:func:`~lit_dlm.vision.prompts.batch_prompts`)."""

    def shown(self) -> dict[str, Any]:
        """The argument of a backbone's forward that tells of pictures, where there are some."""
        return {"pictures": found} if (found := batch_pictures(self.pictures)) else {}


def prompt_pictures(trace: Trajectory) -> PromptPictures | None:
    """What ids of a recorded prompt behind the vocabulary stand for.

    Args:
        trace: the trace.
    """
    digests = trace.meta.get("images")
    if not digests:
        return None
    return PromptPictures(digests=tuple(digests), first_id=trace.vocab_size)


def trace_state(trace: Trajectory, step: int) -> StateExample:
    """The state before a step of a trace.

    Args:
        trace: the trace.
        step: ``0 .. num_steps - 1``.
    """
    return StateExample(trace=trace, response=trace.state_at(step))


def collate_trace_states(
    traces: Sequence[Trajectory], steps: Sequence[int], is_real: Sequence[bool]
) -> StateBatch:
    """The states before one step of each of many traces: :func:`trace_state`, then collation.

    Traces without overwritten writes, which are most, are replayed together: a call per trace costs
    more than the work.

    Args:
        traces: at least one trace; all of one mask id.
        steps: one step per trace, each ``0 .. num_steps - 1``.
        is_real: whether the trace is more than a filler of the batch.

    Returns:
        The batch, on the CPU, without features.
    """
    simple = all(
        trace.superseded is None and 0 <= step <= trace.num_steps
        for trace, step in zip(traces, steps, strict=True)
    )
    tokens = np.concatenate([trace.tokens for trace in traces])
    if simple:
        commit_step = np.concatenate([trace.commit_step for trace in traces])
        shown = np.asarray(steps, dtype=commit_step.dtype)
        states = tokens.copy()
        lengths = [len(trace.tokens) for trace in traces]
        np.putmask(states, commit_step >= np.repeat(shown, lengths), traces[0].mask_id)
    else:
        replayed = zip(traces, steps, strict=True)
        states = np.concatenate([trace.state_at(step) for trace, step in replayed])
    return _canvas(traces, tokens, states, is_real)


def remasked_state(trace: Trajectory, rng: np.random.Generator) -> StateExample:
    """A finished trace with a random part of its written response masked again.

    The number of masks is uniform in ``1 .. n`` over the ``n`` written positions. Such states are
    not on the trace's own path: they teach the policy about canvases that other orders of
    commitment lead to, its own among them.

    Args:
        trace: the trace; at least one position must be written.
        rng: source of the draw.
    """
    written = np.flatnonzero((trace.commit_step >= 0) & (trace.tokens != trace.mask_id))
    if not len(written):
        raise ValueError(f"trajectory {trace.uid!r}: no written position to mask again")
    count = int(rng.integers(1, len(written) + 1))
    response = trace.tokens.copy()
    response[rng.permutation(written)[:count]] = trace.mask_id
    return StateExample(trace=trace, response=response)


def collate_states(examples: Sequence[StateExample]) -> StateBatch:
    """Pads states to one canvas.

    Args:
        examples: at least one; all with stored features or none, and one mask id.

    Returns:
        The batch, on the CPU.

    Raises:
        ValueError: the examples do not fit together.
    """
    if not examples:
        raise ValueError("collate_states: expected at least one example, got none")
    traces = [example.trace for example in examples]
    batch = _canvas(
        traces,
        np.concatenate([trace.tokens for trace in traces]),
        np.concatenate([example.response for example in examples]),
        [example.is_real for example in examples],
    )
    features, proposals = _collate_features(examples, batch.start, batch.ids.shape[1])
    return replace(batch, features=features, proposals=proposals)


def _canvas(
    traces: Sequence[Trajectory],
    tokens: NDArray[np.int32],
    states: NDArray[np.int32],
    is_real: Sequence[bool],
) -> StateBatch:
    """The batch of responses ``states`` that end as ``tokens``, both one after the other."""
    mask_ids = {trace.mask_id for trace in traces}
    if len(mask_ids) > 1:
        raise ValueError(f"collate_states: expected one mask id, got {sorted(mask_ids)}")
    mask_id = mask_ids.pop()
    prompts, pictures = batch_prompts(
        [trace.prompt_ids for trace in traces], [prompt_pictures(trace) for trace in traces]
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
    ids[is_response] = states
    target[is_response] = tokens
    masked = (ids == mask_id) & is_response
    return StateBatch(
        ids=torch.from_numpy(ids),
        target=torch.from_numpy(target),
        masked=torch.from_numpy(masked),
        pad_mask=torch.from_numpy(pad_mask),
        is_real=torch.tensor(is_real),
        start=start,
        mask_id=mask_id,
        is_correct=_grades(traces),
        pictures=pictures,
    )


def _grades(traces: Sequence[Trajectory]) -> Tensor | None:
    """``(B,)`` bool grades, if all traces have one."""
    grades = [trace.meta.get("correct") for trace in traces]
    return None if None in grades else torch.tensor([bool(grade) for grade in grades])


def _collate_features(
    examples: Sequence[StateExample], start: int, L: int
) -> tuple[Tensor | None, Tensor | None]:
    """Stored features ``(B, R, F)`` float32 and proposals ``(B, R)``, padded like the canvas."""
    if all(example.features is None for example in examples):
        return None, None
    widths = set()
    for example in examples:
        if example.features is None or example.proposals is None:
            raise ValueError(
                f"trajectory {example.trace.uid!r}: stored features are missing in a batch where "
                "others have them"
            )
        layout_rows = example.features.shape[0] - example.trace.num_generated
        widths.add((layout_rows > 0, example.features.shape[1]))
    if len(widths) > 1:
        raise ValueError(f"stored features: expected one layout and width, got {sorted(widths)}")
    has_prompt, F = widths.pop()
    begin = 0 if has_prompt else start
    features = np.zeros((len(examples), L - begin, F), dtype=np.float32)
    proposals = np.zeros((len(examples), L - begin), dtype=np.int64)
    for row, example in enumerate(examples):
        assert example.features is not None
        assert example.proposals is not None
        first = start - begin - (example.trace.num_prompt if has_prompt else 0)
        last = first + len(example.features)
        features[row, first:last] = example.features
        proposals[row, first:last] = example.proposals
    return torch.from_numpy(features), torch.from_numpy(proposals)
