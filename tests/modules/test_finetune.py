"""Supervised fine-tuning: every corruption on both attention layouts, and what a run leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from lit_dlm.backbones import HFBackbone, load_tokenizer
from lit_dlm.losses.corruption import (
    Autoregressive,
    RandomMasking,
    SemiAutoregressive,
    TraceMasking,
)
from lit_dlm.losses.states import Corruption
from lit_dlm.modules.finetune import SFTModule
from lit_dlm.modules.supervised_batch import (
    SupervisedBatch,
    SupervisedExample,
    collate_supervised,
    responses_of,
)
from tests.finetuning import MASK, Data, G, examples, run, small

BLOCK = {"attention": "block", "block_size": 3, "decoder": "qwen3"}


def module(backbone: HFBackbone, corruption: Corruption, **options: Any) -> SFTModule:
    values: dict[str, Any] = {
        "tokenizer": "tiny",
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.02),
        "warmup_steps": 0,
        "lr_floor": 1.0,
    }
    return SFTModule(backbone, corruption=corruption, **{**values, **options})


def batch_for(model: SFTModule, count: int = 5) -> SupervisedBatch:
    return collate_supervised(examples(count), response_length=G, spec=model.backbone.spec)


def slow_ce(model: SFTModule, batch: SupervisedBatch) -> tuple[list[list[float]], Tensor, bool]:
    """Cross-entropy of the targets of each state, by a direct forward on the true canvas.

    A block model is asked block by block: earlier blocks are clean, later ones are not looked at.
    """
    spec = model.backbone.spec
    responses = responses_of(batch, spec, seed=0, num_padding=model.num_padding)
    states = model.corruption.states(responses)
    rows: list[list[float]] = []
    for number, row in enumerate(states.sample.tolist()):
        prompt = batch.ids[row, : batch.start]
        if batch.pad_mask is not None:
            prompt = prompt[batch.pad_mask[row, : batch.start]]
        clean = batch.ids[row, batch.start :]
        values = {}
        blocks = torch.zeros(G, dtype=torch.long)
        if responses.blocks is not None:
            blocks = responses.blocks[row]
        for block in blocks.unique().tolist():
            shown = torch.where(states.hidden[number], MASK, clean)
            shown = torch.where(blocks < block, clean, shown)
            canvas = torch.cat([prompt, shown])[None]
            logits = model.backbone.denoise(canvas, response_start=len(prompt)).logits[0]
            log_probs = logits[len(prompt) :].log_softmax(-1)
            for cell in (states.supervised[number] & (blocks == block)).nonzero().flatten():
                values[int(cell)] = -float(log_probs[cell, clean[cell]].detach())
        rows.append([values[cell] for cell in sorted(values)])
    return rows, states.weight, states.per_row


@pytest.mark.parametrize(
    ("loss_norm", "total", "divisor"),
    [("global", 10, 2.5), ("global", 2, 0.5), ("global", 0, 0.25), ("local", 2, 1.0)],
)
def test_four_processes_divide_by_their_mean_count(
    loss_norm: str, total: int, divisor: float
) -> None:
    """One that has no targets, among ``total`` of all: 10 / 4; 2 / 4, which 1 would halve."""
    model = module(small(), RandomMasking(), loss_norm=loss_norm)
    strategy = SimpleNamespace(reduce=lambda count, reduce_op: torch.tensor(float(total)))
    model.trainer = SimpleNamespace(world_size=4, strategy=strategy)
    assert model.divisor(torch.tensor(0)).item() == divisor


@pytest.mark.parametrize(
    "corruption",
    [
        RandomMasking(copies=2, weight="1/t", min_t=0.2),
        SemiAutoregressive(block_size=3),
        SemiAutoregressive(block_size=3, weight="1/length"),
        TraceMasking(shrink=2, weight="none"),
    ],
    ids=lambda c: type(c).__name__,
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shift": 1},
        BLOCK,
        {**BLOCK, "shift": 1},
        {**BLOCK, "block_origin": "response"},
        {**BLOCK, "block_origin": "response", "shift": 1},
    ],
    ids=[
        "full",
        "shifted",
        "block",
        "shifted_block",
        "block_from_response",
        "shifted_block_from_response",
    ],
)
def test_loss_equals_direct_forwards_on_the_true_states(
    changes: dict[str, Any], corruption: Corruption
) -> None:
    model = module(small(**changes), corruption)
    batch = batch_for(model)
    rows, weight, per_row = slow_ce(model, batch)
    kept = [[w for w in row if w] for row in weight.tolist()]
    total = sum(
        ce * w for ces, ws in zip(rows, kept, strict=True) for ce, w in zip(ces, ws, strict=True)
    )
    rule = (
        corruption.noise.weight if isinstance(corruption, SemiAutoregressive) else corruption.weight
    )
    units = sum(1 if per_row else len(row) for row in rows if row or rule in ("1/t", "1/length"))
    found = model.terms(batch, seed=0)
    # Other shapes of the same products, in float32.
    assert float(found.total.detach()) == pytest.approx(total / units, rel=1e-5)
    assert found.parts["num_supervised"] == sum(map(len, rows))


def test_autoregressive_loss_is_that_of_the_causal_model() -> None:
    """transformers' own causal model with the same weights, sample by sample."""
    model = module(small(shift=1), Autoregressive())
    batch = batch_for(model, 3)
    assert batch.pad_mask is not None
    losses = []
    for row in range(3):
        ids = batch.ids[row][batch.pad_mask[row]][None]
        causal = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        raw = model.backbone.model(
            ids, attention_mask=causal, position_ids=torch.arange(ids.shape[1])[None]
        ).logits
        raw[..., list(model.backbone.spec.forbidden_ids)] = -torch.inf
        losses.append(torch.nn.functional.cross_entropy(raw[0, -G - 1 : -1], ids[0, -G:]))
    found = model.terms(batch, seed=0).total
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)


