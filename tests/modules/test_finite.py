"""Losses and gradients that are not finite stop a run: samples are named, nothing is lost."""

from __future__ import annotations

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
from lit_dlm.ops.fused_head import TokenStats
from tests.finetuning import VOCAB, Data, examples, run, small, trained, two_processes
from tests.modules.supervised import sft
from tests.processes import in_two_processes

COUNT = 8
POISON = VOCAB


def module() -> SFTModule:
    """Every cell is a target; one token, which ordinary samples lack, has an infinite loss."""
    model = sft(RandomMasking(min_t=1.0), small(vocab_size=VOCAB + 1))
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


def data(*, poison: int | None = None) -> Data:
    """Examples, one of which may hold the poisonous token."""
    given = examples(COUNT)
    if poison is not None:
        given[poison].response_ids[3] = POISON
    return Data(given, batch_size=2)


def test_the_sample_is_named_and_weights_are_those_of_the_last_good_step(tmp_path: Path) -> None:
    number, good, model = number_in(1), module(), module()
    run(good, data(), tmp_path / "good", steps=1)
    keep = AdapterCheckpoint(str(tmp_path / "adapters"))
    with pytest.raises(NonFiniteError, match="the loss is not finite at optimiser step 1") as error:
        run(model, data(poison=number), tmp_path, steps=6, callbacks=(keep,))
    assert f"samples fake/train/{number:05d};" in str(error.value)
    wanted = trained(good)
    assert all(torch.equal(value, wanted[name]) for name, value in trained(model).items())
    stored = load_file(tmp_path / "adapters" / "last" / "adapter_model.safetensors")
    assert sorted(value.norm().item() for value in stored.values()) == sorted(
        value.norm().item() for value in wanted.values()
    )


def test_a_gradient_that_is_not_finite_stops_before_it_is_applied(tmp_path: Path) -> None:
    """The loss is fine; without the check, clipping would make every weight NaN."""
    model, options = module(), {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    first = next(value for value in model.parameters() if value.requires_grad)
    first.register_hook(lambda gradient: gradient * torch.inf)
    before = trained(model)
    named = r"a gradient is not finite at optimiser step 0(.*fake/train/){4}"
    with pytest.raises(NonFiniteError, match=named):
        run(model, data(), tmp_path, steps=6, **options)
    assert all(torch.equal(value, before[name]) for name, value in trained(model).items())


def _stopped(rank: int, folder: Path, number: int) -> str:
    """With whole weights on both (DDP), and with split ones (FSDP2)."""
    told = []
    for kind in ("ddp", "fsdp"):
        options = {"strategy": two_processes(kind), "devices": 2}
        keep = AdapterCheckpoint(str(folder / kind))
        named = f"optimiser step 1, samples fake/train/{number:05d};"
        with pytest.raises(NonFiniteError, match=named) as error:
            run(module(), data(poison=number), folder, steps=6, callbacks=(keep,), **options)
        told.append(str(error.value))
    assert told[0] == told[1]
    return told[0]


@pytest.mark.ddp
def test_both_processes_stop_when_one_meets_it_and_keep_what_they_learnt(tmp_path: Path) -> None:
    number = number_in(1, rank=1, world_size=2)
    first, second = in_two_processes(_stopped, tmp_path, number)
    assert first == second
    ddp, fsdp = (
        load_file(tmp_path / kind / "last" / "adapter_model.safetensors")
        for kind in ("ddp", "fsdp")
    )
    assert all(torch.isfinite(value).all() for value in ddp.values())
    torch.testing.assert_close(fsdp, ddp)
