"""Losses and gradients that are not finite stop a run: samples are named, nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dlm.callbacks.adapter_checkpoint import AdapterCheckpoint
from lit_dlm.datamodules.resuming import EpochPlan
from lit_dlm.losses.corruption import RandomMasking
from lit_dlm.modules.finetune import SFTModule
from lit_dlm.modules.steps import NonFiniteError
from lit_dlm.modules.supervised_batch import SupervisedExample
from lit_dlm.ops.fused_head import TokenStats
from tests.finetuning import VOCAB, Data, examples, run, small, trained, two_processes
from tests.processes import in_two_processes

COUNT = 8
POISON = VOCAB


def module() -> SFTModule:
    """Every cell is a target; one token, which ordinary samples lack, has an infinite loss."""
    model = SFTModule(
        small(vocab_size=VOCAB + 1),
        corruption=RandomMasking(min_t=1.0),
        tokenizer="tiny",
        warmup_steps=0,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    )
    score = model.backbone.score_tokens

    def poisoned(ids: Tensor, targets: Tensor, rows: Tensor, **rest: Any) -> TokenStats:
        stats = score(ids, targets, rows, **rest)
        return stats._replace(ce=stats.ce.masked_fill(targets[rows] == POISON, torch.inf))

    model.backbone.score_tokens = poisoned  # type: ignore[method-assign]
    return model


def number_in(batch: int, *, rank: int = 0, world_size: int = 1) -> int:
    """An example that a process sees in its ``batch``-th batch of two."""
    plan = EpochPlan(np.zeros(COUNT), batch_size=2, seed=0, rank=rank, world_size=world_size)
    return plan.batch(batch)[1].number


def with_poison(number: int) -> list[SupervisedExample]:
    """Examples, one of which holds the poisonous token."""
    given = examples(COUNT)
    tokens = given[number].response_ids.copy()
    tokens[3] = POISON
    given[number] = replace(given[number], response_ids=tokens)
    return given


def test_the_sample_is_named_and_weights_are_those_of_the_last_good_step(tmp_path: Path) -> None:
    number = number_in(1)
    good = module()
    run(good, Data(examples(COUNT), batch_size=2), tmp_path / "good", steps=1)
    model = module()
    keep = AdapterCheckpoint(str(tmp_path / "adapters"))
    data = Data(with_poison(number), batch_size=2)
    with pytest.raises(NonFiniteError, match="the loss is not finite at optimiser step 1") as error:
        run(model, data, tmp_path, steps=6, callbacks=(keep,))
    assert f"samples fake/train/{number:05d};" in str(error.value)
    wanted = trained(good)
    assert all(torch.equal(value, wanted[name]) for name, value in trained(model).items())
    stored = load_file(tmp_path / "adapters" / "last" / "adapter_model.safetensors")
    assert sorted(value.norm().item() for value in stored.values()) == sorted(
        value.norm().item() for value in wanted.values()
    )


def test_a_gradient_that_is_not_finite_stops_before_it_is_applied(tmp_path: Path) -> None:
    """The loss is fine; without the check, clipping would make every weight NaN."""
    model = module()
    first = next(value for value in model.parameters() if value.requires_grad)
    first.register_hook(lambda gradient: gradient * torch.inf)
    before = trained(model)
    with pytest.raises(
        NonFiniteError, match="a gradient is not finite at optimiser step 0"
    ) as error:
        run(
            model, Data(examples(COUNT), batch_size=2), tmp_path, steps=6,
            gradient_clip_val=1.0, accumulate_grad_batches=2,
        )  # fmt: skip
    assert str(error.value).count("fake/train/") == 4
    assert all(torch.equal(value, before[name]) for name, value in trained(model).items())


def _stopped(rank: int, folder: Path) -> dict[str, str]:
    """The message under both strategies."""
    number = number_in(1, rank=1, world_size=2)
    messages = {}
    for kind in ("ddp", "fsdp"):
        keep = AdapterCheckpoint(str(folder / kind))
        data = Data(with_poison(number), batch_size=2)
        with pytest.raises(NonFiniteError) as error:
            run(
                module(), data, folder, steps=6, callbacks=(keep,), devices=2,
                strategy=two_processes(kind),
            )  # fmt: skip
        messages[kind] = str(error.value)
    return messages


@pytest.mark.ddp
def test_both_processes_stop_when_one_meets_it_and_keep_what_they_learnt(tmp_path: Path) -> None:
    """With whole weights on both (DDP), and with split ones (FSDP2)."""
    first, second = in_two_processes(_stopped, tmp_path)
    assert first == second
    number = number_in(1, rank=1, world_size=2)
    for message in first.values():
        assert f"optimiser step 1, samples fake/train/{number:05d};" in message
    stored = [
        load_file(tmp_path / kind / "last" / "adapter_model.safetensors")
        for kind in ("ddp", "fsdp")
    ]
    for name, value in stored[0].items():
        assert torch.isfinite(value).all()
        torch.testing.assert_close(stored[1][name], value)
