"""The one result type of every loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """What a loss function returns: the scalar to minimise and what it is made of."""

    total: Tensor
    """Scalar, differentiable, already normalised over the local batch."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Detached scalars by name, for logging only."""
    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Instead of parts: detached sums and numbers of units, both scalars, from which means over
    several batches follow; a count has 0 units."""

    def means(self) -> dict[str, Tensor]:
        """What ``sums`` are for this batch alone."""
        return {name: value / units.clamp_min(1) for name, (value, units) in self.sums.items()}
