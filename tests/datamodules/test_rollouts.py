"""RL steps as epochs: replay, resuming, empty steps, refill, and that policies learn."""

import json
import logging
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint

from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.callbacks import AdapterCheckpoint, Interruption, RewardCurve, RolloutWriter
from lit_dlm.decoding import PipelineWindow
from lit_dlm.rewards import Graded, SpreadFilter
from lit_dlm.rl.batch import RolloutBatch
from lit_dlm.rl.rollout import (
    DecodingEngine,
    OnlineRollouts,
    StoredRollouts,
    draw_prompts,
    encoded_problems,
)
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from lit_dlm.tasks import PromptExample
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.training.masking import CoupledMasking, RandomMasking
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.finetuning.runs import trained
from tests.rollouts import (
    DigitReward,
    DropAll,
    G,
    decoder,
    fit,
    last_records,
    learner,
    policy,
    rollout_data,
)

LIMIT = 18
"""Tokens; some of the twenty prompts have more."""


class Losses(Callback):
    """Loss of every batch, and the weights after the first."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.first: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        if len(self.losses) == 1:
            self.first = trained(module)


def test_each_prompt_is_drawn_once_a_pass_from_anywhere() -> None:
    drawn = draw_prompts(5, 0, 12, seed=3)
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == list(range(5))
    assert drawn[:5] != drawn[5:10]
    assert draw_prompts(5, 7, 3, seed=3) == drawn[7:10]


def test_uids_of_two_problems_must_differ() -> None:
    class Copies(WordProblems):
        name = "copies"

        def examples(self) -> Sequence[PromptExample]:
            found = WordProblems("train", num_examples=2).examples()
            return [replace(one, task=self.name) for one in found]

    tasks = [WordProblems("train", num_examples=2), Copies("train")]
    message = "for row 0 of task 'word_problems' and row 0 of task 'copies'"
    with pytest.raises(ValueError, match=message):
        encoded_problems(learner(), tasks, max_length=100, response_length=G)


def test_problems_that_cannot_be_graded_are_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hopeless(WordProblems):
        def examples(self) -> Sequence[PromptExample]:
            one, *others = super().examples()
            return [replace(one, reference={"ungraded": "the tests import 'numpy'"}), *others]

    tasks = [Hopeless("train", num_examples=3)]
    found = encoded_problems(learner(), tasks, max_length=100, response_length=G)
    assert len(found) == 2
    assert "left out 1 prompts whose answers cannot be graded" in caplog.text


def test_problems_that_do_not_fit_beside_their_response_are_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A response leaves LIMIT positions, so that the problems are those of this limit."""
    rl, tasks = learner(family={"max_positions": LIMIT + G}), [WordProblems("train", 20)]
    given = {"max_length": 100, "response_length": G}
    found = encoded_problems(rl, tasks, **given)
    assert found == encoded_problems(learner(), tasks, **{**given, "max_length": LIMIT})
    assert 0 < len(found) < 20
    left_out = f"left out {20 - len(found)} prompts with more than"
    assert f"{left_out} the {LIMIT} tokens that response_length = {G} leaves" in caplog.text
    assert f"{left_out} max_prompt_length = {LIMIT} tokens" in caplog.text


@pytest.mark.slow
def test_a_signal_saves_last_though_another_checkpoint_is_newer(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, filename="best", every_n_epochs=1)
    last = ModelCheckpoint(tmp_path, filename="last", every_n_epochs=10)

    def interrupt(trainer: Trainer, module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    callbacks = [best, last, LambdaCallback(on_train_epoch_start=interrupt), Interruption()]
    with pytest.raises(SystemExit) as ended:
        fit(learner(), rollout_data(), tmp_path, steps=3, callbacks=callbacks)
    assert ended.value.code == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"best.ckpt", "last.ckpt"}


@pytest.mark.slow
@pytest.mark.parametrize("stops_early", [False, True])
def test_a_finished_run_that_is_started_again_rolls_out_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_early: bool
) -> None:
    def callbacks() -> list[Callback]:
        saver = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
        never = EarlyStopping("rollout/reward", mode="max", patience=1, min_delta=1e9)
        return [saver, *([never] if stops_early else [])]

    steps = 9 if stops_early else 1
    fit(learner(), rollout_data(), tmp_path, steps=steps, callbacks=callbacks())
    monkeypatch.setattr(OnlineRollouts, "collect", Mock(side_effect=AssertionError))
    again = {"callbacks": callbacks(), "resume": tmp_path / "last.ckpt"}
    fit(learner(), rollout_data(), tmp_path, steps=steps, **again)