def test_the_first_token_of_a_response_without_a_prompt_is_no_target() -> None:
    """Alone or beside a padded neighbour, the other tokens have the losses of the causal model."""
    model = module(small(shift=1), Autoregressive())
    spec = model.backbone.spec
    first, second = examples(2)
    first = replace(first, prompt_ids=first.prompt_ids[:0])
    alone = collate_supervised([first], response_length=G, spec=spec)
    raw = model.backbone.model(
        alone.ids,
        attention_mask=torch.ones(1, 1, G, G, dtype=torch.bool).tril(),
        position_ids=torch.arange(G)[None],
    ).logits
    raw[..., list(spec.forbidden_ids)] = -torch.inf
    wanted = torch.nn.functional.cross_entropy(raw[0, :-1], alone.ids[0, 1:])
    terms = model.terms(alone, seed=0)
    torch.testing.assert_close(terms.total, wanted, rtol=1e-5, atol=1e-6)
    assert terms.parts["num_supervised"] == G - 1
    both = model.terms(collate_supervised([first, second], response_length=G, spec=spec), seed=0)
    other = model.terms(collate_supervised([second], response_length=G, spec=spec), seed=0)
    torch.testing.assert_close(both.total, (wanted + other.total) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, BLOCK], ids=["full", "block"])
def test_a_batch_without_states_still_has_a_forward_with_zero_gradients(
    changes: dict[str, Any],
) -> None:
    model = module(small(**changes), TraceMasking())
    never = collate_supervised(
        examples(2, never=(0, 1)), response_length=G, spec=model.backbone.spec
    )
    terms = model.terms(never, seed=0)
    terms.total.backward()
    assert terms.total.item() == 0.0
    assert terms.parts["num_supervised"] == 0
    gradients = [value.grad for value in model.parameters() if value.requires_grad]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_autoregressive_training_needs_the_shift() -> None:
    model = module(small(), Autoregressive())
    with pytest.raises(ValueError, match="shift 1, got shift 0"):
        model.terms(batch_for(model), seed=0)


def test_noise_is_redrawn_in_every_pass() -> None:
    model = module(small(), RandomMasking())
    drawn = []
    for epoch in (0, 1):
        batch = batch_for(model, 8)
        batch.epochs = [epoch] * 8
        responses = responses_of(batch, model.backbone.spec, seed=0, num_padding=0)
        drawn.append(model.corruption.states(responses).hidden)
    assert not torch.equal(*drawn)


