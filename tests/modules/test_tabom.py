"""TABOM: equality with a slow loop on full logits, empty batches, resuming, two processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lit_dlm.backbones import HFBackbone
from lit_dlm.datamodules.resuming import EpochPlan
from lit_dlm.losses.corruption import RandomMasking
from lit_dlm.losses.states import NoisyStates
from lit_dlm.losses.terms import LossTerms
from lit_dlm.modules.finetune import FinetuneModule, SFTModule
from lit_dlm.modules.sharding import whole_weights
from lit_dlm.modules.supervised_batch import (
    SupervisedBatch,
    SupervisedExample,
    collate_supervised,
    responses_of,
)
from lit_dlm.modules.tabom import TABOMModule
from tests.finetuning import (
    MASK,
    Data,
    G,
    Watch,
    examples,
    quiet,
    run,
    small,
    trained,
    two_processes,
)
from tests.losses.reference import entropy_of, slow_ranking
from tests.processes import in_two_processes

pytestmark = pytest.mark.slow  # training runs

Scores = dict[str, float]


def module(backbone: HFBackbone | None = None, **options: Any) -> TABOMModule:
    values: dict[str, Any] = {
        "tokenizer": "tiny",
        "window": 4,
        "rank_window": 3,
        "margin": 0.2,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "warmup_steps": 0,
        "lr_floor": 1.0,
    }
    return TABOMModule(backbone or small(), **{**values, **options})


def batch_for(model: TABOMModule, count: int = 6, **options: Any) -> SupervisedBatch:
    return collate_supervised(
        examples(count, **options), response_length=G, spec=model.backbone.spec
    )


def slow_loss(model: TABOMModule, batch: SupervisedBatch) -> tuple[Tensor, NoisyStates]:
    """Full logits, one cell and one pair at a time."""
    responses = responses_of(batch, model.backbone.spec, seed=0, num_padding=None)
    states = model.corruption.states(responses)
    ids = batch.ids.clone()
    ids[:, batch.start :][states.hidden] = MASK
    logits = model.backbone.denoise(ids, pad_mask=batch.pad_mask).logits[:, batch.start :].double()
    # A forbidden id has no probability: leave it out rather than multiply 0 by -inf.
    kept = [v for v in range(logits.shape[-1]) if v not in model.backbone.spec.forbidden_ids]
    entropy = entropy_of(logits[..., kept])
    log_probs = logits.log_softmax(-1)
    picked = [
        -log_probs[b, t, batch.ids[b, batch.start + t]]
        for b, t in states.supervised.nonzero().tolist()
    ]
    ranking = slow_ranking(
        entropy,
        batch.steps.tolist(),
        states.supervised.tolist(),
        states.cut.tolist(),
        window=model.rank_window,
        margin=model.margin,
        ties=model.ties,
        decode_entropy=batch.decode_entropy.tolist(),
    )
    return torch.stack(picked).mean() + model.rank_weight * ranking, states


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("ties", ["strict", "rank"])
def test_loss_and_gradients_equal_a_slow_loop_on_full_logits(shift: int, ties: Any) -> None:
    model = module(small(shift=shift), rank_weight=1.5, ties=ties)
    batch = batch_for(model)
    wanted, _ = slow_loss(model, batch)
    terms = model.terms(batch, seed=0)
    # Float32 logits, chunked or whole.
    torch.testing.assert_close(terms.total.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    values = [value for value in model.parameters() if value.requires_grad]
    fast = torch.autograd.grad(terms.total, values)
    slow = torch.autograd.grad(wanted, values)
    for one, other in zip(fast, slow, strict=True):
        # Float32 sums in another order, through two layers.
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_logged_counts_are_those_of_the_states() -> None:
    model = module(rank_window=None)
    batch = batch_for(model)
    _, states = slow_loss(model, batch)
    parts = model.terms(batch, seed=0).means()
    counts = states.supervised.sum(1)
    assert parts["num_supervised"] == counts.sum()
    # One token a step: every two supervised positions of a row make a pair.
    assert parts["num_pairs"] == (counts * (counts - 1) // 2).sum()
    assert 0.0 <= float(parts["pair_accuracy"]) <= 1.0


def test_a_batch_without_targets_has_zero_loss_and_zero_gradients() -> None:
    model = module()
    terms = model.terms(batch_for(model, 3, never=(0, 1, 2)), seed=0)
    terms.total.backward()
    assert terms.total.item() == 0.0
    gradients = [value.grad for value in model.parameters() if value.requires_grad]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def validated(model: FinetuneModule, folder: Path, *, batch_size: int, **options: Any) -> Scores:
    """Scores of one validation of examples of which two have no decode."""
    given = undecoded({0, 5}, 24)
    data = Data(given, batch_size=2, val_fraction=0.7, val_batch_size=batch_size)
    (scores,) = quiet(folder, **options).validate(model, data, verbose=False)
    return {name: float(value) for name, value in scores.items()}


@pytest.mark.parametrize("loss_norm", ["local", "global"])
def test_validation_does_not_depend_on_the_batch_size(tmp_path: Path, loss_norm: Any) -> None:
    """Alone, some samples have no target and others a single one, which is no pair."""

    def both(batch_size: int) -> tuple[Scores, Scores]:
        drawn = RandomMasking(weight="1/num_targets")
        sft = SFTModule(small(), tokenizer="tiny", corruption=drawn, loss_norm=loss_norm)
        return (
            validated(module(loss_norm=loss_norm), tmp_path, batch_size=batch_size),
            validated(sft, tmp_path, batch_size=batch_size),
        )

    wanted = both(64)
    assert wanted[0]["val/num_pairs"] > 0
    assert wanted[0]["val/loss"] == pytest.approx(
        wanted[0]["val/loss_ce"] + wanted[0]["val/loss_rank"], rel=1e-6
    )
    for batch_size in (1, 4):
        for found, whole in zip(both(batch_size), wanted, strict=True):
            assert found == pytest.approx(whole, rel=1e-5)


def test_validation_of_one_batch_is_its_loss(tmp_path: Path) -> None:
    model = module(rank_weight=1.5)
    seen: list[LossTerms] = []
    terms = model.terms

    def watched(batch: SupervisedBatch, *, seed: int) -> LossTerms:
        seen.append(terms(batch, seed=seed))
        return seen[-1]

    model.terms = watched  # type: ignore[method-assign]
    found = validated(model, tmp_path, batch_size=64)
    (only,) = seen
    wanted = {"val/loss": only.total, **{f"val/{k}": v for k, v in only.means().items()}}
    assert found == pytest.approx({name: float(v) for name, v in wanted.items()}, rel=1e-5)


@pytest.mark.parametrize(("num_workers", "accumulate"), [(0, 1), (2, 2)])
def test_a_resumed_run_repeats_batches_cuts_and_weights(
    tmp_path: Path, num_workers: int, accumulate: int
) -> None:
    """Cut in the middle of the second pass, with dropout."""
    whole, first, second = Watch(), Watch(), Watch()
    model, resumed = (module(small(dropout=0.2)) for _ in range(2))

    def train(one: TABOMModule, name: str, watch: Watch, steps: int, resume: Path | None) -> None:
        given = Data(examples(), batch_size=3 - accumulate, num_workers=num_workers)
        run(
            one, given, tmp_path / name, steps=steps, resume=resume, callbacks=(watch,),
            accumulate_grad_batches=accumulate,
        )  # fmt: skip

    train(model, "a", whole, 6, None)
    train(module(small(dropout=0.2)), "b", first, 5, None)
    for value in trained(resumed).values():
        value.zero_()
    train(resumed, "c", second, 6, tmp_path / "b" / "run.ckpt")
    assert first.batches + second.batches == whole.batches
    assert first.losses + second.losses == whole.losses
    wanted = trained(model)
    assert all(torch.equal(value, wanted[name]) for name, value in trained(resumed).items())
    epochs = [epoch for _, epochs, _ in whole.batches for epoch in epochs]
    assert set(epochs) == {0, 1}
    stored = torch.load(tmp_path / "a" / "run.ckpt", weights_only=True)["state_dict"]
    assert all("lora_" in name for name in stored)


def undecoded(numbers: set[int], count: int = 8) -> list[SupervisedExample]:
    """Examples, some of them without a step."""
    return [
        replace(one, steps=np.full(G, -1, np.int32)) if number in numbers else one
        for number, one in enumerate(examples(count))
    ]


def plans() -> list[EpochPlan]:
    """The batches of two processes."""
    return [
        EpochPlan(np.zeros(8), batch_size=2, seed=0, rank=rank, world_size=2) for rank in (0, 1)
    ]


def given_to_both() -> list[SupervisedExample]:
    """Within one pass of two steps, the second process has no decoded sample at all."""
    return undecoded({ref.number for number in (0, 1) for ref in plans()[1].batch(number)})


def _validate(rank: int, folder: Path) -> Scores:
    strategy = two_processes("ddp")
    return validated(module(), folder, batch_size=3, devices=2, strategy=strategy)


@pytest.mark.ddp
def test_two_processes_validate_like_one(tmp_path: Path) -> None:
    """An odd number of samples: one of the processes gets a copy, which does not count."""
    wanted = validated(module(), tmp_path, batch_size=64)
    for found in in_two_processes(_validate, tmp_path):
        assert found == pytest.approx(wanted, rel=1e-5)


class Logged(Callback):
    """Notes what is logged of every batch."""

    def __init__(self) -> None:
        self.scores: list[Scores] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.scores.append({name: float(v) for name, v in trainer.callback_metrics.items()})


def logged_of(terms: LossTerms) -> Any:
    """What is to be logged of a step that is one batch."""
    values = {"loss": terms.total.detach(), **terms.means()}
    return pytest.approx({f"train/{name}": float(v) for name, v in values.items()}, rel=1e-5)


def test_a_logged_value_is_over_all_accumulated_batches(tmp_path: Path) -> None:
    """The second batch has no decode: the mean of two means would be half the value."""
    given = undecoded({1, 3, 5, 6})
    logged, model = Logged(), module()
    before = model.terms(
        collate_supervised(given, response_length=G, spec=model.backbone.spec), seed=0
    )
    data = Data(given, batch_size=2)
    run(model, data, tmp_path, steps=1, callbacks=(logged,), accumulate_grad_batches=4)
    assert logged.scores == [{}, {}, {}, logged_of(before)]


def _train(
    rank: int, folder: Path
) -> dict[str, tuple[list[float], dict[str, np.ndarray], list[Scores]]]:
    """Losses, weights and logged values under both strategies, one run after the other."""
    results = {}
    for kind in ("ddp", "fsdp"):
        watch, logged, model = Watch(), Logged(), module(loss_norm="global")
        data = Data(given_to_both(), batch_size=2)
        run(
            model, data, folder / kind, steps=2, callbacks=(watch, logged), devices=2,
            strategy=two_processes(kind), log_every_n_steps=2,
        )  # fmt: skip
        with whole_weights(model):
            weights = {name: value.numpy() for name, value in trained(model).items()}
        results[kind] = (watch.losses, weights, logged.scores)
    return results


@pytest.mark.ddp
def test_two_processes_of_which_one_has_no_target_train_like_one(tmp_path: Path) -> None:
    """With whole weights on both (DDP), and with split ones (FSDP2)."""
    sides = in_two_processes(_train, tmp_path)
    model = module(loss_norm="global")
    optimizer = torch.optim.AdamW([v for v in model.parameters() if v.requires_grad], lr=0.01)
    given, losses = given_to_both(), []
    for number in (0, 1):
        both = [given[ref.number] for plan in plans() for ref in plan.batch(number)]
        batch = collate_supervised(both, response_length=G, spec=model.backbone.spec)
        optimizer.zero_grad()
        terms = model.terms(batch, seed=0)
        terms.total.backward()
        optimizer.step()
        losses.append(float(terms.total.detach()))
    for kind in ("ddp", "fsdp"):
        (first, weights, logged), (second, others, same) = (side[kind] for side in sides)
        assert logged == same == [{}, logged_of(terms)]  # only the second step is written
        assert second == [0.0, 0.0]
        # Each process divides by half of the global count, and gradients are averaged.
        np.testing.assert_allclose(np.array(first) / 2, losses, rtol=1e-5)
        for name, value in trained(model).items():
            np.testing.assert_allclose(weights[name], value.numpy(), rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(weights[name], others[name])
