"""Numbers of a batch of scores, for logs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_dlm.rewards.base import RewardScore
from lit_dlm.rewards.rewarder import OVERLONG


def summarise(groups: Sequence[Sequence[RewardScore]]) -> dict[str, float]:
    """Sums up the scores of many groups.

    Args:
        groups: the scores, one group per prompt.

    Returns:
        ``mean`` (of the totals), ``group_std`` (mean population deviation within a group),
        ``correct``, and as shares of all responses ``timeout`` (graders that ran out of time),
        ``no_answer`` (nothing to grade), ``overlong`` (called wrong unread), then the mean of
        each reward as ``part/{name}`` over the responses that have it. Empty without a score.
    """
    scores = [score for group in groups for score in group]
    if not scores:
        return {}
    status = [score.verdict.status if score.verdict else "" for score in scores]
    values = {
        "mean": float(np.mean([score.total for score in scores])),
        "group_std": float(
            np.mean([np.std([s.total for s in group]) for group in groups if group])
        ),
        "correct": float(np.mean([score.is_correct for score in scores])),
        "timeout": status.count("timeout") / len(scores),
        "no_answer": (status.count("no_answer") + status.count("syntax_error")) / len(scores),
        "overlong": float(
            np.mean([s.verdict is not None and s.verdict.detail == OVERLONG for s in scores])
        ),
    }
    for name in dict.fromkeys(name for score in scores for name in score.parts):
        given = [score.parts[name] for score in scores if name in score.parts]
        values[f"part/{name}"] = float(np.mean(given))
    return values
