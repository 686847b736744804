"""Canvas states: which tokens are visible before which step."""

from __future__ import annotations

import torch
from torch import Tensor


def state_at(tokens: Tensor, commit_step: Tensor, step: int | Tensor, mask_id: int) -> Tensor:
    """Puts the mask back wherever a token was not yet committed before ``step``.

    The result is the input of forward number ``step``: ``step = 0`` hides everything that was
    ever committed, ``step = T`` (the number of executed steps) is the final canvas. A commit step
    of -1 marks a position that no step wrote; it keeps its entry of ``tokens``, which is a prompt
    token, a given token of an infilling canvas, or the mask itself.

    A trajectory with re-masking or token edits is not described by two rows; use
    :meth:`lit_dlm.trajectories.record.Trajectory.state_at` there.

    Args:
        tokens: ``(..., L)`` integer, the values after the last step.
        commit_step: ``(..., L)`` integer, the step that wrote each position, or -1.
        step: one step for all rows, or ``(B,)`` / ``(B, 1)`` integer with one step per row.
        mask_id: id of the mask token.

    Returns:
        ``(..., L)`` with the dtype of ``tokens``.

    Raises:
        ValueError: If the shapes do not fit.
    """
    if tokens.shape != commit_step.shape:
        raise ValueError(
            "state_at: tokens and commit_step must have one shape, "
            f"got {tuple(tokens.shape)} and {tuple(commit_step.shape)}"
        )
    if isinstance(step, Tensor) and step.ndim == 1:
        if tokens.ndim != 2 or step.shape[0] not in (1, tokens.shape[0]):
            raise ValueError(
                f"state_at: a step of shape {tuple(step.shape)} needs tokens of shape "
                f"({step.shape[0]}, L), got {tuple(tokens.shape)}"
            )
        step = step[:, None]
    hidden = commit_step >= step
    return torch.where(hidden, torch.full_like(tokens, mask_id), tokens)
