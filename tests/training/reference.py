"""Responses to corrupt, and entropy ranking as slow, obvious loops."""

from typing import Any

import torch
from torch import Tensor

from lit_dlm.training.batch import SupervisedBatch


def responses(B: int = 4, G: int = 8, answer: int = 6, **changes: Any) -> SupervisedBatch:
    """Answers of some positions and the rest padding; one position a step, from the right."""
    maskable = (torch.arange(G) < answer).expand(B, -1)
    values: dict[str, Any] = {
        "ids": torch.zeros(B, G, dtype=torch.long),
        "pad_mask": None,
        "start": 0,
        "num_prompt": torch.ones(B, dtype=torch.long),
        "maskable": maskable,
        "seeds": torch.arange(B) + 100,
        "steps": torch.where(maskable, answer - 1 - torch.arange(G), -1),
    }
    return SupervisedBatch(**{**values, **changes})


def rows(*values: str) -> torch.Tensor:
    """One bool row per string, ``1`` is True."""
    return torch.tensor([[char == "1" for char in row] for row in values])


def entropy_of(logits: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def slow_ranking(
    entropy: Tensor,
    steps: list[list[int]],
    supervised: list[list[bool]],
    cuts: list[int],
    *,
    window: int | None,
    margin: float,
    ties: str,
    decode_entropy: list[list[float]],
    blocks: list[list[int]] | None = None,
) -> Tensor:
    """One pair at a time."""
    rows = []
    for b, cut in enumerate(cuts):
        hinges = []
        for i in range(entropy.shape[1]):
            for j in range(entropy.shape[1]):
                usable = all(
                    supervised[b][k]
                    and steps[b][k] >= max(cut, 0)
                    and (window is None or steps[b][k] < cut + window)
                    for k in (i, j)
                )
                earlier = steps[b][i] < steps[b][j]
                if steps[b][i] == steps[b][j] and i != j:
                    if ties == "position":
                        earlier = i < j
                    elif ties == "rank":
                        earlier = (decode_entropy[b][i], i) < (decode_entropy[b][j], j)
                if blocks is not None and blocks[b][i] != blocks[b][j]:
                    continue
                if usable and earlier:
                    hinges.append((entropy[b, i] - entropy[b, j] + margin).relu())
        if hinges:
            rows.append(torch.stack(hinges).mean())
    return torch.stack(rows).mean() if rows else entropy.sum() * 0.0
