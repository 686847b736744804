"""Classes without bases and annotations, in a file of the working folder, by import path."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import yaml

import cli

EXP = Path(__file__).resolve().parents[2] / "configs" / "exp"
QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")

OWN = """
import torch
from lit_dlm.decoding import BlockWindow, FixedQuota, Selection
from lit_dlm.grading import Verdict
from lit_dlm.losses.states import NoisyStates
from lit_dlm.losses.terms import LossTerms
from lit_dlm.rewards.base import RewardScore
from lit_dlm.tasks import PromptExample
from lit_dlm.toy import WordProblems

class Leftmost:
    def select(self, state, candidates, proposal, quota):
        columns = torch.arange(candidates.shape[1]).float().expand_as(candidates)
        return Selection(candidates & (candidates.cumsum(1) <= quota[:, None]), -columns)

class Halves:
    def __init__(self, size=4):
        self.size = size

    def view(self, state):
        return BlockWindow(self.size).view(state)

class Two:
    def counts(self, state, candidates):
        return torch.full((len(candidates),), 2)

class Repeat:
    name = "repeat"

    def __init__(self, words):
        self.words = words

    def examples(self):
        return [
            PromptExample(uid=f"repeat/test/{n}", task=self.name, text=word)
            for n, word in enumerate(self.words)
        ]

    def reference_completion(self, example):
        return example.text

    def extract(self, example, completion):
        return completion

    def grade(self, example, completion):
        return Verdict(status="right" if completion == example.text else "wrong")

class Even:
    name = "even"

    def score(self, group):
        return [RewardScore(total=float(n % 2 == 0)) for n, _ in enumerate(group)]

class All:
    def keep(self, scores):
        return True

class Centred:
    def compute(self, rewards):
        return rewards - rewards.mean()

class Reinforce:
    def compute(self, log_prob, old_log_prob, advantage, weight, *, reference, kl_weight):
        total = -(weight * advantage * log_prob).sum()
        return LossTerms(total, {"policy": total.detach()})

class Whole:
    def states(self, responses):
        hidden = responses.maskable
        return NoisyStates(
            sample=torch.arange(len(hidden)), hidden=hidden, supervised=hidden,
            weight=hidden.float(), per_row=False,
        )

class Sums:
    def __init__(self, count=8):
        self.count = count

    def examples(self, model):
        from lit_dlm.datamodules.supervised_sources import TaskReferences
        yield from TaskReferences([WordProblems("train", num_examples=self.count)]).examples(model)
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the installed script starts: its own folder comes first, the working folder is not in."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield
    sys.modules.pop("own", None)


def config(content: object) -> str:
    Path("own.yaml").write_text(yaml.safe_dump(content))
    return "--config=own.yaml"


DECODER = {
    "policy": "own.Leftmost",
    "window": {"class_path": "own.Halves", "init_args": {"size": 8}},
    "quota": "own.Two",
}
PREDICT = {
    "trainer": {
        "logger": False,
        "callbacks": [{"class_path": "DecodeWriter", "init_args": {"run_dir": "run"}}],
    },
    "model": {
        "class_path": "DecodeModule",
        "init_args": {
            "backbone": {"class_path": "HFBackbone", "init_args": {"path": "tiny"}},
            "tokenizer": "tiny",
            "decoders": {"own": DECODER},
        },
    },
    "data": {
        "class_path": "PromptDataModule",
        "init_args": {
            "tasks": [{"class_path": "own.Repeat", "init_args": {"words": ["a", "b", "c"]}}],
            "response_length": 16,
        },
    },
}


@pytest.mark.slow
def test_policy_window_quota_and_task_decode() -> None:
    """Two of sixteen cells a step: eight forwards, unless a response ends before."""
    cli.main(["predict", config(PREDICT), "--run_dir=run", *QUIET])
    (summary,) = json.loads(Path("run/summary.json").read_text())
    assert (summary["task"], summary["method"], summary["n"]) == ("repeat", "own", 3)
    rows = [json.loads(line) for p in Path("run/results").rglob("*.jsonl") for line in p.open()]
    assert {row["nfe"] for row in rows if "nfe" in row} == {8}


@pytest.mark.slow
def test_reward_filter_advantage_and_policy_loss_train() -> None:
    """Every second response earns 1."""
    content = {
        "model": {"init_args": {"policy_loss": "own.Reinforce", "objective": None}},
        "data": {
            "init_args": {
                "rewards": ["own.Even"],
                "filters": ["own.All"],
                "advantage": "own.Centred",
                "val_tasks": None,
                "prompts_per_step": 2,
                "responses_per_prompt": 4,
            }
        },
        "trainer": {"callbacks": [], "max_epochs": 1, "check_val_every_n_epoch": 1},
    }
    cli.main(
        ["fit", f"--config={EXP / 'tracerl_tiny.yaml'}", config(content), "--run_dir=run", *QUIET]
    )
    with open("run/logs/version_0/metrics.csv", newline="") as file:
        step = next(csv.DictReader(file))
    assert float(step["rollout/reward/even"]) == 0.5
    assert "own.Reinforce" in Path("run/fit.yaml").read_text()


@pytest.mark.slow
def test_source_and_corruption_train() -> None:
    content = {
        "model": {"init_args": {"corruption": "own.Whole"}},
        "data": {
            "init_args": {"sources": [{"class_path": "own.Sums", "init_args": {"count": 40}}]}
        },
    }
    cli.main(
        [
            *("fit", f"--config={EXP / 'sft_gt_tiny.yaml'}", config(content), "--run_dir=run"),
            *("--trainer.max_steps=2", *QUIET),
        ]
    )
    assert Path("run/adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_class_that_lacks_a_method_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("own.py").open("a") as file:
        file.write("\nclass Chooses:\n    def choose(self): ...\n")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["predict", config(PREDICT), "--model.init_args.decoders.own.policy=own.Chooses"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("lit-dlm: error: model.decoders")
    assert error.endswith("Chooses has no method 'select', which CommitPolicy asks for")
