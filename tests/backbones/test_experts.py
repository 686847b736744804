"""Families with experts: their own code's logits, names in files, products, and adapters.

``golden/families.safetensors`` holds what the code that the releases are run with gives for weights
of :func:`weights_of`: modeling_lladamoe.py, modeling_llada2_moe.py and modeling_llada21_moe.py of
ZHZisZZ/dllm, modeling_sdar_moe.py of PKU-SEC-Lab/TEAM-MoE-dLLM, and of families without experts
modeling.py of Fast_dLLM_v2_7B and a2d/models/qwen3/modeling_qwen3.py of ZHZisZZ/dllm; with it the
CRC-32 of the names and shapes of their weights.
"""

import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lit_dlm.backbones import HFBackbone, LoRASettings, load_backbone, resolve
from lit_dlm.backbones.export import export_model, save_adapter
from lit_dlm.backbones.loading import random_decoder
from lit_dlm.backbones.visibility import aligned
from tests.backbones.folders import A2D, FAST_DLLM, SPARSE, randomise, weights_of, write

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "families.safetensors")
IDS = GOLDEN["ids"]
RELEASED = {**SPARSE, "fast_dllm": FAST_DLLM, "a2d": A2D}


@pytest.mark.parametrize(
    ("case", "name"),
    [*((name, name) for name in RELEASED), ("llada21", "llada2.1")],
)
def test_names_and_logits_are_those_of_the_families_own_code(
    tmp_path: Path, case: str, name: str
) -> None:
    """In their files and in ours, which transformers reads by itself."""
    config = RELEASED[name.removesuffix(".1")]
    tensors = weights_of(config)
    named = "\n".join(f"{key} {list(one.shape)}" for key, one in sorted(tensors.items()))
    assert zlib.crc32(named.encode()) == GOLDEN[f"{case}.names"]
    backbone = load_backbone(write(tmp_path / f"{name}-mini", config, tensors, shards=2))
    assert backbone.spec.family == name
    assert backbone.spec.edits_tokens is (name == "llada2.1")
    expected = aligned(GOLDEN[case], backbone.spec.shift).clone()
    expected[..., backbone.spec.forbidden_ids] = -torch.inf
    logits = backbone.denoise(IDS).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    export_model(backbone, tmp_path / "again", layout="original")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(written[key].equal(tensors[key]) for key in tensors)
    export_model(backbone, tmp_path / "hf")
    same = load_backbone(tmp_path / "hf")
    assert same.architecture.digest() == backbone.architecture.digest()
    assert same.denoise(IDS).logits.equal(logits)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(IDS).logits
    theirs = aligned(theirs, backbone.spec.shift)
    torch.testing.assert_close(theirs, backbone(IDS), atol=1e-5, rtol=0)


