"""Grades rollouts in threads and adds up the rewards of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from lit_dlm.grading import IsolationLevel, SandboxError, Verdict
from lit_dlm.ops.options import at_least
from lit_dlm.plugs import checked_plug
from lit_dlm.rewards.base import Reward, RewardScore, Rollout
from lit_dlm.rewards.filters import GroupFilter
from lit_dlm.tasks import Task, require_code_execution

OVERLONG = "the response fills its budget"
"""Detail of the verdict on an overlong response."""

# Groups at the same time whose costly rewards are waited for.
_GROUPS = 64


class Rewarder:
    """Turns groups of rollouts into scores: verdicts first, then every reward, then their sum.

    Equal responses to a prompt are graded once, in a thread.

    Args:
        rewards: with different names.
        tasks: those of the prompts, by name.
        filters: decide here only whether there are verdicts and which groups are worth the rewards
            that ask to come after them; dropping a group is left to the caller.
        overlong_is_wrong: scores truncated responses as incorrect without grading them, as dLLM-RL
            does in training.
        num_workers: threads that grade at the same time.
        require_isolation: the least that model-written code must run in: it attacks its grader
            as training goes on.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        tasks: Mapping[str, Task],
        *,
        filters: Sequence[GroupFilter] = (),
        overlong_is_wrong: bool = True,
        num_workers: int = 1,
        require_isolation: IsolationLevel = "namespaces",
    ) -> None:
        rewards = [checked_plug(reward, Reward, option="rewards") for reward in rewards]
        names = [reward.name for reward in rewards]
        if not names:
            raise ValueError("rewards: expected at least one reward, got none")
        if len(set(names)) < len(names):
            raise ValueError(f"rewards: names must differ, got {', '.join(names)}")
        at_least(1, num_workers=num_workers)
        require_code_execution(tasks.values(), isolation=require_isolation)
        for task in tasks.values():
            for keep in filters:
                if keep.needs_verdict and not task.is_graded:
                    raise ValueError(
                        f"filters: {type(keep).__name__} looks at what is right, which task "
                        f"{task.name!r} cannot tell"
                    )
        self.rewards = tuple(rewards)
        self.tasks = dict(tasks)
        self.filters = tuple(filters)
        self.overlong_is_wrong = overlong_is_wrong
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[list[RewardScore]]:
        """Scores groups, each of all responses to one prompt, in the order given.

        A group that the filters drop has no share of the rewards that come after them.
        """
        groups = self._graded(groups)
        early = [reward for reward in self.rewards if not reward.after_filters]
        late = [reward for reward in self.rewards if reward.after_filters]
        scored = []
        for group in groups:
            scores = [
                RewardScore(total=0.0, verdict=rollout.verdict, is_correct=rollout.is_correct)
                for rollout in group
            ]
            for reward in early:
                scores = _add(reward, scores, group)
            scored.append(scores)

        def with_late(scores: list[RewardScore], group: list[Rollout]) -> list[RewardScore]:
            if all(keep.keep(scores) for keep in self.filters):
                for reward in late:
                    scores = _add(reward, scores, group)
            return scores

        if not late or not groups:
            return scored
        # They wait for others, so all groups wait together.
        with ThreadPoolExecutor(min(len(groups), _GROUPS), thread_name_prefix="late") as pool:
            return list(pool.map(with_late, scored, groups))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _graded(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Rollout]]:
        askers: tuple[Reward | GroupFilter, ...] = (*self.rewards, *self.filters)
        if not any(asker.needs_verdict for asker in askers):
            return [list(group) for group in groups]
        # By the problem itself, not its name: what two tasks call alike is graded apart.
        futures: dict[tuple[int, str], Future[Verdict]] = {}
        for rollout in (rollout for group in groups for rollout in group):
            key = (id(rollout.example), rollout.text)
            if key not in futures and not self._is_wrong_unread(rollout):
                futures[key] = self._pool.submit(self._grade, rollout)
        return [
            [
                replace(
                    rollout,
                    verdict=Verdict(status="wrong", detail=OVERLONG)
                    if self._is_wrong_unread(rollout)
                    else futures[id(rollout.example), rollout.text].result(),
                )
                for rollout in group
            ]
            for group in groups
        ]

    def _is_wrong_unread(self, rollout: Rollout) -> bool:
        return self.overlong_is_wrong and rollout.is_overlong

    def _grade(self, rollout: Rollout) -> Verdict:
        task = self.tasks.get(rollout.example.task)
        if task is None:
            raise ValueError(
                f"{rollout.example.uid}: the task {rollout.example.task!r} is not in the run "
                f"({', '.join(self.tasks)})"
            )
        if not task.is_graded:
            return Verdict(status="ungraded", answer=rollout.text)
        try:
            return task.grade(rollout.example, rollout.text)
        except (ValueError, SandboxError) as error:
            raise type(error)(f"{rollout.trajectory.uid}: {error}") from error


def _add(reward: Reward, scores: list[RewardScore], group: Sequence[Rollout]) -> list[RewardScore]:
    shares = reward.score(group)
    if len(shares) != len(group):
        raise ValueError(
            f"{group[0].example.uid}: reward {reward.name!r} gave {len(shares)} scores for "
            f"{len(group)} responses"
        )
    return [_sum(reward, *pair) for pair in zip(scores, shares, group, strict=True)]


def _sum(reward: Reward, score: RewardScore, share: RewardScore, rollout: Rollout) -> RewardScore:
    uid, name = rollout.trajectory.uid, reward.name
    if not math.isfinite(share.total):
        raise ValueError(f"{uid}: reward {name!r} is {share.total!r}")
    token_rewards = score.token_rewards
    if share.token_rewards is not None:
        shape = (rollout.trajectory.num_generated,)
        if share.token_rewards.shape != shape or not np.isfinite(share.token_rewards).all():
            raise ValueError(
                f"{uid}: reward {name!r} must give finite numbers of shape {shape}, got shape "
                f"{share.token_rewards.shape}"
            )
        weighted = np.float32(reward.weight) * share.token_rewards.astype(np.float32)
        token_rewards = weighted if token_rewards is None else token_rewards + weighted
    return replace(
        score,
        total=score.total + reward.weight * share.total,
        token_rewards=token_rewards,
        parts={**score.parts, name: share.total, **share.parts},
    )
