"""The files of examples/ work as their docstrings say, from the folder that they lie in."""

from __future__ import annotations

import ast
import csv
import json
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import cli

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
EXP = ROOT / "configs" / "exp"
QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")


@pytest.fixture(autouse=True)
def _in_their_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(FOLDER))])


def shown(name: str) -> str:
    """The YAML lines of an example's docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    assert text is not None
    _, _, rest = text.partition("::\n\n")
    lines = [line for line in rest.splitlines() if not line or line.startswith("    ")]
    return textwrap.dedent("\n".join(lines))


def config(tmp_path: Path, content: object) -> str:
    path = tmp_path / "example.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_the_policy_decodes(tmp_path: Path, capsys):
    """Where nothing is ever sure, the loop commits the leftmost cell, one a step."""

    def decoded(*options: str) -> str:
        prompt = "Tom has 34 pens, finds 7, loses 5. How many pens?"
        cli.main(["generate", prompt, "--response_length", "32", *options])
        return capsys.readouterr().out

    file = config(tmp_path, yaml.safe_load(shown("commit_policy")))
    assert "#### " in decoded("--config", file)
    never_sure = decoded("--config", file, "--policy.init_args.threshold=2")
    assert never_sure == decoded("--policy=SequentialPolicy")


@pytest.mark.slow
def test_the_task_is_decoded_and_graded(tmp_path: Path):
    run_dir = tmp_path / "run"
    content = {
        "trainer": {
            "logger": False,
            "callbacks": [{"class_path": "ResultWriter", "init_args": {"run_dir": str(run_dir)}}],
        },
        "model": {
            "class_path": "DecodeModule",
            "init_args": {
                "backbone": {"class_path": "HFBackbone", "init_args": {"path": "tiny"}},
                "tokenizer": "tiny",
                "decoders": {"confidence": {"policy": "ConfidencePolicy"}},
            },
        },
        **yaml.safe_load(shown("task")),
    }
    content["data"]["init_args"]["results_dir"] = str(run_dir / "results")
    cli.main(["predict", "--config", config(tmp_path, content), f"--run_dir={run_dir}", *QUIET])
    (summary,) = json.loads((run_dir / "summary.json").read_text())
    assert (summary["task"], summary["n"]) == ("totals", 4)
    assert summary["accuracy"] is not None


@pytest.mark.slow
def test_the_training_method_trains(tmp_path: Path):
    file = config(tmp_path, yaml.safe_load(shown("training_method")))
    cli.main(
        [
            *("fit", "--config", str(EXP / "sft_gt_tiny.yaml"), "--config", file),
            *(f"--run_dir={tmp_path}", "--trainer.max_steps=2", *QUIET),
        ]
    )
    assert "training_method.SuffixMasking" in (tmp_path / "fit.yaml").read_text()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_reward_is_paid(tmp_path: Path):
    """A right response earns something below 1, the others nothing."""
    rewards = yaml.safe_load(shown("reward"))
    content = config(tmp_path, {"data": {"init_args": rewards}})
    cli.main(
        [
            *("fit", "--config", str(EXP / "tracerl_tiny.yaml"), "--config", content),
            *(f"--run_dir={tmp_path}", "--trainer.max_epochs=1", *QUIET),
            *("--trainer.num_sanity_val_steps=0", "--trainer.limit_val_batches=0"),
            *("--trainer.callbacks=[]", "--trainer.check_val_every_n_epoch=1"),
            *("--data.init_args.prompts_per_step=4", "--data.init_args.responses_per_prompt=4"),
            "--data.init_args.filters=[]",
        ]
    )
    with (tmp_path / "logs" / "version_0" / "metrics.csv").open(newline="") as file:
        step = next(csv.DictReader(file))
    assert 0 < float(step["rollout/reward/few_steps"]) < float(step["rollout/correct"])
    assert "reward.FewSteps" in (tmp_path / "fit.yaml").read_text()
