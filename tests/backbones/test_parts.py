"""Replaced parts against those of transformers."""

from collections.abc import Callable

import pytest
import torch

from lit_dlm.backbones import HFBackbone
from lit_dlm.backbones.parts import FusedRMSNorm, Linear, cache_argument

Maker = Callable[..., HFBackbone]
IDS = torch.tensor([[5, 9, 3, 7, 3, 11], [4, 3, 8, 3, 6, 2]])


@pytest.mark.parametrize("decoder", ["qwen2", "llama", "qwen3"])
@torch.no_grad()
def test_fused_norms_give_the_bits_of_transformers(make_backbone: Maker, decoder: str):
    backbone = make_backbone(decoder=decoder)
    for parameter in backbone.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    theirs = backbone.architecture.model_class(backbone.model.config).eval()
    theirs.load_state_dict(backbone.model.state_dict())
    for layer in theirs.model.layers:
        layer.self_attn.is_causal = False
    visible = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    expected = theirs(IDS, attention_mask=visible).logits
    assert backbone.forward(IDS, visible).equal(expected)


def test_a_fused_norm_stays_in_the_dtype_of_its_input():
    """Weights 1.5 in float32: one cell of bfloat16 alone has a root mean square of itself."""
    norm = FusedRMSNorm(1)
    norm.weight.data.fill_(1.5)
    assert norm(torch.full((2, 1), 4.0, dtype=torch.bfloat16)).tolist() == [[1.5], [1.5]]
    assert norm(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_large_products_of_inference_are_those_of_training(bias: bool):
    """Rounding apart; small ones and those of half precision have the same bits."""
    torch.manual_seed(0)
    large, small = Linear(512, 640, bias=bias), Linear(512, 32, bias=bias)
    x = torch.randn(2, 5, 512)
    with torch.no_grad():
        found = large(x)
        torch.testing.assert_close(found, large.double()(x.double()).float())
        assert found.stride() == (3200, 640, 1)
        assert torch.equal(small(x), torch.nn.functional.linear(x, small.weight, small.bias))
        large.bfloat16()
        expected = torch.nn.functional.linear(x.bfloat16(), large.weight, large.bias)
        assert torch.equal(large(x.bfloat16()), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert large.float()(x).dtype == torch.bfloat16
    large(x).sum().backward()
    assert large.weight.grad is not None


def test_a_cache_goes_to_the_argument_that_transformers_has_for_it():
    class Before(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None): ...

    class Since(torch.nn.Module):  # 5.24, where the other name warns
        def forward(self, input_ids, cache=None): ...

    assert [cache_argument(Before), cache_argument(Since)] == ["past_key_values", "cache"]
