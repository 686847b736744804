"""Rewards for the shape of a response: its format and its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from lit_dlm.grading.answers import last_boxed, text_after_marker
from lit_dlm.grading.child.extraction import fenced_blocks
from lit_dlm.grading.code import extract_code, extract_program
from lit_dlm.rewards.base import Reward, RewardScore, Rollout

Requirement = Literal["boxed", "marked", "fenced", "parses", "entry_point"]


class FormatReward(Reward):
    r"""Pays 1 for a response that has the required form, 0 for any other.

    Args:
        requires: ``boxed`` wants an answer in ``\boxed{}``, ``marked`` one behind ``####``,
            ``fenced`` a fenced block of Python, ``parses`` code that compiles, and ``entry_point``
            code that defines the function which the problem asks for.
        weight: factor in the sum of all rewards. Below the weight of a right answer, or the form
            will be learnt instead of the answer.
    """

    def __init__(self, requires: Requirement, *, weight: float = 0.1) -> None:
        if requires not in get_args(Requirement):
            known = ", ".join(get_args(Requirement))
            raise ValueError(f"FormatReward.requires must be one of {known}, got {requires!r}")
        self.name = f"format_{requires}"
        self.weight = weight
        self._holds = _CHECKS[requires]

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        """Pays every response by its text."""
        return [RewardScore(total=float(self._holds(rollout))) for rollout in group]


def _is_boxed(rollout: Rollout) -> bool:
    return bool(last_boxed(rollout.text))


def _is_marked(rollout: Rollout) -> bool:
    return bool(text_after_marker(rollout.text))


def _is_fenced(rollout: Rollout) -> bool:
    return any(block.strip() for block in fenced_blocks(rollout.text))


def _parses(rollout: Rollout) -> bool:
    return not extract_program(rollout.text).problem


def _defines_entry_point(rollout: Rollout) -> bool:
    reference = rollout.example.reference
    entry_point = reference.get("entry_point")
    if not entry_point:
        # A problem that is solved by a whole program asks for nothing but that it parses.
        return _parses(rollout)
    found = extract_code(rollout.text, entry_point, stub=reference.get("stub") or "")
    return not found.problem


_CHECKS: dict[str, Callable[[Rollout], bool]] = {
    "boxed": _is_boxed,
    "marked": _is_marked,
    "fenced": _is_fenced,
    "parses": _parses,
    "entry_point": _defines_entry_point,
}


class LengthPenalty(Reward):
    """Takes up to 1 from long responses: soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).

    Nothing up to ``free`` tokens, then linearly more up to 1 at ``limit`` tokens and beyond. Apart
    from it the rewarder calls a response wrong that fills its budget.

    Args:
        free: tokens that cost nothing.
        limit: tokens from which on the full price is taken; at most the response budget, or it is
            never reached.
        weight: factor in the sum of all rewards.
    """

    name = "length"

    def __init__(self, *, free: int, limit: int, weight: float = 1.0) -> None:
        if not 0 <= free < limit:
            raise ValueError(
                f"LengthPenalty: expected 0 <= free < limit, got free {free!r}, limit {limit!r}"
            )
        self.free = free
        self.limit = limit
        self.weight = weight

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        """Charges every response by its own length."""
        return [RewardScore(total=-self._share(rollout.num_tokens)) for rollout in group]

    def _share(self, num_tokens: int) -> float:
        return min(max(num_tokens - self.free, 0) / (self.limit - self.free), 1.0)
