"""Diffusion models that start from autoregressive checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM

from lit_dlm.backbones import (
    FromAR,
    HFBackbone,
    LoRASettings,
    load_backbone,
    load_tokenizer,
    resolve,
)
from lit_dlm.backbones.base import UNKNOWN_ID
from lit_dlm.backbones.export import export_model
from lit_dlm.datamodules.supervised import SupervisedDataModule
from lit_dlm.datamodules.supervised_sources import ResponsesList
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.training.checkpoint import export_trained
from lit_dlm.training.masking import RandomMasking
from tests.finetuning.runs import run as tune

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.tensor([[5, 9, 20, 7, 23, 11]])


def checkpoint(folder: Path, kind: str = "qwen2", **changes: Any) -> Any:
    """An autoregressive checkpoint exactly as transformers writes it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def add_tokenizer(folder: Path, size: int, *added: str) -> None:
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0"))
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_attention_turns_bidirectional_and_the_mask_gets_a_row_of_its_own_at_the_mean(
    tmp_path: Path, kind: str, tied: bool
):
    """With transformers' own model run without its causal flag as the reference."""
    theirs = checkpoint(tmp_path, kind, tie_word_embeddings=tied)
    causal = theirs(IDS).logits
    theirs.config.is_causal = False
    expected = theirs(IDS).logits
    assert (expected - causal)[:, :-1].abs().max() > 0.01
    plain = HFBackbone(str(tmp_path), from_ar=FromAR(shift=0)).eval()
    torch.testing.assert_close(plain(IDS)[..., :24], expected)
    backbone = HFBackbone(str(tmp_path), from_ar=FromAR(shift=1), trainable=True).eval()
    torch.testing.assert_close(backbone(IDS)[:, 1:, :24], expected[:, :-1])
    spec = backbone.spec
    assert (spec.mask_id, spec.eos_ids, spec.pad_id, spec.shift) == (24, (2,), 2, 1)
    table, head = backbone.model.model.embed_tokens.weight, backbone.model.lm_head.weight
    assert torch.equal(table[:24], theirs.model.embed_tokens.weight)
    torch.testing.assert_close(table[24], theirs.model.embed_tokens.weight.mean(0))
    assert (head is table) == tied
    assert len(head) == backbone.vocab_size == 25
    backbone.denoise(torch.tensor([[5, 24]])).logits[0, 1, 4].backward()
    assert table.grad[24].abs().sum() > 0


@pytest.mark.parametrize(
    ("size", "token", "mask_id", "rows"),
    [
        (20, None, 20, 24),  # an unused row of the padded matrix
        (24, None, 24, 25),
        (20, "<|mask|>", 20, 24),  # known to the tokenizer: its row may be trained
    ],
)
def test_where_the_mask_goes_and_the_exported_tokenizer_knows_it(
    tmp_path: Path, size: int, token: str | None, mask_id: int, rows: int
):
    theirs = checkpoint(tmp_path / "ar")
    add_tokenizer(tmp_path / "ar", size, *([token] if token else []))
    backbone = HFBackbone(str(tmp_path / "ar"), from_ar=FromAR(shift=0))
    assert (backbone.spec.mask_id, backbone.vocab_size) == (mask_id, rows)
    table = theirs.model.embed_tokens.weight
    row = table[20] if token else table.mean(0)
    torch.testing.assert_close(backbone.model.model.embed_tokens.weight[mask_id], row)
    export_trained(backbone, str(tmp_path / "ar"), tmp_path / "dlm", write=True)
    tokenizer = load_tokenizer(str(tmp_path / "dlm"))
    assert tokenizer.mask_token_id == tokenizer.get_vocab()["<|mask|>"] == mask_id
    assert tokenizer.get_vocab()["w7"] == 7
    assert load_backbone(tmp_path / "dlm").spec == backbone.spec


NAMED = {
    "eos_token": "</s>",
    "pad_token": {"__type": "AddedToken", "content": "<pad>"},
    "mask_token": "[M]",
}


