"""Replaced parts, memory at loading and recomputation."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_dlm.backbones import HFBackbone, load_backbone, weights
from lit_dlm.backbones.base import Rows
from lit_dlm.backbones.export import export_model
from lit_dlm.backbones.parts import FusedRMSNorm, Linear, cache_argument
from tests.backbones.conftest import tiny_architecture
from tests.backbones.folders import write
from tests.backbones.reference import LLADA, random_tensors

Maker = Callable[..., HFBackbone]
IDS = torch.tensor([[5, 9, 3, 7, 3, 11], [4, 3, 8, 3, 6, 2]])
MEBIBYTE = 2**20


def memory(field: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


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


def test_loading_needs_the_weights_and_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """8 layers of 4 MiB and two tables of 4 MiB in shards of 6: at most 40 + 6 MiB, not 80."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        pytest.skip("the peak of the resident memory can be reset on Linux only")
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_layers": 8}
    architecture = tiny_architecture(decoder="llama", num_heads=4, initializer_range=0.02, **sizes)
    monkeypatch.setattr(weights, "SHARD_BYTES", 6 * MEBIBYTE)
    export_model(HFBackbone(architecture=architecture), tmp_path)
    shards = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(shards) >= 6
    load_backbone(tmp_path)  # what the first load allocates once is not counted
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is kept would hide a peak
    reset.write_text("5")
    before = memory("VmRSS")
    backbone = load_backbone(tmp_path)
    grown = memory("VmHWM") - before
    total = sum(parameter.nbytes for parameter in backbone.parameters())
    assert total > 39 * MEBIBYTE
    # Memory that the allocator still held makes it less; 2 MiB are the allocator's own.
    assert grown <= total + max(shards) + 2 * MEBIBYTE


def test_recomputation_changes_no_gradient_and_selective_computes_no_product_twice() -> None:
    """All 3 layers run once more in the backward, in each of two forwards.

    A training step multiplies three times what a forward does, four times what it recomputes.
    """
    gradients, flops, runs = {}, {}, {}
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
            denoised = backbone.denoise(IDS, hidden_layers=(1, -1))
            rows = backbone.encode_rows(Rows(IDS, IDS, torch.ones_like(IDS, dtype=torch.bool)))
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


def test_loading_goes_straight_to_the_device(tmp_path: Path):
    """The meta device stands for any other: no weight is left on the CPU."""
    folder = write(tmp_path / "m", LLADA, random_tensors(LLADA))
    backbone = load_backbone(folder, device="meta")
    assert {p.device.type for p in backbone.parameters()} == {"meta"}


def test_a_cache_goes_to_the_argument_that_transformers_has_for_it():
    class Before(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None): ...

    class Since(torch.nn.Module):  # 5.24, where the other name warns
        def forward(self, input_ids, cache=None): ...

    assert [cache_argument(Before), cache_argument(Since)] == ["past_key_values", "cache"]
