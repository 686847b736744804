"""Modules of fine-tuning that learn at a constant rate, and their batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_dlm.backbones import HFBackbone
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.finetuning.tabom import TABOMModule
from lit_dlm.predict.decode import DecodeModule
from lit_dlm.training.batch import SupervisedBatch, SupervisedExample, collate
from lit_dlm.training.states import Masking, States
from tests.finetuning.runs import G, examples, small

BLOCK = {"attention": "block", "block_size": 3, "decoder": "qwen3"}
LEARNING: dict[str, Any] = {
    "tokenizer": "tiny",
    "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
    "warmup_steps": 0,
    "lr_floor": 1.0,
}


def sft(
    masking: Masking | None = None, backbone: HFBackbone | None = None, **options: Any
) -> SFTModule:
    return SFTModule(backbone or small(), masking=masking, **{**LEARNING, **options})


def tabom(backbone: HFBackbone | None = None, **options: Any) -> TABOMModule:
    values = {**LEARNING, "window": 4, "rank_window": 3, "margin": 0.2, **options}
    return TABOMModule(backbone or small(), **values)


def batch_of(
    model: HFBackbone | DecodeModule, given: Sequence[SupervisedExample] | int, **options: Any
) -> SupervisedBatch:
    """Of the given examples, or of so many."""
    given = examples(given) if isinstance(given, int) else given
    spec = getattr(model, "backbone", model).spec
    num_padding = getattr(model, "num_padding", None)
    options = {"seed": 0, "num_padding": num_padding, "response_length": G, **options}
    return collate(given, spec=spec, **options)


def assert_same_loss(model: SFTModule, found: Tensor, wanted: Tensor) -> None:
    """Of a float32 model and a slow loop, with gradients; sums have other orders, in two layers."""
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    values = [value for value in model.parameters() if value.requires_grad]
    fast, slow = (torch.autograd.grad(loss, values) for loss in (found, wanted))
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-4)


def slow_log_probs(
    model: SFTModule,
    batch: SupervisedBatch,
    forward: Callable[[Tensor, int], Tensor] | None = None,
) -> tuple[States, Tensor]:
    """States and their ``(S, cells, V)`` log-probabilities, by a forward on each true canvas.

    A block model is asked block by block: earlier blocks are clean, later ones are not looked at.

    Args:
        forward: logits of a canvas of a sample.
    """
    backbone, start = model.backbone, batch.start
    states = model.states(batch)
    nothing = torch.full_like(states.hidden, -1, dtype=torch.long)
    shown = nothing if states.shown is None else states.shown
    found = []
    for hidden, wrong, row in zip(states.hidden, shown, states.response.tolist(), strict=True):
        prompt, clean = batch.ids[row, :start], batch.ids[row, start:]
        if batch.pad_mask is not None:
            prompt = prompt[batch.pad_mask[row, :start]]
        blocks = torch.zeros_like(clean) if batch.blocks is None else batch.blocks[row]
        logits = []
        for block in blocks.unique():
            seen = torch.where((wrong >= 0) & (blocks >= block), wrong, clean)
            seen = seen.masked_fill(hidden & (blocks >= block), backbone.spec.mask_id)
            canvas = torch.cat([prompt, seen])
            if forward is None:
                rows = backbone.denoise(canvas[None], response_start=len(prompt)).logits[0]
            else:
                rows = forward(canvas, row)
            logits.append(rows[len(prompt) :][blocks == block])
        found.append(torch.cat(logits).log_softmax(-1))
    return states, torch.stack(found)