@pytest.mark.parametrize(
    ("size", "config", "named", "eos_ids", "pad_id", "mask_id", "rows"),
    [
        (20, {"eos_token_id": None}, NAMED, (20,), 21, 22, 24),
        (20, {"pad_token_id": 5}, NAMED, (2, 20), 5, 22, 24),
        (20, {"eos_token_id": 20}, {"eos_token": "</s>"}, (20,), 20, 23, 24),
        (20, {"eos_token_id": None}, {}, (UNKNOWN_ID,), 0, 23, 24),
        (24, {"eos_token_id": None}, NAMED, (24,), 25, 26, 27),  # beyond the checkpoint's rows
    ],
)
def test_the_tokenizer_names_what_the_configuration_does_not(
    tmp_path: Path,
    size: int,
    config: dict[str, Any],
    named: dict[str, Any],
    eos_ids: tuple[int, ...],
    pad_id: int,
    mask_id: int,
    rows: int,
):
    theirs = checkpoint(tmp_path / "ar", **config)
    add_tokenizer(tmp_path / "ar", size, "</s>", "<pad>", "[M]")
    (tmp_path / "ar" / "tokenizer_config.json").write_text(json.dumps(named))
    backbone = HFBackbone(str(tmp_path / "ar"), from_ar=FromAR(shift=0))
    spec = backbone.spec
    assert (spec.eos_ids, spec.pad_id, spec.mask_id) == (eos_ids, pad_id, mask_id)
    table, new = theirs.model.embed_tokens.weight, backbone.model.model.embed_tokens.weight
    assert len(new) == backbone.vocab_size == rows
    torch.testing.assert_close(new[mask_id], table[22] if mask_id == 22 else table.mean(0))
    export_trained(backbone, str(tmp_path / "ar"), tmp_path / "dlm", write=True)
    assert load_tokenizer(str(tmp_path / "dlm")).mask_token_id == mask_id


def test_a_model_without_an_end_of_text_is_tuned_with_that_of_its_tokenizer(tmp_path: Path):
    """Without any, the option that names one is told before the first batch."""
    checkpoint(tmp_path, vocab_size=462, eos_token_id=None)
    load_tokenizer("tiny").save_pretrained(tmp_path)
    source = ResponsesList([{"prompt": f"{n}+1", "answer": str(n + 1)} for n in range(4)])
    given = {"response_length": 8, "batch_size": 2}

    def tuned(**options: Any) -> SFTModule:
        start = {"from_ar": FromAR(shift=1), "trainable": True, **options}
        backbone = HFBackbone(str(tmp_path), **start)
        module = SFTModule(backbone, tokenizer=str(tmp_path), masking=RandomMasking())
        tune(module, SupervisedDataModule([source], **given), tmp_path, steps=1, total=1)
        return module

    assert tuned().backbone.spec.eos_ids == (1,)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
    with pytest.raises(ValueError, match=r"model\.backbone\.spec_overrides: expected eos_ids, as "):
        tuned()
    assert tuned(spec_overrides={"eos_ids": [1]}).backbone.spec.eos_ids == (1,)


def test_the_export_is_a_diffusion_model(tmp_path: Path):
    checkpoint(tmp_path / "ar", "qwen3")
    start = FromAR(shift=0, attention="block", block_size=4)
    backbone = HFBackbone(str(tmp_path / "ar"), from_ar=start).eval()
    export_model(backbone, tmp_path / "dlm")
    again = load_backbone(tmp_path / "dlm")
    assert again.spec == backbone.spec
    assert (again.spec.attention, again.spec.block_size) == ("block", 4)
    assert torch.equal(again(IDS), backbone(IDS))
    with pytest.raises(ValueError, match="from_ar: expected an autoregressive"):
        HFBackbone(str(tmp_path / "dlm"), from_ar=start)


def test_llama_files_without_newer_options(tmp_path: Path):
    """Llama 2 files name no rope_theta, head_dim or key-value heads.

    Chat models end a turn with a token that often only generation_config.json names.
    """
    checkpoint(tmp_path, "llama", num_key_value_heads=4)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "head_dim", "num_key_value_heads"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    architecture = resolve(tmp_path, from_ar=FromAR(shift=1)).architecture
    assert (architecture.rope_theta, architecture.kv_heads, architecture.head_width) == (1e4, 4, 4)
    assert architecture.eos_ids == (2, 7)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 128}),
    ],
)
def test_biases_and_rotary_scales_of_variants_are_kept(
    tmp_path: Path, kind: str, options: dict[str, Any]
):
    theirs = checkpoint(tmp_path, kind, **options)
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    theirs.save_pretrained(tmp_path)
    theirs.config.is_causal = False
    backbone = HFBackbone(str(tmp_path), from_ar=FromAR(shift=0)).eval()
    torch.testing.assert_close(backbone(IDS)[..., :24], theirs(IDS).logits)
    export_model(backbone, tmp_path / "out")
    assert torch.equal(load_backbone(tmp_path / "out")(IDS), backbone(IDS))


def test_misuse_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    checkpoint(tmp_path)
    with pytest.raises(ValueError, match="start from it with from_ar"):
        load_backbone(tmp_path)
    with pytest.raises(ValueError, match=r"from_ar: expected an autoregressive .* 'Dream'"):
        resolve({"model_type": "Dream"}, from_ar=FromAR(shift=1))
    HFBackbone(str(tmp_path), from_ar=FromAR(shift=1), lora=LoRASettings(rank=2))
    assert "the new mask embedding is frozen" in caplog.text
