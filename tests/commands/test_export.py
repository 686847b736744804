"""Exported folders: what plain transformers and peft read, cards, and the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_dlm.backbones import HFBackbone, LoRASettings, load_backbone, load_tokenizer
from tests.e2e.runs import fails, run
from tests.twins import write_twin

IDS = torch.tensor([[40, 41, 42, 43, 44, 45]])
DREAM = "Dream-org/Dream-v0-Instruct-7B"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A twin of Dream and an adapter for it whose every factor is random."""
    folder = tmp_path_factory.mktemp("models")
    model = write_twin(folder / "dream", DREAM)
    backbone = HFBackbone(str(model), dtype="bfloat16", lora=LoRASettings(rank=2))
    torch.manual_seed(0)
    for name, parameter in backbone.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    backbone.save_adapter(folder / "adapter")
    return str(model), str(folder / "adapter")


def raw(backbone: HFBackbone) -> torch.Tensor:
    """Logits of a model with a right shift as its own decoder gives them: row i speaks of i + 1."""
    return backbone(IDS)[:, 1:]


@pytest.mark.slow
def test_a_merged_export_is_the_same_model_in_transformers(twin: Any, tmp_path: Path):
    """Merged, in float32 as the adapter runs: only rounding differs; the tokenizer is beside it."""
    model, adapter = twin
    with torch.no_grad():
        run(
            "merge",
            model,
            str(tmp_path / "m"),
            "--adapter",
            adapter,
            "--dtype=float32",
            "--layout=hf",
        )
        merged = load_backbone(model, adapter=adapter)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="sdpa")
        assert theirs.dtype == torch.float32
        torch.testing.assert_close(theirs(IDS).logits[:, :-1], raw(merged), rtol=0, atol=1e-4)
        assert not torch.equal(raw(merged), raw(load_backbone(model)))
    text = "What is 2 + 3?"
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "m")(text)["input_ids"]
        == load_tokenizer(model)(text)["input_ids"]
    )
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert generation["mask_token_id"] == merged.spec.mask_id
    assert theirs.generation_config.pad_token_id == merged.spec.pad_id


@pytest.mark.slow
def test_an_exported_adapter_is_the_same_in_peft(twin: Any, tmp_path: Path):
    model, adapter = twin
    run("export", model, str(tmp_path / "base"), "--dtype=float32", "--layout=hf")
    run(
        *("export", model, str(tmp_path / "a"), "--adapter", adapter, "--only_adapter"),
        *("--dtype=float32", "--layout=hf"),
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="sdpa")
    theirs = PeftModel.from_pretrained(base, tmp_path / "a")
    with torch.no_grad():
        ours = raw(load_backbone(model, adapter=adapter))
        torch.testing.assert_close(theirs(IDS).logits[:, :-1], ours, rtol=0, atol=1e-5)
    card = (tmp_path / "a" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"


@pytest.mark.slow
def test_an_export_without_options_has_the_layout_that_came(twin: Any, tmp_path: Path):
    """The same keys, values and words of the configuration, and it decodes."""
    model, _ = twin
    run("export", model, str(tmp_path / "again"))
    before, after = (
        json.loads((Path(f) / "config.json").read_text()) for f in (model, tmp_path / "again")
    )
    assert after["model_type"] == before["model_type"] == "Dream"
    assert after["dtype"] == before["torch_dtype"] == "bfloat16"
    assert torch.equal(load_backbone(model)(IDS), load_backbone(tmp_path / "again")(IDS))


@pytest.mark.slow
def test_the_card_has_the_numbers_of_this_model_only(capsys: Any, tmp_path: Path):
    task = "{class_path: WordProblems, init_args: {num_examples: 4}}"
    overlay = tmp_path / "few.yaml"
    overlay.write_text(f"data: {{init_args: {{tasks: [{task}]}}}}\n")
    run("predict", "--config=exp/evaluate_tiny", f"--config={overlay}", f"--run_dir={tmp_path}")
    run("export", "tiny", str(tmp_path / "out"), f"--results={tmp_path}")
    card = (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "summary.md").read_text() in card
    data = yaml.safe_load(card.split("---")[1])
    found = data["model-index"][0]["results"][0]
    accuracy = json.loads((tmp_path / "summary.json").read_text())[0]["accuracy"]
    assert found["metrics"][0]["value"] == 100.0 * accuracy
    message = fails(capsys, "export", "tiny-planning", str(tmp_path / "x"), f"--results={tmp_path}")
    assert "has another weights_sha256" in message
    assert not (tmp_path / "x").exists()


def test_push_uploads_what_export_wrote_and_nothing_else(
    capsys: Any, monkeypatch: Any, tmp_path: Path
):
    calls: list[tuple[str, dict[str, Any]]] = []

    def called(name: str) -> Any:
        return lambda _, *args, **options: calls.append((name, {"args": args, **options}))

    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(f"huggingface_hub.HfApi.{name}", called(name))
    assert "expected a folder that 'lit-dlm export' wrote" in fails(
        capsys, "push", str(tmp_path), "me/model"
    )
    assert calls == []
    run("export", "tiny", str(tmp_path / "out"))
    run("push", str(tmp_path / "out"), "me/model")
    assert calls == [
        ("create_repo", {"args": ("me/model",), "private": True, "exist_ok": True}),
        ("upload_folder", {"args": (), "repo_id": "me/model", "folder_path": tmp_path / "out"}),
    ]
