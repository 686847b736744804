"""The TraceRL module: what it trains, in which groups, and what it and its settings refuse."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    Decoder,
    DecodeSettings,
    DynamicPolicy,
    EvenQuota,
    RandomPolicy,
    Sampler,
)
from lit_dlm.rewards import Reward, RewardScore, Rollout
from lit_dlm.rl.advantages import LeaveOneOut, RawReward
from lit_dlm.rl.batch import RolloutBatch
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.training.masking import Autoregressive, CoupledViews, RandomMasking, TraceMasking
from lit_dlm.training.terms import LossTerms
from tests.rollouts import G, decoded, every, fit, learner, module, policy, prepared, rollout_data

BLOCK = {"attention": "block", "block_size": 4}


def first_batch(rl: TraceRLModule) -> RolloutBatch:
    """A batch of six samples, with everything that training needs."""
    records = decoded(rl.backbone, 6, per_step=1)
    samples, batches = prepared(rl, records, batch_size=6)
    numbers, factor = batches[0]
    return samples.select(numbers, factor=factor, num_slots=6)


def gradients(rl: TraceRLModule, of: RolloutBatch | Tensor) -> dict[str, Tensor]:
    """Of the loss of a batch, or of a number."""
    rl.zero_grad()
    (rl.training_step(of) if isinstance(of, RolloutBatch) else of).backward()
    return {n: p.grad.clone() for n, p in rl.named_parameters() if p.grad is not None}


class Plain:
    """REINFORCE by its method alone."""

    def compute(
        self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, weight: Tensor, **_: Any
    ) -> LossTerms:
        total = -(weight * advantage * log_prob).sum()
        return LossTerms(total, {"policy": total.detach(), "certainty": log_prob.detach().mean()})


@pytest.mark.parametrize("loss", [None, Plain()])
def test_first_gradient_is_that_of_reinforce(loss: Any) -> None:
    """At a ratio of 1 the loss is a weighted sum of advantages times log-probabilities."""
    beta = {} if loss else {"objective": PolicyObjective(beta=0.5)}
    rl = module(policy(), policy_loss=loss, **beta)
    batch = first_batch(rl)
    weighted = batch.tokens.weight * batch.tokens.advantage * rl.score(batch).log_prob
    expected = gradients(rl, -weighted.sum() / 6)
    torch.testing.assert_close(gradients(rl, batch), expected, rtol=1e-7, atol=1e-12)


def test_the_parts_of_ones_own_policy_loss_are_logged(tmp_path: Path) -> None:
    rl = learner(policy_loss=Plain())
    trainer = fit(rl, rollout_data(prompts_per_step=1), tmp_path, steps=1)
    assert trainer.callback_metrics["train/certainty"] < 0
    assert "train/clip_fraction" not in trainer.callback_metrics


@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_packed_rows_have_the_gradient_of_separate_ones(origin: str) -> None:
    found = []
    for packing in (1, 4):
        rl = module(policy(**BLOCK, block_origin=origin), packing=packing)
        samples, _ = prepared(rl, decoded(rl.backbone, 6, per_step=1), advantage=RawReward())
        found.append(gradients(rl, samples.select(every(samples), num_slots=1)))
    # The layers' norms are computed in float32 in any model, so another order of sums shows.
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_copies_that_fill_up_change_nothing() -> None:
    rl = module(policy(), value=ValueObjective(backbone="head"))
    samples, _ = prepared(rl, decoded(rl.backbone, 6))
    batch = samples.select(torch.tensor([7]), factor=0.0, num_slots=4)
    assert not any(gradient.any() for gradient in gradients(rl, batch).values())


@pytest.mark.parametrize("kind", ["lora", "full", "head"])
def test_value_loss_moves_the_value_model_alone(kind: Any) -> None:
    own = policy() if kind == "full" else None
    value = ValueObjective(backbone=kind, lora=LoRASettings(rank=2))
    rl = module(policy(), value=value, value_backbone=own)
    with torch.no_grad():
        rl.value_head.weight.normal_()
    batch = first_batch(rl)
    both = gradients(rl, batch)
    wanted = rl.values(batch).detach()
    batch = batch.with_tokens(returns=wanted, old_value=wanted)
    policy_only = gradients(rl, batch)
    names = {id(p): n for n, p in rl.named_parameters()}
    of_policy, of_value = ([names[id(p)] for p in group] for group in rl.parameter_groups())
    for name in of_policy:
        torch.testing.assert_close(both[name], policy_only[name])
    assert not any(policy_only[name].any() for name in of_value)
    assert len(of_policy) + len(of_value) == sum(p.requires_grad for p in rl.parameters())
    moved = [name for name in of_value if both[name].any()]
    assert "value_head.weight" in moved
    if kind == "lora":
        assert any(".lora_B.value." in name for name in moved)
        # Neither an export nor the policy's forward knows the other adapter.
        assert not any(".lora_A.value." in name for name in of_policy)


def test_groups_are_clipped_apart() -> None:
    rl = module(policy(), value=ValueObjective(backbone="head", lr=0.5))
    groups = rl.parameter_groups()
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=1.0)
    rl.log = Mock()  # type: ignore[method-assign]
    for parameter in chain(*groups):
        parameter.grad = torch.ones_like(parameter)
    rl.configure_gradient_clipping(optimizer, 1.0, "norm")
    for group in groups:
        norm = torch.stack([p.grad.norm() for p in group]).norm()
        torch.testing.assert_close(norm, torch.ones((), dtype=norm.dtype), rtol=1e-5, atol=1e-5)
    logged = [call.kwargs["name"] for call in rl.log.call_args_list]
    assert logged == ["train/grad_norm_policy", "train/grad_norm_value"]


def test_the_rate_falls_over_the_last_rl_steps(tmp_path: Path) -> None:
    """Of four, over three quarters: whole in the first two, then 2/3 and 1/3 of it."""
    rates: dict[int, set[float]] = {}

    class Watch(ModelCheckpoint):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            rates.setdefault(trainer.current_epoch, set()).add(round(rate, 6))

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            trainer.should_stop = not trainer.ckpt_path and trainer.current_epoch == 1

    falling: Any = {"decay_share": 0.75, "optimizer": partial(torch.optim.SGD, lr=0.03)}
    for resume in (None, tmp_path / "last.ckpt"):
        saver = Watch(tmp_path, filename="last", enable_version_counter=False)
        rl = learner(**falling)
        fit(rl, rollout_data(), tmp_path, steps=4, resume=resume, callbacks=[saver])
    assert rates == {0: {0.03}, 1: {0.03}, 2: {0.02}, 3: {0.01}}
    with pytest.raises(ValueError, match=r"^trainer\.max_epochs: expected .* got -1$"):
        fit(learner(**falling), rollout_data(), tmp_path, steps=-1)


def test_temperature_of_training_is_that_of_rollouts() -> None:
    warm = Decoder(policy=RandomPolicy(), sampler=Sampler(temperature=0.7, score_on="filtered"))
    greedy, one = Decoder(policy=RandomPolicy()), PolicyObjective(temperature=1.0)
    for used, objective, expected in ((warm, None, 0.7), (greedy, None, 1.0), (warm, one, 1.0)):
        rl = module(policy(), decoders={"one": used}, objective=objective)
        assert rl.temperature == expected


def built(family: dict[str, Any] | None = None, **options: Any) -> TraceRLModule:
    return module(policy(**(family or {})), **options)


FULL, FROZEN = ValueObjective(backbone="full"), torch.nn.Linear(1, 1).requires_grad_(False)
WHOLE, INITIAL = {"lora": False}, PolicyObjective(kl_to="initial")
OWN_LOSS = {"policy_loss": Plain(), "objective": PolicyObjective(beta=0.5)}
UNWEIGHTED = TraceMasking(weight="none")
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("^method: expected 'random', got 'no'", built, {"method": "no"}),
    ("^val_method: .* 'no'", built, {"val_method": ["random", "no"]}),
    ("^decoders", built, {"decoders": {}}),
    ("^block_alignment", built, {"block_alignment": "response"}),
    ("^block_size: only", built, {"block_size": 4}),
    ("^block_size: expected", built, {"family": BLOCK, "block_size": -1}),
    ("^value_backbone: needed", built, {"value": FULL}),
    ("^value_backbone: nothing", built, {"value": FULL, "value_backbone": FROZEN}),
    ("^value: CoupledViews", built, {"value": ValueObjective(), "masking": CoupledViews()}),
    (r"^value\.backbone: 'lora'", built, {"family": WHOLE, "value": ValueObjective()}),
    ("kl_to: 'initial'", built, {"family": WHOLE, "objective": INITIAL}),
    (r"lora\.dropout", built, {"family": {"dropout": 0.1}}),
    ("^policy_loss: object", built, {"policy_loss": object()}),
    (r"^objective\.beta", built, OWN_LOSS),
    ("^masking: Autoregressive", built, {"masking": Autoregressive()}),
    (r"^masking\.weight", built, {"masking": RandomMasking(weight="1/t")}),
    (r"^masking\.weight: has", built, {"family": BLOCK, "masking": UNWEIGHTED}),
    ("^packing: expected at least 1, and 1", built, {"packing": 3}),
    ("^clip", PolicyObjective, {"clip": 2.0}),
    ("^beta", PolicyObjective, {"beta": -1.0}),
    ("^temperature", PolicyObjective, {"temperature": 0.0}),
    (r"^value\.gamma", ValueObjective, {"gamma": 1.5}),
    (r"^value\.clip", ValueObjective, {"clip": 0.0}),
    (r"^value\.lora\.dropout", ValueObjective, {"lora": LoRASettings(dropout=0.5)}),
    ("^shards", rollout_data, {"source": "shards"}),
    ("^responses_per_prompt", rollout_data, {"responses_per_prompt": 0}),
    ("^val_response_length", rollout_data, {"val_response_length": 0}),
    ("^advantage", rollout_data, {"advantage": "mean"}),
    ("^advantage: object has no method 'compute', which", rollout_data, {"advantage": object()}),
    ("^responses_per_prompt: .* GroupZScore", rollout_data, {"responses_per_prompt": 1}),
    ("LeaveOneOut", rollout_data, {"responses_per_prompt": 1, "advantage": LeaveOneOut()}),
    ("^overlong_margin", rollout_data, {"overlong_margin": G}),
    ("^filters", rollout_data, {"filters": [object()]}),
]


@pytest.mark.parametrize(("message", "make", "options"), REFUSED)
def test_contradictions_are_refused(message: str, make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_blocks_grow_in_training_before_they_do_in_rollouts(tmp_path: Path) -> None:
    """Rows of 8 see 8 cells; rollouts keep blocks of 4, and a resumed run has 8 in both."""

    def grown(size: int, method: str, **options: Any) -> TraceRLModule:
        parts: dict[str, Any] = {
            "policy": DynamicPolicy(0.9),
            "cache": BlockCache(),  # refuses other blocks than the model's
            "sampler": Sampler(temperature=1.0),
            "settings": DecodeSettings(eos_rule="stop"),
        }
        four, eight = (
            Decoder(window=BlockWindow(n, origin="sequence"), quota=EvenQuota(n), **parts)
            for n in (4, 8)
        )
        decoders = {"four": four, "eight": eight}
        family = {"attention": "block", "block_size": size}
        rl = learner(family=family, decoders=decoders, method=method, block_size=8)
        saver = ModelCheckpoint(dirpath=tmp_path, filename="last", enable_version_counter=False)
        fit(rl, rollout_data(response_length=16), tmp_path, callbacks=[saver], **options)
        return rl

    rl = grown(4, "four", steps=1)
    assert (rl.backbone.spec.block_size, rl.row_spec.block_size) == (4, 8)
    records = decoded(rl.backbone, 2)
    batch = rl.rows.samples(records).select(torch.tensor([0]))
    specs = rl.backbone.spec, rl.row_spec
    spaces = [replace(batch, spec=spec).rows().mask for spec in specs]
    assert spaces[0].sum() < spaces[1].sum()
    later = grown(8, "eight", steps=2, resume=tmp_path / "last.ckpt")
    assert later.trainer.current_epoch == 2


class Stopping(Callback):
    """Notes what is trained, and ends the run behind the second batch of the second RL step."""

    def __init__(self, folder: Path, *, is_stopping: bool) -> None:
        self.path, self.is_stopping = folder / "within.ckpt", is_stopping
        self.seen: list[tuple[int, int]] = []
        self.begun: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begun.append(trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append((trainer.current_epoch, batch_idx))
        if self.is_stopping and self.seen[-1] == (1, 1):
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def test_a_run_that_stopped_within_an_rl_step_trains_on_all_of_its_new_rollouts(
    tmp_path: Path,
) -> None:
    sizes = {"prompts_per_step": 2, "batch_size": 2, "rows_per_update": 2}
    first, second = (Stopping(tmp_path, is_stopping=stops) for stops in (True, False))
    fit(learner(), rollout_data(**sizes), tmp_path, steps=3, callbacks=[first])
    assert first.seen[-1] == (1, 1)
    rl = learner()
    fit(rl, rollout_data(**sizes), tmp_path, steps=3, callbacks=[second], resume=first.path)
    of_epochs = [[n for epoch, n in second.seen if epoch == number] for number in (1, 2)]
    assert all(numbers == list(range(len(numbers))) and len(numbers) > 2 for numbers in of_epochs)
    assert second.begun == [1, 2]
    assert rl.loop.progress.step == rl.trainer.current_epoch == 3


class Falling(Reward):
    """Pays less in every RL step."""

    name = "falling"

    def __init__(self, rl: TraceRLModule) -> None:
        self.rl = rl

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=-float(self.rl.current_epoch))] * len(group)


def test_early_stopping_looks_at_every_rl_step_when_it_ends(tmp_path: Path) -> None:
    """The second RL step is the first without a rise; validations come after the second and 4th."""
    rl = learner()
    tasks = [WordProblems("test", num_examples=2)]
    data = rollout_data(rewards=[Falling(rl)], val_tasks=tasks, prompts_per_step=1)
    stopper = EarlyStopping("rollout/reward_smoothed", mode="max", patience=1)
    trainer = fit(rl, data, tmp_path, steps=4, callbacks=[stopper], check_val_every_n_epoch=2)
    assert trainer.current_epoch == 2
    assert trainer.reload_dataloaders_every_n_epochs == 1