def test_early_stopping_waits_for_the_epochs_that_a_run_must_have(tmp_path: Path) -> None:
    never = EarlyStopping("rollout/reward", mode="max", patience=1, min_delta=1e9)
    rl = learner()
    fit(rl, rollout_data(), tmp_path, steps=4, min_epochs=4, callbacks=[never])
    assert rl.loop.steps_begun == 4


def test_a_pipeline_of_blocks_is_refused(tmp_path: Path) -> None:
    family = {"attention": "block", "block_size": 4, "block_origin": "response"}
    piped = decoder(policy(**family)).replace(window=PipelineWindow(4))
    with pytest.raises(ValueError, match=r"decoders\.piped\.window: expected .*, got a pipeline"):
        fit(learner(family=family, decoders={"piped": piped}), rollout_data(), tmp_path)


@pytest.mark.slow
def test_stored_rollouts_replay_the_same_updates_and_are_not_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second RL step, too: replay trains on what was stored, whatever it would roll out. The
    third of the two that are stored is the first once more."""
    value = ValueObjective(backbone="lora", lora=LoRASettings(rank=2), lr=1e-2)
    online, again = Losses(), Losses()
    folder, filters = tmp_path / "rollouts", [SpreadFilter()]
    callbacks = [online, RolloutWriter(str(folder))]
    fit(learner(value=value), rollout_data(filters=filters), tmp_path, callbacks=callbacks)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    rl = learner(value=value)
    data = rollout_data(filters=filters, source="shards", shards=str(folder))
    with caplog.at_level(logging.INFO):
        fit(rl, data, tmp_path, steps=3, callbacks=[again, RolloutWriter(str(folder))])
    assert len(online.losses) >= 4
    assert again.losses[: len(online.losses)] == online.losses
    assert all(again.first[name].equal(weight) for name, weight in online.first.items())
    assert {record.meta["rl_step"] for record in last_records(rl)} == {0}
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
    assert json.loads(files[folder / "run.json"])["hardware"]["batch_size"] == 6  # of a decode
    assert caplog.text.count("writes nothing, the rollouts are those of") == 1
    assert caplog.text.count("filters, overlong_is_wrong and overlong_margin are not read") == 1
    stored = StoredRollouts(folder, mask_id=2)
    assert stored.steps == [0, 1]
    assert 0 < stored.collect(1).scored[0].policy_version < len(online.losses)
    assert len(stored.collect(0).scored) == 12
    with pytest.raises(ValueError, match=r"with mask id 9 .* got mask id 2"):
        StoredRollouts(folder, mask_id=9)
    with pytest.raises(ValueError, match="no trajectory shards"):
        StoredRollouts(tmp_path, mask_id=2)


def written(
    tmp_path: Path, *callbacks: Callback, weight: float = 1.0, resume: Path | None = None
) -> list[Trajectory]:
    """The last rollouts of a run of three RL steps of twelve, which ``rollouts`` holds."""
    reward, rl = DigitReward(), learner()
    reward.weight = weight
    data = rollout_data(rewards=[reward])
    given = [RolloutWriter(str(tmp_path / "rollouts")), *callbacks]
    fit(rl, data, tmp_path, steps=3, resume=resume, callbacks=given)
    return last_records(rl)


def drawn(records: Iterable[Trajectory]) -> dict[str, bytes]:
    """Tokens and log-probabilities by uid."""
    return {
        one.uid: one.tokens.tobytes() + one.signals["commit_log_prob"].tobytes() for one in records
    }


@pytest.mark.slow
def test_a_folder_of_rollouts_is_that_of_one_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Anew: refused. Resumed two steps back with another reward: those steps are replaced."""
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    before = drawn(written(tmp_path, saver))
    former = drawn(TrajectoryShardReader(tmp_path / "rollouts"))
    with pytest.raises(ValueError, match=r"rollouts: expected .* without rollouts.* got 36 of a"):
        written(tmp_path, weight=-1.0)
    with caplog.at_level(logging.WARNING):
        again = written(tmp_path, weight=-1.0, resume=tmp_path / "epoch=0.ckpt")
    assert "deleted 24 records" in caplog.text
    held = list(TrajectoryShardReader(tmp_path / "rollouts"))
    found, after = drawn(held), drawn(again)
    assert found.keys() == former.keys()
    assert after.keys() == before.keys()
    assert after != before
    assert after.items() <= found.items()
    first = {record.uid for record in held if record.meta["rl_step"] == 0}
    assert len(first) == 12
    assert all(found[uid] == former[uid] for uid in first)


