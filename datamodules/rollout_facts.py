"""What is logged about the rollouts of an RL step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_dlm.modules.rollouts import groups_of
from lit_dlm.trajectories.record import Trajectory


def rollout_facts(records: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the rollouts of all processes, dropped groups included.

    Args:
        records: ordered by prompt and response, with scores in their meta.

    Returns:
        By name: ``rollout/reward``, ``/correct`` (share of what was graded, if anything was),
        ``/reward_std`` (mean deviation within a group), ``/overlong`` and ``/garbled`` (shares of
        responses that fill their budget and whose text is no valid unicode), ``/response_length``
        (tokens up to the end of text), ``/num_steps``, ``/tokens_per_step``, ``/groups`` and
        ``/kept_groups`` (counts), and ``/reward/{name}`` of each part of the reward.
    """
    metas = [record.meta for record in records]
    groups = groups_of(records)
    rewards = np.array([meta["reward"] for meta in metas], dtype=np.float64)
    lengths = np.array([_length(record) for record in records], dtype=np.float64)
    steps = np.array([record.num_steps for record in records], dtype=np.float64)
    facts = {
        "reward": rewards.mean(),
        "reward_std": np.mean([rewards[group].std() for group in groups]),
        "overlong": np.mean([meta.get("overlong", False) for meta in metas]),
        "garbled": np.mean([meta.get("garbled", False) for meta in metas]),
        "response_length": lengths.mean(),
        "num_steps": steps.mean(),
        "tokens_per_step": lengths.sum() / max(steps.sum(), 1.0),
        "groups": len(groups),
        "kept_groups": sum(bool(metas[group[0]]["kept"]) for group in groups),
    }
    graded = [meta["correct"] for meta in metas if "correct" in meta]
    if graded:
        facts["correct"] = np.mean(graded)
    for name in sorted({name for meta in metas for name in meta.get("parts", {})}):
        given = [meta["parts"][name] for meta in metas if name in meta.get("parts", {})]
        facts[f"reward/{name}"] = np.mean(given)
    return {f"rollout/{name}": float(value) for name, value in facts.items()}


def _length(record: Trajectory) -> int:
    return int(record.meta.get("num_tokens", record.num_committed))
