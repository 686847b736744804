"""Settings that would go unnoticed: rows beyond the model's length, and stopping too late."""

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


def test_rows_beyond_the_backbones_positions_are_counted_and_refused(tmp_path: Path) -> None:
    rl = learner(family={"max_positions": 26})
    lengths = [len(rl.encode(e)) for e in WordProblems("train", num_examples=20).examples()]
    num_long = sum(length + G > 26 for length in lengths)
    assert 0 < num_long < 20
    refused = rf"^response_length: {num_long} of 20 prompts have, with a response of 8 tokens, more"
    with pytest.raises(ValueError, match=refused):
        fit(rl, rollout_data(), tmp_path, steps=1)
    rl = learner(family={"max_positions": max(lengths) + G})
    data = rollout_data(val_tasks=[WordProblems("test", num_examples=2)], val_response_length=50)
    refused = r"^val_response_length: 2 of 2 prompts have, with a response of 50 tokens, more than"
    with pytest.raises(ValueError, match=refused):
        fit(rl, data, tmp_path, steps=1)


class Falling(Reward):
    """Pays less in every RL step."""

    name = "falling"

    def __init__(self, rl: TraceRLModule) -> None:
        self.rl = rl

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=-float(self.rl.current_epoch)) for _ in group]


def run(folder: Path, **options: Any) -> int:
    """RL steps until the reward has not risen for one."""
    rl = learner()
    tasks = [WordProblems("test", num_examples=2)]
    data = rollout_data(rewards=[Falling(rl)], val_tasks=tasks, prompts_per_step=1)
    stopper = EarlyStopping("rollout/reward_smoothed", mode="max", patience=1, **options)
    trainer = fit(rl, data, folder, steps=4, callbacks=[stopper], check_val_every_n_epoch=2)
    return trainer.current_epoch


def test_early_stopping_looks_at_every_rl_step_when_it_ends(tmp_path: Path) -> None:
    """The second RL step is the first without a rise; validations come after the second and 4th."""
    assert run(tmp_path) == 2
    with pytest.raises(ValueError, match=r"check_on_train_epoch_end: expected true.*got false"):
        run(tmp_path, check_on_train_epoch_end=False)