@pytest.mark.slow
def test_a_run_cut_short_before_its_first_checkpoint_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can go on with its 24 rollouts; a finished run's are another matter."""
    saver = partial(ModelCheckpoint, dirpath=tmp_path, every_n_epochs=3)

    def interrupt(trainer: Trainer, _: LightningModule) -> None:
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        written(tmp_path, saver(), LambdaCallback(on_train_epoch_end=interrupt))
    assert len(list(TrajectoryShardReader(tmp_path / "rollouts"))) == 24
    with caplog.at_level(logging.WARNING):
        written(tmp_path, saver())
    assert "deleted 24 records" in caplog.text
    assert len(list(TrajectoryShardReader(tmp_path / "rollouts"))) == 36
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    with pytest.raises(ValueError, match="since this run begins anew, got 36 of a former one"):
        written(tmp_path, saver())


def test_nothing_graded_is_no_accuracy(tmp_path: Path) -> None:
    tasks = [WordProblems("test", num_examples=2)]
    rl = learner()
    data = rollout_data(val_tasks=tasks, prompts_per_step=1, val_response_length=2 * G)
    fit(rl, data, tmp_path, steps=1)
    assert rl.loop.validation.last["num_steps"] == G  # of two cells each, for nothing ends so early
    examples = {one.uid: one for one in WordProblems("train", num_examples=20).examples()}
    for record in last_records(rl):  # of its own prompt
        assert record.num_generated == G
        assert record.prompt_ids.tolist() == rl.encode(examples[record.uid.partition("@")[0]])
    assert rl.loop.validation.rewarder.rewards[0] is data.rewards[0]  # it may hold a model
    assert "reward" in rl.loop.validation.last
    assert "accuracy" not in rl.loop.validation.last
    assert "rollout/correct" not in rl.loop.current.metrics
    late = DigitReward()
    late.after_filters = True
    with pytest.raises(ValueError, match=r"val_tasks: .* digits does; add one to rewards"):
        fit(learner(), rollout_data(val_tasks=tasks, rewards=[late]), tmp_path, steps=1)


def test_where_nothing_grades_the_reward_is_monitored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """dLLM-RL's settings monitor an accuracy. What is not logged is refused before any decode."""
    tasks, methods = [WordProblems("test", num_examples=2)], {"one": decoder(policy())}
    methods["two"] = methods["one"]

    def go(monitor: str, val_tasks: Any = tasks, **options: Any) -> AdapterCheckpoint:
        rl = learner(decoders=methods, val_method=["one", "two"])
        best = AdapterCheckpoint(str(tmp_path / monitor), monitor=monitor, mode="max")
        data = rollout_data(val_tasks=val_tasks, prompts_per_step=1, **options)
        fit(rl, data, tmp_path, steps=1, callbacks=[best])
        return best

    assert go("val/two/accuracy").monitor == "val/two/reward"
    assert "nothing is graded on val_tasks, so val/two/reward replaces val/two/acc" in caplog.text
    assert go("val/accuracy", rewards=[DigitReward(), Graded()]).monitor == "val/accuracy"
    for monitor, val_tasks, expected in (
        ("val/acuracy", tasks, "one of val/reward, .*val/two/num_prompts, got 'val/acuracy'"),
        ("val/three/accuracy", tasks, "one of val/reward, .*, got 'val/three/accuracy'"),
        ("val/reward", None, "val_tasks, whose scores it names, got 'val/reward'"),
    ):
        with (
            patch.object(DecodingEngine, "records", side_effect=AssertionError),
            pytest.raises(ValueError, match=rf"^AdapterCheckpoint\.monitor: expected {expected}"),
        ):
            go(monitor, val_tasks)


def test_what_a_callback_of_ones_own_logs_can_be_monitored(tmp_path: Path) -> None:
    class Own(Callback):
        def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            pl_module.log("val/own", 1.0)

    tasks = [WordProblems("test", num_examples=2)]
    best = AdapterCheckpoint(str(tmp_path / "best"), monitor="val/own", mode="max")
    data = rollout_data(val_tasks=tasks, prompts_per_step=1)
    fit(learner(), data, tmp_path, steps=1, callbacks=[Own(), best])
    assert best.monitor == "val/own"


