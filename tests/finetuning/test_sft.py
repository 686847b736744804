"""Supervised fine-tuning: every masking on both attention layouts, and what a run leaves.

Losses and gradients that are not finite stop a run: samples are named, nothing is lost.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from safetensors.torch import load_file
from torch.optim.lr_scheduler import ConstantLR

from lit_dlm.backbones import HFBackbone, load_tokenizer
from lit_dlm.backbones.base import Rows
from lit_dlm.callbacks.adapter_checkpoint import AdapterCheckpoint
from lit_dlm.datamodules.resuming import EpochPlan
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.training.masking import (
    Autoregressive,
    RandomMasking,
    SemiAutoregressive,
    TraceMasking,
)
from lit_dlm.training.states import Masking
from lit_dlm.training.steps import NonFiniteError
from tests.finetuning.runs import VOCAB, Data, G, examples, run, small, trained, two_processes
from tests.processes import in_two_processes
from tests.training.supervised import BLOCK, batch_of, sft, slow_log_probs, tabom


@pytest.mark.parametrize(
    "masking",
    [
        RandomMasking(copies=2, weight="1/t", min_t=0.2),
        SemiAutoregressive(block_size=3),
        SemiAutoregressive(block_size=3, weight="1/length"),
        TraceMasking(shrink=2, weight="none"),
    ],
    ids=lambda c: f"{type(c).__name__}-{c.weight}",
)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        BLOCK,
        {**BLOCK, "block_origin": "response"},
        {**BLOCK, "block_origin": "response", "whole_prompt": True},
        {**BLOCK, "causal_context": True},
    ],
    ids=["full", "block", "block_from_response", "whole_prompt", "causal_context"],
)
def test_loss_equals_direct_forwards_on_the_true_states(
    changes: dict[str, Any], shift: int, masking: Masking
) -> None:
    model = sft(masking, small(**changes, shift=shift))
    batch = batch_of(model, 3)
    states, log_probs = slow_log_probs(model, batch)
    total, counts = 0.0, states.supervised.sum(1).tolist()
    for number, cell in states.supervised.nonzero().tolist():
        token = batch.ids[states.response[number], batch.start + cell]
        weight = 1.0 if states.weight is None else states.weight[number, cell]
        total -= float(log_probs[number, cell, token].detach() * weight)
    bound, per_state = masking.weight in ("1/t", "1/length"), masking.weight != "none"
    units = sum(1 if per_state else count for count in counts if count or bound)
    found = model.terms(batch)
    # Other shapes of the same products, in float32.
    assert float(found.total.detach()) == pytest.approx(total / units, rel=1e-5)
    assert found.means()["num_supervised"] == sum(counts)


@pytest.mark.parametrize(("num_steps", "is_told"), [(5, True), (6, False)])
def test_a_warm_up_as_long_as_the_run_is_told(num_steps: int, is_told: bool, caplog) -> None:
    """Of five updates the last has 4/5 of the rate."""
    caplog.set_level("INFO")
    model = sft(warmup_steps=5)
    model.trainer = SimpleNamespace(estimated_stepping_batches=num_steps)
    model.configure_optimizers()
    assert ("warmup_steps: 5 of 5 updates" in caplog.text) is is_told


@pytest.mark.parametrize(
    ("loss_norm", "total", "divisor"),
    [("global", 10, 2.5), ("global", 2, 0.5), ("global", 0, 0.25), ("local", 2, 1.0)],
)
def test_four_processes_divide_by_their_mean_count(
    loss_norm: str, total: int, divisor: float
) -> None:
    """One that has no targets, among ``total`` of all: 10 / 4; 2 / 4, which 1 would halve."""
    model = sft(loss_norm=loss_norm)
    strategy = SimpleNamespace(reduce=lambda count, reduce_op: torch.tensor(float(total)))
    model.trainer = SimpleNamespace(world_size=4, strategy=strategy)
    assert model.divisor(torch.tensor(0)).item() == divisor


def test_the_first_token_of_a_response_without_a_prompt_is_no_target() -> None:
    """Alone or beside a padded neighbour, the other tokens have the losses of the causal model."""
    model = sft(Autoregressive(), small(shift=1))
    first, second = examples(2)
    first = replace(first, prompt_ids=first.prompt_ids[:0])
    alone = batch_of(model, [first])
    raw = model.backbone.model(
        alone.ids,
        attention_mask=torch.ones(1, 1, G, G, dtype=torch.bool).tril(),
        position_ids=torch.arange(G)[None],
    ).logits
    raw[..., list(model.backbone.spec.forbidden_ids)] = -torch.inf
    wanted = torch.nn.functional.cross_entropy(raw[0, :-1], alone.ids[0, 1:])
    terms = model.terms(alone)
    torch.testing.assert_close(terms.total, wanted, rtol=1e-5, atol=1e-6)
    assert terms.means()["num_supervised"] == G - 1
    pairs = ([first, second], [second])
    both, other = (model.terms(batch_of(model, given)).total for given in pairs)
    torch.testing.assert_close(both, (wanted + other) / 2, rtol=1e-5, atol=1e-6)


def test_a_wholly_trained_model_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    backbone = small(lora=False)
    model = sft(backbone=backbone, export_dir=str(tmp_path / "model"))
    run(model, Data(examples(), batch_size=4), tmp_path, steps=2)
    again = HFBackbone(str(tmp_path / "model"))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids), backbone(ids))
    assert load_tokenizer(str(tmp_path / "model")).get_vocab() == load_tokenizer("tiny").get_vocab()


def test_a_script_goes_on_from_a_whole_checkpoint_only(tmp_path: Path) -> None:
    """Its trainer knows nothing of checksums, which PyTorch does not look at."""
    data = Data(examples(), batch_size=4)
    model = sft()
    run(model, data, tmp_path, steps=1)
    path = tmp_path / "run.ckpt"
    weight = next(iter(trained(model).values())).numpy().tobytes()
    content = path.read_bytes()
    assert weight in content
    path.write_bytes(content.replace(weight, bytes(len(weight))))
    with pytest.raises(ValueError, match="checkpoint is damaged"):
        run(sft(), data, tmp_path, steps=2, resume=path)


def test_averaged_weights_are_resumed_without_those_that_are_frozen(tmp_path: Path) -> None:
    averages = []
    for folder, steps, resume in (("whole", 3, None), ("part", 1, None), ("part", 3, "run.ckpt")):
        model, average = sft(), EMAWeightAveraging(decay=0.5)
        run(
            model,
            Data(examples(), batch_size=4),
            tmp_path / folder,
            steps=steps,
            resume=resume and tmp_path / folder / resume,
            callbacks=(average,),
        )
        averages.append(trained(model))
    for name, value in averages[0].items():
        torch.testing.assert_close(averages[2][name], value, rtol=0, atol=0)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    for options in ({"num_padding": -1}, {"lr_floor": 2.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            sft(**options)
    model = sft(backbone=small(lora=False).requires_grad_(False))
    with pytest.raises(ValueError, match="nothing is trainable"):
        run(model, Data(examples(), batch_size=4), tmp_path, steps=1)
    model = sft(Autoregressive())
    with pytest.raises(ValueError, match="shift 1, got shift 0"):
        model.terms(batch_of(model, 5))


@pytest.mark.parametrize("kind", ["sft", "tabom"])
def test_a_batch_without_targets_still_has_a_forward_with_zero_gradients(kind: str) -> None:
    model = sft(TraceMasking(), small(**BLOCK)) if kind == "sft" else tabom()
    terms = model.terms(batch_of(model, examples(3, never=(0, 1, 2))))
    terms.total.backward()
    assert terms.total.item() == 0.0
    assert terms.means()["num_supervised"] == 0
    gradients = [value.grad for value in model.parameters() if value.requires_grad]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_adamw_is_fused_on_a_gpu_unless_the_configuration_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a module on the CPU says it is on a GPU."""
    adamw, adagrad = torch.optim.AdamW, torch.optim.Adagrad
    cases = [("cpu", adamw), ("cuda", adamw), ("cuda", adagrad)]
    cases.append(("cuda", lambda given: adamw(given, fused=False)))
    for number, (device, optimizer) in enumerate(cases):
        monkeypatch.setattr(SFTModule, "device", torch.device(device))
        found = sft(optimizer=optimizer).scheduled([torch.ones(3)], ConstantLR)["optimizer"]
        assert bool(found.param_groups[0]["fused"]) == (number == 1)


