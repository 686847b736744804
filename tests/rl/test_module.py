"""The TraceRL module: what it trains, in which groups, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

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
from lit_dlm.losses.terms import LossTerms
from lit_dlm.losses.views import CoupledViews
from lit_dlm.rl.advantages import RawReward
from lit_dlm.rl.items import RolloutBatch, training_rows
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from tests.rollouts import (
    decoded,
    every,
    fit,
    learner,
    module,
    policy,
    prepared,
    rollout_data,
)

BLOCK = {"attention": "block", "block_size": 4}


def first_batch(rl: TraceRLModule) -> RolloutBatch:
    """A batch of six items, with everything that training needs."""
    records = decoded(rl.backbone, 6, per_step=1)
    items, batches = prepared(rl, records, batch_size=6)
    numbers, factor = batches[0]
    return items.batch(numbers, factor=factor, num_slots=6)


def gradients(rl: TraceRLModule, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    rl.zero_grad()
    rl.training_step(batch).backward()
    return {n: p.grad.clone() for n, p in rl.named_parameters() if p.grad is not None}


def test_first_gradient_is_that_of_reinforce() -> None:
    """At a ratio of 1 the loss is a weighted sum of advantages times log-probabilities."""
    rl = module(policy(), objective=PolicyObjective(beta=0.5))
    batch = first_batch(rl)
    found = gradients(rl, batch)
    rl.zero_grad()
    log_prob = rl.score(batch).log_prob
    (-(batch.weight * batch.advantage * log_prob).sum() / 6).backward()
    for name, parameter in rl.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_packed_rows_have_the_gradient_of_separate_ones(origin: str) -> None:
    found = []
    for packing in (1, 4):
        rl = module(policy(**BLOCK, block_origin=origin), packing=packing)
        records = decoded(rl.backbone, 6, per_step=1)
        items, _ = prepared(rl, records, advantage=RawReward())
        batch = items.batch(every(items), num_slots=1)
        found.append(gradients(rl, batch))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        # The layers' norms are computed in float32 in any model, so another order of sums shows.
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_copies_that_fill_up_change_nothing() -> None:
    rl = module(policy(), value=ValueObjective(backbone="head"))
    records = decoded(rl.backbone, 6)
    items, _ = prepared(rl, records)
    batch = items.batch(torch.tensor([7]), factor=0.0, num_slots=4)
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
    groups = rl.parameter_groups()
    batch.returns = rl.values(batch).detach()  # as wanted
    batch.old_value = batch.returns
    policy_only = gradients(rl, batch)
    names = {id(p): n for n, p in rl.named_parameters()}
    for parameter in groups[0]:
        name = names[id(parameter)]
        torch.testing.assert_close(both[name], policy_only[name])
    moved = [names[id(p)] for p in groups[1] if both[names[id(p)]].abs().sum() > 0]
    assert all(not policy_only[names[id(p)]].any() for p in groups[1])
    assert len(groups[0]) + len(groups[1]) == sum(p.requires_grad for p in rl.parameters())
    assert "value_head.weight" in moved
    if kind == "lora":
        assert any(".lora_B.value." in name for name in moved)
        # Neither an export nor the policy's forward knows the other adapter.
        assert not any(".lora_A.value." in n for n in map(names.get, map(id, groups[0])))


def test_groups_are_clipped_apart() -> None:
    rl = module(policy(), value=ValueObjective(backbone="head", lr=0.5))
    policy_group, value_group = rl.parameter_groups()
    optimizer = torch.optim.SGD([{"params": policy_group}, {"params": value_group}], lr=1.0)
    logged: dict[str, float] = {}
    rl.log = lambda name, value, **_: logged.update({name: float(value)})  # type: ignore[assignment]
    for parameter in (*policy_group, *value_group):
        parameter.grad = torch.ones_like(parameter)
    rl.configure_gradient_clipping(optimizer, 1.0, "norm")
    for group in (policy_group, value_group):
        norm = torch.stack([p.grad.norm() for p in group]).norm()
        torch.testing.assert_close(norm, torch.ones((), dtype=norm.dtype), rtol=1e-5, atol=1e-5)
    assert set(logged) == {"train/grad_norm_policy", "train/grad_norm_value"}


def test_temperature_of_training_is_that_of_rollouts() -> None:
    backbone = policy()
    warm = Decoder(policy=RandomPolicy(), sampler=Sampler(temperature=0.7, score_on="filtered"))
    greedy = Decoder(policy=RandomPolicy())
    assert module(backbone, decoders={"warm": warm}).temperature == 0.7
    assert module(backbone, decoders={"greedy": greedy}).temperature == 1.0
    given = module(backbone, decoders={"w": warm}, objective=PolicyObjective(temperature=1.0))
    assert given.temperature == 1.0


def whole(**options: Any) -> TraceRLModule:
    return module(policy(lora=False), **options)


def with_dropout() -> TraceRLModule:
    backbone = policy(lora=False)
    backbone.add_adapter(LoRASettings(rank=2, dropout=0.1))
    return module(backbone)


REFUSED: dict[str, Any] = {
    "^method: expected 'random', got 'no'": lambda: module(policy(), method="no"),
    "^val_method: .* 'no'": lambda: module(policy(), val_method=["random", "no"]),
    "^decoders": lambda: module(policy(), decoders={}),
    "^block_alignment": lambda: module(policy(), block_alignment="response"),
    "^block_size: only": lambda: module(policy(), block_size=4),
    "^block_size: expected": lambda: module(policy(**BLOCK), block_size=-1),
    "^value_backbone: needed": lambda: module(policy(), value=ValueObjective(backbone="full")),
    "^value_backbone: nothing": lambda: module(
        policy(),
        value=ValueObjective(backbone="full"),
        value_backbone=policy(lora=False).requires_grad_(False),
    ),
    "^value: CoupledViews": lambda: module(
        policy(), value=ValueObjective(), corruption=CoupledViews()
    ),
    r"^value\.backbone: 'lora'": lambda: whole(value=ValueObjective()),
    "kl_to: 'initial'": lambda: whole(objective=PolicyObjective(kl_to="initial")),
    r"lora\.dropout": with_dropout,
    "^policy_loss: object": lambda: module(policy(), policy_loss=object()),
    r"^objective\.beta": lambda: module(
        policy(), policy_loss=Plain(), objective=PolicyObjective(beta=0.5)
    ),
    "^clip": lambda: PolicyObjective(clip=2.0),
    "^beta": lambda: PolicyObjective(beta=-1.0),
    "^temperature": lambda: PolicyObjective(temperature=0.0),
    r"^value\.gamma": lambda: ValueObjective(gamma=1.5),
    r"^value\.clip": lambda: ValueObjective(clip=0.0),
    r"^value\.lora\.dropout": lambda: ValueObjective(lora=LoRASettings(dropout=0.5)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_contradictions_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_options_of_the_trainer_under_which_no_rl_step_is_whole_are_refused(tmp_path: Path) -> None:
    """Lightning's own defaults become what is needed."""
    trainer = fit(learner(), rollout_data(prompts_per_step=1), tmp_path, steps=1)
    assert trainer.reload_dataloaders_every_n_epochs == 1
    early: list[Any] = [
        ModelCheckpoint(dirpath=tmp_path, save_on_train_epoch_end=False),
        EarlyStopping("rollout/reward", check_on_train_epoch_end=False),
    ]
    for name, options in (
        ("save_on_train_epoch_end: expected true", {"callbacks": early[:1]}),
        ("check_on_train_epoch_end: expected true", {"callbacks": early[1:]}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            fit(learner(), rollout_data(), tmp_path, **options)


class Plain:
    """REINFORCE by its method alone."""

    def compute(
        self,
        log_prob: torch.Tensor,
        old_log_prob: torch.Tensor,
        advantage: torch.Tensor,
        weight: torch.Tensor,
        *,
        reference: torch.Tensor | None = None,
        kl_weight: torch.Tensor | None = None,
    ) -> LossTerms:
        total = -(weight * advantage * log_prob).sum()
        return LossTerms(total, {"policy": total.detach(), "certainty": log_prob.detach().mean()})


def test_a_policy_loss_of_ones_own_is_trained_on_and_its_parts_are_logged(tmp_path: Path) -> None:
    """At a ratio of 1 its gradient is that of the clipped loss."""
    batch = first_batch(module(policy()))
    ours, clipped = (
        gradients(module(policy(), policy_loss=loss), batch) for loss in (Plain(), None)
    )
    for name, gradient in clipped.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-7, atol=1e-12)
    rl = learner(policy_loss=Plain())
    trainer = fit(rl, rollout_data(prompts_per_step=1), tmp_path, steps=1)
    assert trainer.callback_metrics["train/certainty"] < 0
    assert "train/clip_fraction" not in trainer.callback_metrics


def test_blocks_grow_in_training_before_they_do_in_rollouts(tmp_path: Path) -> None:
    """Rows of 8 see 8 cells; rollouts keep blocks of 4, and a resumed run has 8 in both."""

    def grown(size: int, method: str, **options: Any) -> TraceRLModule:
        decoders = {
            name: Decoder(
                policy=DynamicPolicy(0.9),
                window=BlockWindow(length, origin="sequence"),
                quota=EvenQuota(length),
                cache=BlockCache(),  # refuses other blocks than the model's
                sampler=Sampler(temperature=1.0),
                settings=DecodeSettings(eos_rule="stop"),
            )
            for name, length in (("four", 4), ("eight", 8))
        }
        family = {"attention": "block", "block_size": size}
        rl = learner(family=family, decoders=decoders, method=method, block_size=8)
        saver = ModelCheckpoint(dirpath=tmp_path, filename="last", enable_version_counter=False)
        fit(rl, rollout_data(response_length=16), tmp_path, callbacks=[saver], **options)
        return rl

    rl = grown(4, "four", steps=1)
    assert (rl.backbone.spec.block_size, rl.row_spec.block_size) == (4, 8)
    records = decoded(rl.backbone, 2)
    items = rl.rows.items(records)
    batch = items.batch(every(items)[:1])
    spaces = [training_rows(batch, spec).mask for spec in (rl.backbone.spec, rl.row_spec)]
    assert spaces[0].sum() < spaces[1].sum()
    later = grown(8, "eight", steps=2, resume=tmp_path / "last.ckpt")
    assert later.trainer.current_epoch == 2
