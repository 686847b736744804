"""How many prompts of each task a run takes, and how long each response is."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lit_dlm.tasks import PromptExample


@dataclass(frozen=True, kw_only=True)
class PromptMix:
    """A fixed number of prompts, shared by the tasks according to weights.

    The TraceLock release takes 7,000: GSM8K 0.2, KodCode 0.2, Alpaca 0.4 (arXiv 2605.24697).
    """

    total: int
    """Prompts in all."""
    weights: dict[str, float]
    """Weight of each task by its name; normalised over the tasks of the run."""
    seed: int = 42
    """Seed of the choice within each task."""

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ValueError(f"mix.total: expected at least 1, got {self.total}")
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0.0):
                raise ValueError(f"mix.weights.{name}: expected a positive number, got {weight}")

    def chosen(
        self, examples: Mapping[str, Sequence[PromptExample]]
    ) -> dict[str, list[PromptExample]]:
        """The prompts of each task, chosen by ``seed`` plus the place of the task.

        Args:
            examples: all examples by task, in the order of the run.

        Returns:
            As many as the task's share of ``total``, by largest remainder.

        Raises:
            ValueError: weights are not given for exactly these tasks, or a task has too few
                examples.
        """
        if set(examples) != set(self.weights):
            raise ValueError(
                f"mix.weights: expected one for each of {', '.join(examples)}, got "
                f"{', '.join(self.weights) or 'none'}"
            )
        counts = largest_remainder(self.total, [self.weights[name] for name in examples])
        found = {}
        for place, ((name, every), count) in enumerate(zip(examples.items(), counts, strict=True)):
            if count > len(every):
                raise ValueError(
                    f"mix: task '{name}' has {len(every)} examples, its share is {count}"
                )
            order = list(range(len(every)))
            random.Random(self.seed + place).shuffle(order)
            found[name] = [every[at] for at in order[:count]]
        return found


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Whole shares of ``total`` in proportion to weights.

    Args:
        total: what is shared out.
        weights: positive.

    Returns:
        One count per weight; they sum to ``total``. Left-overs go to the largest remainders, the
        earlier one of equals.
    """
    exact = [total * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: counts[at] - exact[at])
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return counts


def drawn_length(lengths: Sequence[int], uid: str, *, seed: int) -> int:
    """One of several response lengths for a prompt, by a hash of its uid.

    Args:
        lengths: what there is to choose from.
        uid: uid of the prompt; all its decodes have one length.
        seed: seed of the draw.
    """
    digest = hashlib.sha256(f"length:{seed}:{uid}".encode()).digest()
    return lengths[int.from_bytes(digest[:8], "big") % len(lengths)]
