"""The curve of a run: what is in the line of a step, and when there is a step 0."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LambdaCallback

from lit_dlm.callbacks import RewardCurve
from lit_dlm.rewards import GroupFilter, Reward, RewardScore, Rollout
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.toy.word_problems import WordProblems
from tests.rollouts import DigitReward, decoder, fit, learner, policy, rollout_data


class FirstStep(GroupFilter):
    """Keeps the groups of the first RL step."""

    def __init__(self, rl: TraceRLModule) -> None:
        self.rl = rl

    def keep(self, scores: Sequence[RewardScore]) -> bool:
        return self.rl.current_epoch == 0


class Late(Reward):
    """Looks at groups that are kept."""

    name = "late"
    after_filters = True

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=0.0) for _ in group]


def test_a_step_without_updates_repeats_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    rl, curve = learner(), RewardCurve(str(tmp_path))
    data = rollout_data(filters=[FirstStep(rl)], rewards=[DigitReward(), Late()])
    fit(rl, data, tmp_path, callbacks=[curve])
    first, second = curve.points
    gone = {"rollout/mismatch", "rollout/mismatch_signed", "rollout/reward/late"}
    assert first["rollout/items"] > 0 == second["rollout/items"]
    assert gone | {"train/loss", "train/ratio", "train/grad_norm_policy"} <= first.keys()
    assert {name for name in first if name not in second} == gone | {
        name for name in first if name.startswith("train/")
    }
    times = {"time/train", "time/rollout"}
    assert {"rollout/reward", "rollout/reward/digits"} | times <= second.keys()
    assert (tmp_path / "reward_curve.png").is_file()


@pytest.mark.parametrize("sanity_steps", [1, 2, -1])
def test_step_0_is_of_all_held_out_prompts_or_of_none(tmp_path: Path, sanity_steps: int) -> None:
    """One batch is one of the two decoders; Lightning's own 2 stands for all of them."""
    backbone = policy()
    decoders = {"random": decoder(backbone), "slow": decoder(backbone, per_step=1)}
    rl = learner(decoders=decoders, val_method=["random", "slow"])
    tasks = [WordProblems("test", num_examples=5)]
    data = rollout_data(val_tasks=tasks, rollout_batch_size=2, prompts_per_step=1)
    curve, checked = RewardCurve(str(tmp_path)), {}
    seen = LambdaCallback(on_sanity_check_end=lambda _, rl: checked.update(rl.loop.validation.last))
    options = {"num_sanity_val_steps": sanity_steps}
    fit(rl, data, tmp_path, steps=1, callbacks=[curve, seen], **options)
    assert curve.points[-1]["val/slow/num_prompts"] == checked["num_prompts"] == 5
    is_whole = sanity_steps != 1
    assert [point["step"] for point in curve.points] == ([0, 1] if is_whole else [1])
    assert any(name.startswith("slow/") for name in checked) == is_whole
    if is_whole:
        assert curve.points[0]["val/num_prompts"] == curve.points[0]["val/slow/num_prompts"] == 5
