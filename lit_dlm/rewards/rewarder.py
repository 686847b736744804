"""Grades rollouts in threads and adds up the rewards of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from lit_dlm.grading import IsolationLevel, SandboxError, Verdict
from lit_dlm.rewards.base import GroupFilter, Reward, RewardScore, Rollout
from lit_dlm.system.options import at_least, refuse, refuse_first
from lit_dlm.tasks import Task, require_code_execution

# Detail of the verdict on an overlong response.
OVERLONG = "the response fills its budget"

# Groups whose costly rewards are waited for at the same time.
_GROUPS = 64


class Rewarder:
    """Turns groups of rollouts into scores: verdicts first, then every reward, then their sum.

    Args:
        overlong_is_wrong: scores truncated responses as incorrect without grading them, as dLLM-RL
            does in training.
        num_workers: threads that grade at the same time.
        require_isolation: weakest isolation that model-written code may run in: in the course of
            training it attacks its grader.
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
        self.rewards = tuple(rewards)
        self.tasks = dict(tasks)
        # Filters have only two effects here: they may need verdicts, and groups that they drop get
        # none of the rewards that come after them.
        self.filters = tuple(filters)
        self._askers: tuple[Reward | GroupFilter, ...] = (*self.rewards, *self.filters)
        self.overlong_is_wrong = overlong_is_wrong
        names = [reward.name for reward in self.rewards]
        at_least(1, rewards=len(names), num_workers=num_workers)
        blind = [
            f"{type(keep).__name__} looks at what is right, which task {task.name!r} cannot tell"
            for task in self.tasks.values()
            for keep in self.filters
            if keep.needs_verdict and not task.is_graded
        ]
        refuse_first(
            (len(set(names)) < len(names), f"rewards: names must differ, got {', '.join(names)}"),
            (blind, f"filters: {', '.join(blind)}"),
        )
        require_code_execution(tasks.values(), isolation=require_isolation)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")

    @property
    def grades(self) -> bool:
        """Whether any response gets a verdict."""
        asks = any(asker.needs_verdict for asker in self._askers)
        return asks and any(task.is_graded for task in self.tasks.values())

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[list[RewardScore]]:
        """Scores groups, in the order given; each has all responses to one prompt."""
        graded = self._graded(groups)
        early = [reward for reward in self.rewards if not reward.after_filters]
        late = [reward for reward in self.rewards if reward.after_filters]
        scored = [_added(early, [_unpaid(one) for one in group], group) for group in graded]

        def with_late(scores: list[RewardScore], group: list[Rollout]) -> list[RewardScore]:
            is_kept = all(keep.keep(scores) for keep in self.filters)
            return _added(late, scores, group) if is_kept else scores

        if not late or not graded:
            return scored
        # Late rewards wait for servers, so all groups wait at the same time.
        with ThreadPoolExecutor(min(len(graded), _GROUPS), thread_name_prefix="late") as pool:
            return list(pool.map(with_late, scored, graded))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _graded(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Rollout]]:
        """Returns the groups with their verdicts, if a reward or filter needs them."""
        if not any(asker.needs_verdict for asker in self._askers):
            return [list(group) for group in groups]
        # Equal responses to a prompt are graded once, for a program may run for seconds.
        unread: Future[Verdict] = Future()
        unread.set_result(Verdict(status="wrong", detail=OVERLONG))
        # By the problem object, not its uid: two tasks may share a uid and grade differently.
        futures: dict[tuple[int, str], Future[Verdict]] = {}

        def verdict(rollout: Rollout) -> Future[Verdict]:
            is_graded = self.tasks[rollout.example.task].is_graded
            if self.overlong_is_wrong and rollout.is_overlong and is_graded:
                return unread
            key = (id(rollout.example), rollout.text)
            if key not in futures:
                futures[key] = self._pool.submit(self._grade, rollout)
            return futures[key]

        waiting = [[(one, verdict(one)) for one in group] for group in groups]
        return [[replace(one, verdict=found.result()) for one, found in row] for row in waiting]

    def _grade(self, rollout: Rollout) -> Verdict:
        task = self.tasks[rollout.example.task]
        if not task.is_graded:
            return Verdict(status="ungraded", answer=rollout.text)
        try:
            return task.grade(rollout.example, rollout.text)
        except (ValueError, SandboxError) as error:
            # Of thousands of responses in flight, the one at fault.
            raise type(error)(f"{rollout.trajectory.uid}: {error}") from error


def _unpaid(rollout: Rollout) -> RewardScore:
    return RewardScore(total=0.0, verdict=rollout.verdict, is_correct=rollout.is_correct)


def _added(
    rewards: Sequence[Reward], scores: list[RewardScore], group: Sequence[Rollout]
) -> list[RewardScore]:
    """Adds to the scores of a group what some rewards pay."""
    for reward in rewards:
        shares = reward.score(group)
        message = f"reward {reward.name!r} gave {len(shares)} scores for {len(group)} responses"
        refuse_first((len(shares) != len(group), f"{group[0].example.uid}: {message}"))
        if others := [one for one in shares if not isinstance(one, RewardScore)]:
            refuse(f"reward {reward.name!r}", "a RewardScore for each response", repr(others[0]))
        rows = zip(scores, shares, group, strict=True)
        scores = [_sum(reward, score, share, rollout) for score, share, rollout in rows]
    return scores


def _sum(reward: Reward, score: RewardScore, share: RewardScore, rollout: Rollout) -> RewardScore:
    shape, paid = (rollout.trajectory.num_generated,), share.token_rewards
    is_sound = paid is None or (paid.shape == shape and bool(np.isfinite(paid).all()))
    if not (math.isfinite(share.total) and is_sound):
        raise ValueError(
            f"{rollout.trajectory.uid}: reward {reward.name!r} must give finite numbers, those per "
            f"token of shape {shape}; got {share.total!r} and shape {getattr(paid, 'shape', None)}"
        )
    # float32 before the sum, so that its rounding does not depend on the dtype a reward chose.
    token_rewards = score.token_rewards
    if paid is not None:
        weighted = np.float32(reward.weight) * paid.astype(np.float32)
        token_rewards = weighted if token_rewards is None else token_rewards + weighted
    return replace(
        score,
        total=score.total + reward.weight * share.total,
        token_rewards=token_rewards,
        parts={**score.parts, reward.name: share.total, **share.parts},
    )
