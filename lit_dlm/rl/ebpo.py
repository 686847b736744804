"""EBPO: clipped ratios of responses, estimated block by block on composite inputs (LLaDA2.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lit_dlm.rl.policy_losses import ClippedPolicyLoss
from lit_dlm.system.options import at_least


@dataclass(frozen=True, kw_only=True)
class EBPO(ClippedPolicyLoss):
    """``min(rho A, clip(rho, 1 - clip, 1 + clip_high) A)`` of responses (arXiv:2602.08676, eq. 4).

    ``log rho`` is a weighted sum over states and blocks of what the log-probability of a block has
    gained (eq. 5). The states are those of a masking: ``DecodedViews``, which knows what decodes
    rewrite, or ``BoundViews``. A block model reads each beside the clean response, under a
    block-causal mask, so one forward has all blocks. The report gives neither weights nor bounds;
    the maskings' weights make ``log rho`` a mean per token, as in ESPO. There is no divergence.

    Args:
        clip: how far a ratio may fall before its gradient is cut.
        clip_high: how far it may rise.
    """

    needs_bounds: ClassVar[bool] = True
    has_divergence: ClassVar[bool] = False
    beta: float = field(default=0.0, init=False)
    max_fall: None = field(default=None, init=False)

    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, clip_high=self.clip_high)

    @property
    def bounds(self) -> tuple[float, float]:
        return 1.0 - self.clip, 1.0 + self.clip_high