COUNT = 8
POISON = VOCAB


def poisonable() -> SFTModule:
    """Every cell is a target; one token, which ordinary samples lack, has an infinite loss."""
    model = sft(RandomMasking(min_t=1.0), small(vocab_size=VOCAB + 1))
    score = model.backbone.score_tokens

    def poisoned(rows: Rows) -> TokenStats:
        stats = score(rows)
        is_poison = rows.targets[rows.scored] == POISON
        return stats._replace(ce=stats.ce.masked_fill(is_poison, torch.inf))

    model.backbone.score_tokens = poisoned  # type: ignore[method-assign]
    return model


def number_in(batch: int, *, rank: int = 0, world_size: int = 1) -> int:
    """An example that a process sees in its ``batch``-th batch of two."""
    options = {"batch_size": 2, "seed": 0, "rank": rank, "world_size": world_size}
    plan = EpochPlan(np.zeros(COUNT), numbers=np.arange(COUNT), **options)
    return plan.batch(batch)[1].number


def data_of(*, poison: int | None = None) -> Data:
    """Examples, one of which may hold the poisonous token."""
    given = examples(COUNT)
    if poison is not None:
        given[poison].response_ids[3] = POISON
    return Data(given, batch_size=2)


def test_the_sample_is_named_and_weights_are_those_of_the_last_good_step(tmp_path: Path) -> None:
    number, good, model = number_in(1), poisonable(), poisonable()
    run(good, data_of(), tmp_path / "good", steps=1)
    keep = AdapterCheckpoint(str(tmp_path / "adapters"))
    with pytest.raises(NonFiniteError, match="the loss is not finite at optimiser step 1") as error:
        run(model, data_of(poison=number), tmp_path, steps=6, callbacks=(keep,))
    assert f"samples fake/train/{number:05d};" in str(error.value)
    wanted = trained(good)
    assert all(torch.equal(value, wanted[name]) for name, value in trained(model).items())
    stored = load_file(tmp_path / "adapters" / "last" / "adapter_model.safetensors")
    norms = [sorted(one.norm().item() for one in found.values()) for found in (stored, wanted)]
    assert norms[0] == norms[1]


