"""The TraceRL module: what it trains, in which groups, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.backbones.lora_settings import LoRASettings
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    Decoder,
    DecodeSettings,
    DynamicPolicy,
    EvenQuota,
    FullWindow,
    RandomPolicy,
    Sampler,
)
from lit_dlm.losses.corruption import RandomMasking, TraceMasking
from lit_dlm.losses.terms import LossTerms
from lit_dlm.losses.views import CoupledViews
from lit_dlm.rl.advantages import GroupZScore, RawReward
from lit_dlm.rl.items import RolloutBatch, collate_items, training_rows
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from lit_dlm.rl.step import fill_advantages, fill_old_scores, shard_items
from tests.rollouts import decoded, decoder, fit, learner, module, policy, rollout_data

BLOCK = {"attention": "block", "block_size": 4}


def prepared(rl: TraceRLModule, *, per_step: int = 1) -> list[RolloutBatch]:
    """One batch per six items, with everything that training needs."""
    rl.eval()
    records = decoded(rl.backbone, 6, per_step=per_step)
    items = rl.rows.items(records)
    fill_advantages(rl, items, records, advantage=GroupZScore(), batch_size=8)
    batches = shard_items([item.size for item in items], batch_size=6)[0]
    fill_old_scores(rl, batches, items, records)
    return [
        collate_items([(items[s.item], s.factor) for s in slots], records, rl.row_spec, num_slots=6)
        for slots in batches
    ]


def gradients(rl: TraceRLModule, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    rl.zero_grad()
    rl.training_step(batch).backward()
    return {n: p.grad.clone() for n, p in rl.named_parameters() if p.grad is not None}


def test_first_gradient_is_that_of_reinforce() -> None:
    """At a ratio of 1 the loss is a weighted sum of advantages times log-probabilities."""
    rl = module(policy(), objective=PolicyObjective(beta=0.5))
    batch = prepared(rl)[0]
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
        rl.eval()
        records = decoded(rl.backbone, 6, per_step=1)
        items = rl.rows.items(records)
        fill_advantages(rl, items, records, advantage=RawReward(), batch_size=8)
        fill_old_scores(
            rl,
            shard_items([item.size for item in items], batch_size=8)[0],
            items,
            records,
        )
        batch = collate_items([(i, 1.0) for i in items], records, rl.row_spec, num_slots=1)
        found.append(gradients(rl, batch))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        # The layers' norms are computed in float32 in any model, so another order of sums shows.
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_copies_that_fill_a_batch_change_nothing() -> None:
    rl = module(policy())
    rl.eval()
    records = decoded(rl.backbone, 6)
    items = rl.rows.items(records)
    fill_advantages(rl, items, records, advantage=GroupZScore(), batch_size=8)
    fill_old_scores(
        rl,
        shard_items([item.size for item in items], batch_size=8)[0],
        items,
        records,
    )
    real = [(item, 1.0) for item in items[:3]]
    plain = gradients(rl, collate_items(real, records, rl.row_spec, num_slots=4))
    filled = gradients(
        rl, collate_items([*real, (items[7], 0.0)], records, rl.row_spec, num_slots=4)
    )
    for name, gradient in plain.items():
        torch.testing.assert_close(filled[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["lora", "full", "head"])
def test_value_loss_moves_the_value_model_alone(kind: Any) -> None:
    own = policy() if kind == "full" else None
    value = ValueObjective(backbone=kind, lora=LoRASettings(rank=2))
    rl = module(policy(), value=value, value_backbone=own)
    with torch.no_grad():
        rl.value_head.weight.normal_()
    batch = prepared(rl)[0]
    both = gradients(rl, batch)
    groups = rl.parameter_groups()
    rl.trains_value = False
    policy_only = gradients(rl, batch)
    names = {id(p): n for n, p in rl.named_parameters()}
    for parameter in groups[0]:
        name = names[id(parameter)]
        torch.testing.assert_close(both[name], policy_only[name])
    moved = [names[id(p)] for p in groups[1] if both[names[id(p)]].abs().sum() > 0]
    assert moved
    assert all(not policy_only[names[id(p)]].any() for p in groups[1])
    assert len(groups[0]) + len(groups[1]) == sum(p.requires_grad for p in rl.parameters())
    assert "value_head.weight" in moved
    if kind == "lora":
        assert any(".lora_B.value." in name for name in moved)
        # Neither an export nor the policy's forward knows the other adapter.
        assert not any(".lora_A.value." in n for n in map(names.get, map(id, groups[0])))


def test_groups_are_clipped_apart_and_values_rest_between() -> None:
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
    rl.trains_value = False
    rl.configure_gradient_clipping(optimizer, 1.0, "norm")
    assert all(parameter.grad is None for parameter in value_group)


def test_temperature_of_training_is_that_of_rollouts() -> None:
    backbone = policy()
    warm = Decoder(policy=RandomPolicy(), sampler=Sampler(temperature=0.7, score_on="filtered"))
    greedy = Decoder(policy=RandomPolicy())
    assert module(backbone, decoders={"warm": warm}).temperature == 0.7
    assert module(backbone, decoders={"greedy": greedy}).temperature == 1.0
    given = module(backbone, decoders={"w": warm}, objective=PolicyObjective(temperature=1.0))
    assert given.temperature == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "other"}, "method: expected one of random"),
        ({"decoders": {}}, "decoders: expected at least one"),
        ({"block_alignment": "response"}, "block_alignment: only for block attention"),
        ({"value": ValueObjective(backbone="full")}, "value_backbone: needed"),
        ({"value": ValueObjective(), "corruption": CoupledViews()}, "value: CoupledViews"),
        ({"block_size": 4}, "block_size: expected a positive number with block attention"),
        ({"method": "no"}, "^method: expected one of random, got 'no'"),
        ({"val_method": ["random", "no"]}, "^val_method: expected one of random, got 'no'"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(policy(), **options)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ({}, {"corruption": RandomMasking()}, "padding 'replayed', got RandomMasking;"),
        ({}, {"corruption": TraceMasking()}, "got TraceMasking with shrink 1 and padding 'hidden'"),
        (
            {},
            {"corruption": TraceMasking(shrink=2, padding="replayed")},
            "got TraceMasking with shrink 2 and padding 'replayed'; use 'recompute'",
        ),
        ({}, {"temperature": 2.0}, r"temperature: the sampler's 1\.0, got 2\.0"),
        ({"block_size": 3}, {"block_size": 6}, "got blocks of 6 from the sequence"),
        ({"block_size": 3}, {"block_alignment": "response"}, "got blocks of 3 from the response"),
        ({"block_size": 3}, {"window": BlockWindow(6, origin="sequence")}, "got blocks of 6"),
        (
            {"block_size": 3},
            {"window": FullWindow()},
            "decoder's window: blocks of 3 .* got no blocks",
        ),
    ],
)
def test_behaviour_is_refused_in_states_that_the_sampler_never_saw(
    family: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    backbone = policy(attention="block", **family) if family else policy()
    sampling = decoder(backbone)
    if "window" in options:
        window = options.pop("window")
        sampling = Decoder(policy=RandomPolicy(), window=window, sampler=sampling.sampler)
    objective = PolicyObjective(
        old_log_prob="behaviour", temperature=options.pop("temperature", "rollout")
    )
    module(backbone, objective=PolicyObjective(old_log_prob="behaviour"))
    with pytest.raises(ValueError, match=rf"old_log_prob: .*{message}"):
        module(backbone, objective=objective, decoders={"random": sampling}, **options)


def test_a_fully_trained_policy_has_no_initial_one_and_lends_no_weights() -> None:
    whole = policy(lora=False)
    with pytest.raises(ValueError, match="kl_to: 'initial'"):
        module(whole, objective=PolicyObjective(kl_to="initial"))
    with pytest.raises(ValueError, match=r"value\.backbone: 'lora' shares frozen weights"):
        module(whole, value=ValueObjective())
    dropout = policy(lora=False)
    dropout.add_adapter(LoRASettings(rank=2, dropout=0.1))
    with pytest.raises(ValueError, match="dropout: expected 0"):
        module(dropout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 2.0}, "clip_low"),
        ({"beta": -1.0}, "beta"),
        ({"kl": "k2"}, "kl: expected"),
        ({"temperature": 0.0}, "temperature"),
        ({"old_log_prob": "past"}, "old_log_prob"),
    ],
)
def test_objective_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyObjective(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "own"}, "value.backbone"),
        ({"gamma": 1.5}, "value.gamma"),
        ({"train_every": 0}, "value.train_every"),
        ({"clip": 0.0}, "value.clip"),
        ({"lora": LoRASettings(dropout=0.5)}, "value.lora.dropout"),
    ],
)
def test_value_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ValueObjective(**settings)


def test_an_interval_of_fresh_rollouts_other_than_one_is_refused(tmp_path: Path) -> None:
    """0, Lightning's own default, becomes 1."""
    trainer = fit(learner(), rollout_data(prompts_per_step=1), tmp_path, steps=1)
    assert trainer.reload_dataloaders_every_n_epochs == 1
    with pytest.raises(ValueError, match=r"reload_dataloaders_every_n_epochs: expected 1.*got 2"):
        fit(learner(), rollout_data(), tmp_path, reload_dataloaders_every_n_epochs=2)


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
    batch = prepared(module(policy()))[0]
    ours, clipped = (
        gradients(module(policy(), policy_loss=loss), batch) for loss in (Plain(), None)
    )
    for name, gradient in clipped.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-7, atol=1e-12)
    rl = learner(policy_loss=Plain())
    trainer = fit(rl, rollout_data(prompts_per_step=1), tmp_path, steps=1)
    assert trainer.callback_metrics["train/certainty"] < 0
    assert "train/clip_fraction" not in trainer.callback_metrics
    with pytest.raises(ValueError, match="policy_loss: object has no method 'compute'"):
        module(policy(), policy_loss=object())
    with pytest.raises(ValueError, match=r"objective\.beta: belongs to the clipped loss"):
        module(policy(), policy_loss=Plain(), objective=PolicyObjective(beta=0.5))


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
    batch = collate_items([(rl.rows.items(records)[0], 1.0)], records, rl.row_spec)
    spaces = [training_rows(batch, spec).mask for spec in (rl.backbone.spec, rl.row_spec)]
    assert spaces[0].sum() < spaces[1].sum()
    later = grown(8, "eight", steps=2, resume=tmp_path / "last.ckpt")
    assert later.trainer.current_epoch == 2
