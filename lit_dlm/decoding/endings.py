"""Which cells of a response belong to its text: those before an end of text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def text_cells(response: Tensor, eos_ids: Sequence[int], given: Tensor | None = None) -> Tensor:
    """``(B, G)`` bool: the cells before the first end of text; given cells always are among them.

    Where tokens were given, such as the markers of a template, an end of text ends the part before
    them and not the response: the parts behind go on.

    Args:
        response: ``(B, G)`` int64.
        given: ``(B, G)`` bool: cells that stood there before the first step.
    """
    is_end = torch.isin(response, torch.tensor(list(eos_ids), device=response.device))
    if given is None:
        return is_end.cumsum(1) == 0
    ends = (is_end & ~given).cumsum(1)
    before = torch.where(given, ends, 0).cummax(1).values  # ends left of the last given cell
    return (ends == before) | given
