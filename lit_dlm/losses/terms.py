"""The one result type of every loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """What a loss function returns: the scalar to minimise and what it is made of.

    A module calls ``backward`` on ``total`` and logs ``parts``; it never recomputes either.
    """

    total: Tensor
    """Scalar, differentiable, already normalised over the local batch."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Detached scalars by name, for logging only."""
    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Of parts that are means: the detached sum and the number of its units, both scalars, from
    which the mean over several batches follows. Parts that are not here are counts."""
