"""Layers that run again in the backward."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_dlm.backbones import HFBackbone, LoRASettings
from lit_dlm.backbones.base import Rows
from tests.backbones.conftest import tiny_architecture
from tests.backbones.folders import IDS, randomise


def test_recomputation_changes_no_gradient_and_selective_computes_no_product_twice() -> None:
    """All 3 layers run once more in the backward, in each of two forwards.

    A training step multiplies three times what a forward does, four times what it recomputes.
    """
    gradients, flops, runs, ids = {}, {}, {}, IDS % 32
    for choice in (False, "selective", True):
        torch.manual_seed(0)
        backbone = HFBackbone(
            architecture=tiny_architecture(), trainable=True, gradient_checkpointing=choice
        ).train()
        calls: list[int] = []
        for layer in backbone.model.model.layers:
            # Before, not after: the recomputation stops as soon as it has what it needs.
            layer.mlp.register_forward_pre_hook(lambda *_args, calls=calls: calls.append(1))
        with FlopCounterMode(display=False) as counter:
            denoised = backbone.denoise(ids, hidden_layers=(1, -1))
            rows = backbone.encode_rows(Rows(ids, ids, torch.ones_like(ids, dtype=torch.bool)))
            loss = denoised.logits[..., 4:].square().mean() + denoised.hidden.square().mean()
            forward = counter.get_total_flops()
            (loss + rows.square().mean()).backward()
        flops[choice], runs[choice] = counter.get_total_flops() / forward, len(calls)
        assert backbone.model.config.use_cache is False
        gradients[choice] = {name: p.grad for name, p in backbone.named_parameters()}
    assert runs == {False: 6, "selective": 12, True: 12}
    for choice in ("selective", True):
        torch.testing.assert_close(gradients[choice], gradients[False], rtol=0, atol=0)
    assert flops["selective"] == flops[False] == pytest.approx(3, abs=0.2)
    assert flops[True] == pytest.approx(flops[False] + 1, abs=0.25)  # the head runs once


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("choice", [True, "selective"])
def test_recomputed_layers_run_with_the_adapter_of_their_forward(rank: int, choice: Any) -> None:
    """Gradients are taken after ``using_adapter`` has ended, where the policy's is in use again."""
    gradients = []
    for recompute in (False, choice):
        model = HFBackbone("tiny", lora=LoRASettings(rank=2), gradient_checkpointing=recompute)
        model.add_side_adapter("value", LoRASettings(rank=rank, targets="all"))
        randomise(model.train(), "value")
        with model.using_adapter("value"):
            values = model.encode_rows(Rows(IDS, IDS, IDS > 0))
        scores = model.encode_rows(Rows(IDS, IDS, IDS > 0))
        (values.square().sum() + scores.sum()).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all(value is not None for value in gradients[0].values())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
