"""Classes without bases and annotations, in a file of the working folder, by import path."""

import csv
import json
import sys
from pathlib import Path

import pytest

import cli

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unpainted")]
QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")

OWN = """
import torch
from lit_dlm.decoding import BlockWindow, FixedQuota, Selection
from lit_dlm.grading import Verdict
from lit_dlm.training.states import States
from lit_dlm.training.terms import LossTerms
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
        for n, word in enumerate(self.words):
            yield PromptExample(uid=f"repeat/test/{n}", task=self.name, text=word)

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
    def states(self, batch):
        hidden = batch.maskable
        return States(response=torch.arange(len(hidden)), hidden=hidden, supervised=hidden)

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


DECODERS = """{own: {policy: own.Leftmost, quota: own.Two,
    window: {class_path: own.Halves, init_args: {size: 8}}}}"""
PREDICT = (
    *("predict", "--config=exp/evaluate_tiny", "--run_dir=run", "--data.response_length=16"),
    "--data.tasks=[{class_path: own.Repeat, init_args: {words: [a, b, c]}}]",
    *("--trainer.logger=false", f"--model.decoders={DECODERS}", *QUIET),
)


def test_policy_window_quota_and_task_decode() -> None:
    """Two of sixteen cells a step: eight forwards, unless a response ends before."""
    cli.main([*PREDICT])
    (summary,) = json.loads(Path("run/summary.json").read_text())
    assert (summary["task"], summary["method"], summary["n"]) == ("repeat", "own", 3)
    rows = [json.loads(line) for p in Path("run/results").rglob("*.jsonl") for line in p.open()]
    assert {row["nfe"] for row in rows if "nfe" in row} == {8}


def test_reward_filter_advantage_and_policy_loss_train() -> None:
    """Every second response earns 1."""
    flags = """--model.policy_loss=own.Reinforce --model.objective=null --data.rewards=[own.Even]
        --data.filters=[own.All] --data.advantage=own.Centred --data.val_tasks=null
        --data.prompts_per_step=2 --data.responses_per_prompt=4 --trainer.callbacks=[]
        --trainer.max_epochs=1 --trainer.check_val_every_n_epoch=1"""
    cli.main(["fit", "--config=exp/tracerl_tiny", "--run_dir=run", *flags.split(), *QUIET])
    with open("run/logs/version_0/metrics.csv", newline="") as file:
        step = next(csv.DictReader(file))
    assert float(step["rollout/reward/even"]) == 0.5
    assert "own.Reinforce" in Path("run/fit.yaml").read_text()


def test_source_and_masking_train() -> None:
    sources = "--data.sources=[{class_path: own.Sums, init_args: {count: 40}}]"
    flags = ("--model.masking=own.Whole", sources, "--trainer.max_steps=2", *QUIET)
    cli.main(["fit", "--config=exp/sft_gt_tiny", "--run_dir=run", *flags])
    assert Path("run/adapter/adapter_model.safetensors").is_file()
