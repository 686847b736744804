"""Where a recorded decode is cut into what is shown and what is to be learnt (TABOM, 2605.11854).

A cut is a step: tokens written before it are shown; :func:`lit_dlm.tensors.masking.time_delay_mask`
does the rest. A cut of -1 means that a row has none: all of it is hidden, and nothing is learnt.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

CutRange = Literal["full", "reference"]


def last_cuts(
    steps: Tensor, maskable: Tensor, *, window: int, cut_range: CutRange = "full"
) -> Tensor:
    """``(...)`` int64: the largest cut that may be drawn for each row; -1 for a row without any.

    ``full`` lets the cut reach the last step, where windows end early, so that every step is
    supervised and no row is lost. ``reference`` is the release's range: at most the last step minus
    the window, so the last step is never supervised and a row of ``window`` steps or fewer has no
    cut.
    """
    last_step = torch.where(maskable, steps.long(), -1).amax(dim=-1)
    if cut_range == "full":
        return last_step
    return (last_step - window).clamp_min(-1)


def uniform_cuts(last: Tensor, noise: Tensor) -> Tensor:
    """``(B,)`` int64: cuts uniform in ``0..last``, from ``(B,)`` noise; -1 where ``last`` is."""
    # Rounding must not exceed ``last``.
    drawn = (noise * (last + 1)).long().minimum(last)
    return torch.where(last >= 0, drawn, -1)


def non_ltr_cuts(last: Tensor, steps: Tensor, is_non_ltr: Tensor, noise: Tensor) -> Tensor:
    """Draws a cut among the steps at which something was decoded out of order.

    This is the recipe for code in TABOM's release for Dream. Each distinct step is equally likely;
    a row without such a step gets a uniform cut. ``noise`` is ``(B,)`` float64, uniform in (0, 1).
    """
    wanted = is_non_ltr & (steps >= 0) & (steps <= last[:, None])
    ordered = torch.where(wanted, steps.long(), -1).sort(dim=1).values
    is_first = torch.ones_like(wanted)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_first &= ordered >= 0
    count = is_first.sum(1)
    chosen = (noise * count).long().minimum(count - 1)  # number among the distinct steps
    is_chosen = is_first & (is_first.cumsum(1) - 1 == chosen[:, None])
    drawn = torch.where(is_chosen, ordered, -1).amax(1)
    return torch.where(count > 0, drawn, uniform_cuts(last, noise))


def non_ltr_positions(steps: Tensor) -> Tensor:
    """``(..., L)`` bool: positions written before one to their left, from ``(..., L)`` steps.

    The release's data contain a list made by an unpublished script; this is our reading of its
    name.
    """
    return (steps >= 0) & (steps.cummax(dim=-1).values > steps)
