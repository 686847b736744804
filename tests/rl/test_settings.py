"""Settings of rollouts, prompts that are too long, and stopping by rewards of RL steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from lit_dlm.rewards import Reward, RewardScore, Rollout
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.toy.word_problems import WordProblems
from tests.rollouts import G, fit, learner, rollout_data


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "shards"}, "^shards"),
        ({"responses_per_prompt": 0}, "^responses_per_prompt"),
        ({"val_response_length": 0}, "^val_response_length"),
        ({"advantage": "mean"}, "^advantage"),
        ({"responses_per_prompt": 1}, "^responses_per_prompt: .* GroupZScore"),
        ({"responses_per_prompt": 1, "advantage": "leave_one_out"}, "LeaveOneOut"),
        ({"overlong_margin": G}, "^overlong_margin"),
        ({"filters": [object()]}, "^filters"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollout_data(**options)


def test_rows_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    rl = learner(family={"max_positions": 26})
    with pytest.raises(ValueError, match=r"^response_length: .* 26 positions"):
        fit(rl, rollout_data(), tmp_path, steps=1)


class Falling(Reward):
    """Pays less in every RL step."""

    name = "falling"

    def __init__(self, rl: TraceRLModule) -> None:
        self.rl = rl

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=-float(self.rl.current_epoch)) for _ in group]


def test_early_stopping_looks_at_every_rl_step_when_it_ends(tmp_path: Path) -> None:
    """The second RL step is the first without a rise; validations come after the second and 4th."""
    rl = learner()
    tasks = [WordProblems("test", num_examples=2)]
    data = rollout_data(rewards=[Falling(rl)], val_tasks=tasks, prompts_per_step=1)
    stopper = EarlyStopping("rollout/reward_smoothed", mode="max", patience=1)
    trainer = fit(rl, data, tmp_path, steps=4, callbacks=[stopper], check_val_every_n_epoch=2)
    assert trainer.current_epoch == 2