@pytest.mark.slow
def test_block_training_lowers_the_loss_to_its_floor(tmp_path: Path) -> None:
    """Responses count up from the prompt's last token, so every cell is certain: the floor is 0.

    It starts near log(21 possible tokens) = 3.0.
    """
    given = []
    for number, one in enumerate(examples(16)):
        prompt = torch.tensor([3 + number]).numpy()
        response = torch.tensor([3 + (number + i) % 20 for i in range(G)]).numpy()
        given.append(SupervisedExample(uid=one.uid, prompt_ids=prompt, response_ids=response))
    model = module(
        small(
            lora=False, **{**BLOCK, "hidden_size": 32, "block_size": 4, "initializer_range": 0.1}
        ),
        SemiAutoregressive(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        lr_floor=0.0,
    )
    batch = collate_supervised(given, response_length=G, spec=model.backbone.spec)
    with torch.no_grad():
        before = float(model.terms(batch, seed=0).total)
    run(model, Data(given, batch_size=16), tmp_path, steps=200, total=200)
    with torch.no_grad():
        after = float(model.terms(batch, seed=0).total)
    assert before > 2.5
    assert after < 0.1


@pytest.mark.slow
def test_an_adapter_loads_in_plain_peft_on_the_exported_model(tmp_path: Path) -> None:
    backbone = small(decoder="llama")
    model = module(backbone, RandomMasking())
    run(model, Data(examples(), batch_size=4), tmp_path, steps=3)
    model.export(tmp_path / "adapter")
    base = small(decoder="llama", lora=False)  # the same seed: the weights below the adapter
    base.export(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="sdpa")
    for layer in plain.model.layers:
        layer.self_attn.is_causal = False
    tuned = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    ids = torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    everything = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    with torch.no_grad():
        wanted = backbone(ids)
        found = tuned(ids, attention_mask=everything).logits
        plain_logits = base(ids)
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(plain_logits, wanted, atol=1e-3)
    again = HFBackbone(str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(again(ids), wanted)


def test_a_wholly_trained_model_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    backbone = small(lora=False)
    model = module(backbone, RandomMasking(), export_dir=str(tmp_path / "model"))
    run(model, Data(examples(), batch_size=4), tmp_path, steps=2)
    again = HFBackbone(str(tmp_path / "model"))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids), backbone(ids))
    assert load_tokenizer(str(tmp_path / "model")).get_vocab() == model.tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_padding": -1}, "num_padding"),
        ({"loss_norm": "mean"}, "loss_norm"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"lr_floor": 2.0}, "lr_floor"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(small(), RandomMasking(), **options)


def test_a_frozen_backbone_is_refused(tmp_path: Path) -> None:
    model = module(small(lora=False).requires_grad_(False), RandomMasking())
    with pytest.raises(ValueError, match="nothing is trainable"):
        run(model, Data(examples(), batch_size=4), tmp_path, steps=1)


def test_adamw_is_fused_on_a_gpu_unless_the_configuration_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its steps are those of the other one; here a module on the CPU says it is on a GPU."""
    trained = {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(SFTModule, "device", torch.device(device))
        weight = torch.linspace(-1, 1, 5).requires_grad_()
        model = module(small(), RandomMasking())
        optimizer = model.scheduled([{"params": [weight], "lr": 0.1}], lambda step: 1.0)[
            "optimizer"
        ]
        assert bool(optimizer.param_groups[0]["fused"]) == (device == "cuda")
        for _ in range(3):
            weight.grad = weight.detach().square()
            optimizer.step()
        trained[device] = weight
    torch.testing.assert_close(trained["cuda"], trained["cpu"])
    for own in (lambda given: torch.optim.AdamW(given, fused=False), torch.optim.Adagrad):
        model = module(small(), RandomMasking(), optimizer=own)
        optimizer = model.scheduled([weight], lambda step: 1.0)["optimizer"]
        assert not optimizer.param_groups[0]["fused"]
