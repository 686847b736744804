"""What rewards refuse, by the name of the option or of the sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from lit_dlm.rewards import (
    Graded,
    HttpStepJudge,
    MeanCorrectnessFilter,
    ProcessReward,
    Reward,
    Rewarder,
    RewardScore,
    Rollout,
)
from tests.rewards.groups import SUM, Runs, Sums, Table, rollout


class Plain(Sums):
    is_graded = False


class Bad(Reward):
    name = "bad"

    def __init__(self, *scores: RewardScore) -> None:
        self.scores = scores

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [*self.scores]


def rewarder(*rewards: Reward, tasks: Any = None, **settings: Any) -> Rewarder:
    return Rewarder(rewards, tasks or {}, **settings)


def score(reward: Reward, **tasks: Any) -> object:
    return rewarder(reward, tasks=tasks).score([[rollout("7", example=SUM)]])


LONG = RewardScore(total=0.0, token_rewards=np.zeros(4, dtype=np.float32))
REFUSED: dict[str, Callable[[], object]] = {
    "^rewards: expected at least one": lambda: rewarder(),
    "names must differ, got graded, graded": lambda: rewarder(Graded(), Graded()),
    "num_workers": lambda: rewarder(Graded(), num_workers=0),
    "allow_code_execution": lambda: rewarder(Graded(), tasks={"runs": Runs()}),
    "MeanCorrectnessFilter looks .* task 'sums'": lambda: rewarder(
        Graded(), tasks={"plain": Plain()}, filters=[MeanCorrectnessFilter()]
    ),
    "sums/train/0: reward 'bad' gave 0 scores": lambda: score(Bad()),
    "sums/train/0#0: reward 'bad' .* got nan": lambda: score(Bad(RewardScore(total=float("nan")))),
    r"sums/train/0#0: reward 'bad' .* shape \(3,\)": lambda: score(Bad(LONG)),
    "reward_chunk_length": lambda: ProcessReward(Table(), reward_chunk_length=0),
    "k_sample": lambda: ProcessReward(Table(), k_sample=0),
    "block_size": lambda: ProcessReward(Table(), block_size=0),
    "^url": lambda: HttpStepJudge(url="localhost", model="m"),
    "^deadline_s": lambda: HttpStepJudge(url="http://x", model="m", deadline_s=-1),
    "^api_key_env": lambda: HttpStepJudge(url="http://x", model="m", api_key_env="NO_SUCH_KEY"),
    "^MeanCorrectnessFilter.max: .* 0.2": lambda: MeanCorrectnessFilter(0.8, 0.2),
    "^MeanCorrectnessFilter.max: .* 1.1": lambda: MeanCorrectnessFilter(0.5, 1.1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_option_or_the_sample(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