def test_a_gradient_that_is_not_finite_stops_before_it_is_applied(tmp_path: Path) -> None:
    """The loss is fine; without the check, clipping would make every weight NaN."""
    model, options = poisonable(), {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    first = next(value for value in model.parameters() if value.requires_grad)
    first.register_hook(lambda gradient: gradient * torch.inf)
    before = trained(model)
    named = r"a gradient is not finite at optimiser step 0, samples (fake/train/\d+[,;] ){4}weig"
    with pytest.raises(NonFiniteError, match=named):
        run(model, data_of(), tmp_path, steps=6, **options)
    assert all(torch.equal(value, before[name]) for name, value in trained(model).items())


def _stopped(rank: int, folder: Path, number: int) -> str:
    """With whole weights on both (DDP), and with split ones (FSDP2)."""
    told = []
    for kind in ("ddp", "fsdp"):
        options = {"strategy": two_processes(kind), "devices": 2}
        keep = AdapterCheckpoint(str(folder / kind))
        named = f"optimiser step 1, samples fake/train/{number:05d};"
        with pytest.raises(NonFiniteError, match=named) as error:
            run(poisonable(), data_of(poison=number), folder, steps=6, callbacks=(keep,), **options)
        told.append(str(error.value))
    assert told[0] == told[1]
    return told[0]


@pytest.mark.ddp
def test_both_processes_stop_when_one_meets_it_and_keep_what_they_learnt(tmp_path: Path) -> None:
    number = number_in(1, rank=1, world_size=2)
    first, second = in_two_processes(_stopped, tmp_path, number)
    assert first == second
    path = "last/adapter_model.safetensors"
    ddp, fsdp = (load_file(tmp_path / kind / path) for kind in ("ddp", "fsdp"))
    assert all(torch.isfinite(value).all() for value in ddp.values())
    torch.testing.assert_close(fsdp, ddp)
