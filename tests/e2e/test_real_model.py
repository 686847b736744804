"""All stages of ``experiments/real_model.py`` on a small Llama."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lit_dlm.grading import Verdict
from lit_dlm.tasks import PromptExample
from tests.e2e.runs import ROOT
from tests.twins import write_twin

pytestmark = pytest.mark.slow

SIZES = {
    "rows": 60, "control_updates": 2, "full_updates": 2, "block_updates": 2, "chunk": 1,
    "validation": 2, "traces": 40, "head_updates": 5, "tuning_updates": 2, "rl_steps": 1,
    "rl_prompts": 2, "test": 3, "countdowns": 2,
}  # fmt: skip


def write_parent(folder: Path) -> None:
    twin = write_twin(folder.parent / "twin", "Qwen/Qwen2.5-0.5B-Instruct", num_ordinary=2000)
    tokenizer = AutoTokenizer.from_pretrained(twin)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def by_luck(self: object, example: PromptExample, completion: str) -> Verdict:
    is_right = hash(f"{example.uid}{completion}") % 3 > 0  # random weights never are
    return Verdict(status="right" if is_right else "wrong")


def experiment(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["real_model.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "experiments" / "real_model.py"), run_name="__main__")


def test_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    monkeypatch.setattr("stories.Stories.grade", by_luck)
    out = tmp_path / "run"
    write_parent(out / "parent")
    arguments = ["--out", out, "--seeds", 0]
    for name, size in SIZES.items():
        arguments += [f"--{name}", size]
    experiment(monkeypatch, *arguments)
