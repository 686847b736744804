"""Observers look at a decode; they never change it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lit_dlm.decoding.state import DecodeResult, DecodeState, StepRecord


@runtime_checkable
class Observer(Protocol):
    """Something that watches every step: capture, metrics, animation."""

    requires: frozenset[str]
    """What the loop must provide, see :class:`~lit_dlm.decoding.policies.base.CommitPolicy`. Read
    before every step, so it may say what the next one needs; ``hidden`` has to be there from the
    beginning. ``logits`` keeps the forward of a step in its record."""

    def on_start(self, state: DecodeState) -> None:
        """Called once, with the state before the first step."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """Called after each step. Must not synchronise with the device."""
        ...

    def on_end(self, result: DecodeResult) -> None:
        """Called once, with the result of the rows that have not been replaced."""
        ...


@runtime_checkable
class QueueObserver(Observer, Protocol):
    """Observer that can follow a decode whose rows are replaced as they end."""

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        """Called where rows that have ended are replaced by others, before the next step.

        Args:
            state: the rows that take over the slots ``state.rows``, before their first step. The
                slots of ``result`` that are not among them stay empty.
        """
        ...
