from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_dlm.backbones import FromAR, HFBackbone
from lit_dlm.callbacks import AttentionAnnealing

IDS = torch.tensor([[5, 9, 20, 7, 23, 11]])


def test_training_goes_from_the_causal_model_to_the_bidirectional_one(tmp_path: Path):
    """With transformers' own model as the reference of the first step."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    reference = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.5)).eval()
    reference.save_pretrained(tmp_path)
    causal = reference(IDS).logits
    backbone = HFBackbone(str(tmp_path), from_ar=FromAR(shift=0), trainable=True)
    trainer, module = SimpleNamespace(global_step=0), SimpleNamespace(backbone=backbone)
    annealing = AttentionAnnealing(steps=4)
    full = backbone.eval()(IDS)[..., :24]
    annealing.on_fit_start(trainer, module)
    assert torch.equal(backbone(IDS)[..., :24], full)  # as in validation
    backbone.train()
    torch.testing.assert_close(backbone(IDS)[..., :24], causal, rtol=1e-5, atol=1e-5)
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), IDS], dim=1)
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]).bool()
    alone = backbone(padded, mask=real)[:, 2:, :24]
    torch.testing.assert_close(alone, causal, rtol=1e-5, atol=1e-5)
    trainer.global_step = 2
    middle = backbone(IDS)[..., :24]
    assert (middle - causal).abs().max() > 0.01
    assert (middle - full).abs().max() > 0.01
    trainer.global_step = 4
    assert torch.equal(backbone(IDS)[..., :24], full)
    trainer.global_step = 0
    annealing.on_fit_end(trainer, module)
    assert torch.equal(backbone(IDS)[..., :24], full)


def test_the_share_of_later_tokens_rises_and_earlier_ones_are_seen():
    annealing = AttentionAnnealing(steps=10)
    later = torch.ones(300, 300).triu(1).bool()
    for step in range(11):
        seen = annealing.visible(300, step)[0, 0]
        assert seen[~later].all()
        assert seen[later].float().mean() == pytest.approx(step / 10, abs=0.01)
        assert torch.equal(seen, annealing.visible(300, step)[0, 0])
    assert not torch.equal(annealing.visible(300, 5), annealing.visible(300, 6))