def grouped(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Multiplications and additions of ``(S, K)`` with ``(experts, K, N)``: a row meets one."""
    return 2 * rows[0] * rows[1] * weights[2]


@pytest.mark.parametrize("name", SPARSE)
def test_a_token_meets_the_products_of_its_experts_alone(name: str) -> None:
    architecture = resolve(SPARSE[name]).architecture
    experts = architecture.experts
    shapes = architecture.parameter_shapes()
    share = experts.per_token / experts.number
    active = sum(
        torch.Size(shape).numel() * (share if len(shape) == 3 else 1)
        for key, shape in shapes.items()
        if len(shape) > 1 and "embed" not in key
    )
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})
    with torch.device("meta"), counter:
        model = random_decoder(architecture, attn_implementation="sdpa", dtype=torch.bfloat16)
        model(torch.zeros(2, 16, dtype=torch.long))
    counts = counter.get_flop_counts()["Global"]
    assert torch.ops.aten._grouped_mm in counts
    # Beside them keys, values and queries: 16 columns.
    assert 1.0 <= sum(counts.values()) / (2 * 2 * 16 * active) <= 1.3


FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(("name", "targets"), [("llada2", "all"), ("sdar_moe", FEED_FORWARD)])
def test_adapters_on_experts_load_in_peft_and_merge(
    tmp_path: Path, name: str, targets: Any
) -> None:
    """peft puts them on transformers' own class with the same logits."""
    config = SPARSE[name]
    folder = str(write(tmp_path / "base", config, weights_of(config)))
    settings = LoRASettings(rank=2, alpha=6, targets=targets)
    backbone = HFBackbone(folder, lora=settings).eval()
    randomise(backbone)
    logits = backbone(IDS)
    logits.sum().backward()
    for key, value in backbone.named_parameters():
        assert (value.grad is not None) == value.requires_grad == (".lora_" in key)
    adapted = {
        key.partition(".lora_")[0].rpartition("layers.")[2]
        for key, value in backbone.named_parameters()
        if value.requires_grad
    }
    assert {"1.mlp.experts", "1.mlp.experts.base_layer"} <= adapted
    assert any("q_proj" in one for one in adapted) == (targets == "all")
    save_adapter(backbone, tmp_path / "adapter")
    again = load_backbone(folder, adapter=tmp_path / "adapter")
    assert again.adapter.modules() == sorted(settings.modules())
    assert again(IDS).equal(logits)
    export_model(backbone, tmp_path / "merged")
    torch.testing.assert_close(
        load_backbone(tmp_path / "merged")(IDS), logits, atol=1e-4, rtol=1e-4
    )
    export_model(load_backbone(folder), tmp_path / "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that keys are missing is only warned about
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        theirs = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    torch.testing.assert_close(theirs(IDS).logits, logits, atol=1e-5, rtol=0)


def test_biases_of_routers_are_not_rounded(tmp_path: Path) -> None:
    """Which experts are picked hangs on small differences; a file may hold them in any dtype."""
    config = SPARSE["llada2"]
    tensors = weights_of(config)
    folder = write(tmp_path / "base", config, tensors)
    key = "model.layers.1.mlp.gate.expert_bias"
    moved = load_backbone(folder).to(torch.bfloat16)
    for backbone in (load_backbone(folder, dtype="bfloat16"), moved):
        assert backbone.dtype == torch.bfloat16
        export_model(backbone, tmp_path / "again", layout="original")
        written = load_file(tmp_path / "again" / "model.safetensors")
        assert written[key].equal(tensors[key])
        assert written["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("llada_moe", {"moe_layer_freq": [0, 1]}, "mlp_only_layers"),
        ("llada_moe", {"shared_expert_intermediate_size": 16}, "shared_expert_intermediate_size"),
        ("llada_moe", {"expert_intermediate_size": None}, "moe_intermediate_size is absent"),
        ("llada2", {"score_function": "softmax"}, "score_function"),
        ("llada2", {"use_bias": True}, "use_bias"),
        ("llada2", {"n_group": 3}, r"config\.json: .*experts: .*16 in 3 equal groups"),
        ("llada2", {"num_experts_per_tok": 9}, "experts: .*hold the 9 of a token"),
        ("sdar_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ],
)
def test_what_is_not_so_in_these_families_is_refused_by_name(
    name: str, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        resolve({**SPARSE[name], **change})


def test_files_with_other_experts_name_the_first(tmp_path: Path) -> None:
    config = SPARSE["sdar_moe"]
    tensors = weights_of(config)
    first = "model.layers.0.mlp.experts.7.down_proj.weight"
    more = {**tensors, "model.layers.1.mlp.experts.8.up_proj.weight": tensors[first].clone()}
    fewer = {key: value for key, value in tensors.items() if "experts.7." not in key}
    for broken, told in (
        (more, r"1 unexpected, such as \['model\.layers\.1\.mlp\.experts\.8\.up_proj"),
        (fewer, rf"6 keys are absent, such as \['{first}"),
        ({**tensors, first: torch.ones(2, 3)}, rf"{first} has shape \(2, 3\), expected \(32, 16\)"),
    ):
        with pytest.raises(ValueError, match=told):
            load_backbone(write(tmp_path / "m", config, broken))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"targets": ["gate_proj", "q_proj"]}, r"lora\.targets: .*together"),
        ({"targets": "all", "dropout": 0.1}, r"lora\.dropout"),
    ],
)
def test_adapters_that_experts_cannot_have_are_refused(settings: Any, told: str) -> None:
    architecture = resolve(SPARSE["llada2"]).architecture
    with pytest.raises(ValueError, match=told):
        HFBackbone(architecture=architecture, lora=LoRASettings(**settings))
