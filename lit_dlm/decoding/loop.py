"""The one decode loop: rows that end are replaced by the next ones of a source.

Trace generation, benchmarks, rollouts and validation samples all go through
:func:`decode_queue`. A turn of the loop: rows that have ended leave, others enter, a step, a look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import cast

import torch

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.batch import Batch
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.graphed import GraphedBatch, runs_graphed
from lit_dlm.decoding.state import Canvas, DecodeResult, Observer, QueueObserver
from lit_dlm.decoding.step import needs


def decode(
    backbone: Backbone, decoder: Decoder, canvas: Canvas, observers: Sequence[Observer] = ()
) -> DecodeResult:
    """Decodes a canvas, whose rows are not replaced."""
    canvases = iter([canvas])
    (result,) = decode_queue(
        backbone,
        decoder,
        lambda _slots: next(canvases, None),
        num_slots=len(canvas.ids),
        observers=cast(Sequence[QueueObserver], observers),
    )
    return result


@torch.no_grad()
def decode_queue(
    backbone: Backbone,
    decoder: Decoder,
    source: Callable[[int], Canvas | None],
    *,
    num_slots: int,
    observers: Sequence[QueueObserver] = (),
    is_open: bool = False,
    abandoned: Callable[[], Collection[int]] = tuple,
) -> Iterator[DecodeResult]:
    """Fills canvases row by row as slots become free (continuous batching).

    A row that has ended is replaced by the next one of the source or, if there is none, leaves the
    batch. The host waits for the device once a step, to look where rows are and which have ended. A
    row's results depend neither on its slot nor on the other rows of the batch.

    Args:
        source: returns a canvas of as many rows as requested, or of fewer or ``None`` if no more
            are left, then and whenever it is asked again. Its rows replace ended ones in the order
            of their slots; all responses have the same length.
        is_open: whether the source may have more later: it is then asked before every step if a
            slot is free. Rows take the slots of ended ones first, then free ones from the lowest
            on, so observers may see more slots than at the start. The decode ends when no row is
            left.
        abandoned: returns the slots whose rows are to end before the next step, unfinished.

    Yields:
        Whenever rows are replaced, the rows that have ended since the last result; at the end, all
        others. With an open source, rows as they end, and none where others only enter. If an
        observer ends the decode, only those that have ended by then.
    """
    # What does not fit is refused here, before the first forward of a long run.
    decoder.check(backbone)
    decoder = decoder.on(backbone.spec)
    _, hidden_layers = needs(decoder.policy, observers)
    canvas = source(num_slots)
    if canvas is None:
        return
    is_stopped = False  # by an observer
    backbone = decoder.guided(backbone)
    batch_class = GraphedBatch if runs_graphed(backbone, decoder) else Batch
    batch = batch_class(backbone, canvas, decoder, hidden_layers)
    for observer in observers:
        observer.on_start(batch.state)
    # Also before the first step: a canvas may have nothing to fill.
    batch.look()
    clock = time.perf_counter()
    while True:
        # 1. Ended rows leave, between a look and the next step: only then does the host know which
        # they are, and no forward computes a row that has ended.
        batch.abandon(abandoned())
        ended = batch.end_rows()
        # Rows that ended in the step in which an observer stopped the decode are still handed out;
        # the others have no complete result.
        if is_stopped:
            break
        if num_free := len(ended) + (num_slots - len(batch.running)) * is_open:
            # 2. Others enter.
            canvas = source(num_free)
            num_new = 0 if canvas is None else len(canvas.ids)
            if canvas is None and len(ended) == len(batch.running):
                break
            if canvas is not None or (ended and is_open):
                yield _refilled(batch, ended, canvas, observers)
            # Without a new one the batch shrinks: a row without work would cost each later forward.
            if ended[num_new:]:
                batch.drop(ended[num_new:])
            if canvas is not None:
                batch.look()  # rows that have entered may have nothing to fill
                clock = time.perf_counter()  # filling a slot is not part of a method's time
                continue
        # 3. A step. Observers may require something else at each.
        requires, _ = needs(decoder.policy, observers)
        batch.prepare()
        record = batch.step(requires)
        # Nothing from here to the look may read a value from the device: the look is the one
        # transfer that the host waits for, and it comes after all launches of the step.
        watched = time.perf_counter()
        if observers:
            record = batch.watched(record)
        answers = [observer.on_step(record) for observer in observers]  # all are called
        is_stopped = any(answers)
        clock += time.perf_counter() - watched  # nor are observers part of it
        # 4. The look.
        batch.look()
        now = time.perf_counter()
        batch.add_seconds(now - clock)
        clock = now
    if batch.ended:
        result = batch.result()
        for observer in observers:
            observer.on_end(result)
        yield result


def _refilled(
    batch: Batch, ended: list[int], canvas: Canvas | None, observers: Sequence[QueueObserver]
) -> DecodeResult:
    """Replaces ended rows by those of a canvas, if any; returns the result of all that ended."""
    result, entering = batch.refill(ended, canvas)
    # First what has ended, then what takes over its slots: observers tell rows by their slots,
    # which mean other rows from here on.
    for observer in observers:
        observer.on_refill(result, entering)
    return result