@pytest.mark.parametrize(("limit", "count"), [(2, 4), (0.4, 2), (0.1, 1), (1.0, 5)])
def test_validation_can_be_limited(tmp_path: Path, limit: int | float, count: int) -> None:
    """A batch is six responses of every decoder, here to two of five prompts; or a share of all."""
    methods = {name: decoder(policy()) for name in ("one", "two")}
    rl = learner(decoders=methods, val_method=list(methods))
    tasks = [WordProblems("test", num_examples=5)]
    data = rollout_data(val_tasks=tasks, val_responses=3, prompts_per_step=1)
    trainer = fit(rl, data, tmp_path, steps=1, limit_val_batches=limit)
    scores = trainer.callback_metrics
    assert scores["val/num_prompts"] == scores["val/two/num_prompts"] == count
    assert trainer.limit_val_batches == limit  # for what this trainer does next


def test_every_pass_trains_once_on_each_state(tmp_path: Path) -> None:
    batches: list[list[tuple[str, str]]] = []

    def note(trainer: Any, module: Any, outputs: Any, batch: RolloutBatch, *_: Any) -> None:
        rows = zip(batch.states.response.tolist(), batch.states.supervised.tolist(), strict=True)
        batches.append([(batch.responses.uids[sample], str(cells)) for sample, cells in rows])

    data = rollout_data(passes=2, batch_size=16, prompts_per_step=2)
    fit(learner(), data, tmp_path, steps=1, callbacks=[LambdaCallback(on_train_batch_end=note)])
    half = len(batches) // 2
    first, second = (list(chain(*part)) for part in (batches[:half], batches[half:]))
    assert half > 1
    assert len(set(first)) == len(first)
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.slow
def test_a_resumed_run_has_the_same_curve_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first of three RL steps: same rewards, same weights, optimiser state included."""
    monkeypatch.setattr("lit_dlm.callbacks.reward_curve.plot_run", Mock())

    def run(resume: Path | None = None) -> tuple[Any, Any, Any]:
        curve = RewardCurve(str(tmp_path / "curve"))
        best = {"monitor": "val/reward", "mode": "max", "save_top_k": -1}
        saver = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", **best)
        rl = learner(value=ValueObjective(backbone="head", lr=1e-2))
        tasks = [WordProblems("test", num_examples=2)]
        data = rollout_data(filters=[SpreadFilter()], val_tasks=tasks)
        fit(rl, data, tmp_path, steps=3, resume=resume, callbacks=[curve, saver])
        return curve.points, trained(rl), rl.loop.progress

    whole, weights, progress = run()
    resumed, after, progress_after = run(tmp_path / "epoch=0.ckpt")
    assert [point["step"] for point in resumed] == [1, 2, 3]
    for one, other in zip(whole, resumed, strict=True):
        for name, value in one.items():
            if not name.startswith("time/"):
                assert other[name] == value, (one["step"], name)
    assert all(after[name].equal(weight) for name, weight in weights.items())
    assert progress_after == progress
    assert (progress.step, progress.cursor) == (3, 12)
    assert "val/reward" in whole[0]


@pytest.mark.slow
def test_an_empty_rl_step_is_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rl = learner(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.5))
    before = trained(rl)
    data = rollout_data(filters=[DropAll()])
    with caplog.at_level(logging.WARNING):
        fit(rl, data, tmp_path, steps=2)
    assert all(weight.equal(before[name]) for name, weight in trained(rl).items())
    assert rl.loop.current.metrics["rollout/skipped_steps"] == 2.0
    assert rl.loop.current.metrics["rollout/kept_groups"] == 0.0
    assert rl.loop.current.metrics["rollout/groups"] == 4.0
    assert "RL step 1: the filters dropped all 4 groups" in caplog.text
    assert rl.loop.progress.cursor == 8


LEARNING: dict[str, dict[str, Any]] = {
    "value": {"value": ValueObjective(backbone="head", lr=0.05)},
    "random": {"masking": RandomMasking(min_t=0.1, max_t=0.9, copies=4)},
    "coupled": {"masking": CoupledMasking(pairs=2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", LEARNING.values(), ids=LEARNING)
def test_policies_learn(tmp_path: Path, options: dict[str, Any]) -> None:
    """A random model learns to write digits; the first on the states of its rollouts."""
    rewards: list[float] = []
    note = LambdaCallback(
        on_train_epoch_end=lambda _, rl: rewards.append(rl.loop.current.metrics["rollout/reward"])
    )
    optimizer = partial(torch.optim.AdamW, lr=0.03)
    objective = PolicyObjective(beta=0.0)
    rl = learner(lora=False, objective=objective, optimizer=optimizer, **options).float()
    data = rollout_data(responses_per_prompt=8, rollout_batch_size=32, batch_size=32)
    fit(rl, data, tmp_path, steps=8, callbacks=[note])
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.15, rewards
