"""The price of a forward as a constraint: speed is bought only while accuracy holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lit_dlm.system.options import within


@dataclass(frozen=True, kw_only=True)
class PriceConstraint:
    """Raises the price of a forward while every accuracy of validation holds."""

    margin: float = 0.01
    """How much less than at the start an accuracy may be."""
    rate: float = 0.25
    """Share by which a validation raises the price, or lowers it where an accuracy is too low."""

    def __post_init__(self) -> None:
        within("[0, 1]", of="constraint.", margin=self.margin)
        within("(0, inf)", of="constraint.", rate=self.rate)

    def next(self, price: float, *, start: Mapping[str, float], now: Mapping[str, float]) -> float:
        """Returns the price after a validation, by accuracies at the start and now, by name."""
        # Of each window: a mean could rise while one of them pays for it. The least bit is that of
        # rounding, so that a difference of just the margin holds.
        holds = all(now[name] >= least - self.margin - 1e-9 for name, least in start.items())
        return price * (1.0 + self.rate) if holds else price / (1.0 + self.rate)
