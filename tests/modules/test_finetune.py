"""Supervised fine-tuning: every corruption on both attention layouts, and what a run leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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
    bound = corruption.weight in ("1/t", "1/length")
    units = sum(1 if per_row else len(row) for row in rows if row or bound)
    found = model.terms(batch, seed=0)
    # Other shapes of the same products, in float32.
    assert float(found.total.detach()) == pytest.approx(total / units, rel=1e-5)
    assert found.means()["num_supervised"] == sum(map(len, rows))


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
    assert terms.means()["num_supervised"] == G - 1
    both = model.terms(collate_supervised([first, second], response_length=G, spec=spec), seed=0)
    other = model.terms(collate_supervised([second], response_length=G, spec=spec), seed=0)
    torch.testing.assert_close(both.total, (wanted + other.total) / 2, rtol=1e-5, atol=1e-6)


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
        ({"lr_floor": 2.0}, "lr_floor"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(small(), RandomMasking(), **options)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    model = module(small(lora=False).requires_grad_(False), RandomMasking())
    with pytest.raises(ValueError, match="nothing is trainable"):
        run(model, Data(examples(), batch_size=4), tmp_path, steps=1)
    model = module(small(), Autoregressive())
    with pytest.raises(ValueError, match="shift 1, got shift 0"):
        model.terms(batch_for(model), seed=0)


def test_a_batch_without_states_still_has_a_forward_with_zero_gradients() -> None:
    model = module(small(**BLOCK), TraceMasking())
    never = examples(2, never=(0, 1))
    batch = collate_supervised(never, response_length=G, spec=model.backbone.spec)
    terms = model.terms(batch, seed=0)
    terms.total.backward()
    assert terms.total.item() == 0.0
    assert terms.means()["num_supervised"] == 0
    gradients = [value.grad for value in model.parameters() if value.requires_grad]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_adamw_is_fused_on_a_gpu_unless_the_configuration_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a module on the CPU says it is on a GPU."""
    plain = {"optimizer": torch.optim.AdamW}
    unfused = {"optimizer": lambda given: torch.optim.AdamW(given, fused=False)}
    cases = [("cpu", plain), ("cuda", plain), ("cuda", unfused)]
    cases.append(("cuda", {"optimizer": torch.optim.Adagrad}))
    for number, (device, options) in enumerate(cases):
        monkeypatch.setattr(SFTModule, "device", torch.device(device))
        model = module(small(), RandomMasking(), **options)
        optimizer = model.scheduled([torch.ones(3)], lambda step: 1.0)["optimizer"]
        assert bool(optimizer.param_groups[0]["fused"]) == (number == 1)
