"""Memory and devices of loading, and matrices in 4 bits where bitsandbytes is installed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dlm.backbones import HFBackbone, LoRASettings, load_backbone, weights
from lit_dlm.backbones.export import export_model, save_adapter
from lit_dlm.training.sharding import decoding_weights
from tests.backbones.conftest import tiny_architecture
from tests.backbones.folders import write
from tests.backbones.reference import LLADA, random_tensors
from tests.twins import write_twin

MEBIBYTE = 2**20


def test_loading_needs_the_weights_and_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """8 layers of 4 MiB and two tables of 4 MiB in shards of 6: at most 40 + 6 MiB, not 80."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of the resident memory can be reset on Linux only")
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_layers": 8}
    architecture = tiny_architecture(decoder="llama", num_heads=4, initializer_range=0.02, **sizes)
    monkeypatch.setattr(weights, "SHARD_BYTES", 6 * MEBIBYTE)
    export_model(HFBackbone(architecture=architecture), tmp_path)
    shards = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(shards) >= 6
    command = [sys.executable, "-m", "tests.backbones.loads", str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, total = map(int, printed.split())
    assert total > 39 * MEBIBYTE
    # Memory that the allocator still held makes it less; half a shard is the allocator's own.
    assert grown <= total + max(shards) + 3 * MEBIBYTE


def test_loading_goes_straight_to_the_device(tmp_path: Path):
    """The meta device stands for any other: no weight is left on the CPU."""
    folder = write(tmp_path / "m", LLADA, random_tensors(LLADA))
    backbone = load_backbone(folder, device="meta")
    assert {p.device.type for p in backbone.parameters()} == {"meta"}


IDS = torch.tensor([[40, 41, 42, 43, 44, 45]])


def test_without_bitsandbytes_one_line_says_so(monkeypatch: Any):
    monkeypatch.setattr("lit_dlm.backbones.hf.find_spec", {}.get)
    with pytest.raises(ValueError, match=r"bitsandbytes \(pip install 'bitsandbytes>=0.45'\)"):
        HFBackbone("tiny", load_in_4bit=True)


def test_logits_are_those_of_the_rounded_weights_and_adapters_train(tmp_path: Path):
    """A quarter of the bytes; whole matrices with the same rounding give the same logits."""
    functional = pytest.importorskip("bitsandbytes", reason="it is not installed").functional
    model = str(write_twin(tmp_path / "d", "Dream-org/Dream-v0-Instruct-7B", hidden_size=128))
    whole = HFBackbone(model, dtype="bfloat16")
    packed = HFBackbone(model, dtype="bfloat16", load_in_4bit=True, lora=LoRASettings(rank=2))
    found = {
        name.removesuffix(".base_layer"): module.weight
        for name, module in packed.model.model.layers.named_modules()
        if type(module).__name__ == "Linear4bit" and not hasattr(module, "base_layer")
    }
    assert len(found) == 14
    before = whole(IDS)
    for name, weight in found.items():
        matrix = whole.model.model.layers.get_submodule(name).weight
        assert weight.numel() * weight.element_size() * 4 == matrix.numel() * 2
        matrix.data = functional.dequantize_4bit(weight.data, weight.quant_state).to(matrix.dtype)
    assert not torch.equal(whole(IDS), before)
    torch.testing.assert_close(packed(IDS), whole(IDS), rtol=0.05, atol=0.05)  # bfloat16 products
    assert packed.describe()["load_in_4bit"]
    packed(IDS).float().logsumexp(-1).sum().backward()
    trained = {n: p for n, p in packed.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert any(float(p.grad.abs().max()) > 0.0 for p in trained.values() if p.grad is not None)
    plain = packed(IDS)
    for parameter in trained.values():
        torch.nn.init.constant_(parameter, 0.1)
    adapted = packed(IDS)
    assert not torch.equal(adapted, plain)
    with decoding_weights(packed):  # nothing is merged
        assert torch.equal(packed(IDS), adapted)
    save_adapter(packed, tmp_path / "a")
    again = load_backbone(model, dtype="bfloat16", load_in_4bit=True, adapter=tmp_path / "a")
    torch.testing.assert_close(again(IDS), packed(IDS), rtol=0.05, atol=0.05)  # other kernels
    with pytest.raises(ValueError, match="load_in_4bit"):
        export_model(packed, tmp_path / "x")
