"""Classes without bases and annotations, in a file of the working folder, by import path.

Those that ``examples/`` does not have; tests/test_examples.py runs the others.
"""

import json
import sys
from pathlib import Path

import pytest

import cli
from tests.e2e.runs import problems

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unpainted")]
QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")

OWN = """
import torch
from lit_dlm.decoding import BlockWindow
from lit_dlm.toy import WordProblems

class Halves:
    def __init__(self, size=4):
        self.size = size

    def view(self, state):
        return BlockWindow(self.size).view(state)

class Two:
    def counts(self, state, candidates):
        return torch.full((len(candidates),), 2)

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


def test_a_window_and_a_quota_decode() -> None:
    """Two of sixteen cells a step: eight forwards, unless a response ends before."""
    decoders = """{own: {policy: SequentialPolicy, quota: own.Two,
        window: {class_path: own.Halves, init_args: {size: 8}}}}"""
    flags = ("--run_dir=run", "--data.response_length=16", f"--data.tasks={problems(3)}")
    flags += ("--trainer.logger=false", f"--model.decoders={decoders}", *QUIET)
    cli.main(["predict", "--config=exp/evaluate_tiny", *flags])
    (summary,) = json.loads(Path("run/summary.json").read_text())
    assert (summary["method"], summary["n"]) == ("own", 3)
    rows = [json.loads(line) for p in Path("run/results").rglob("*.jsonl") for line in p.open()]
    assert {row["nfe"] for row in rows if "nfe" in row} == {8}


def test_a_source_trains() -> None:
    sources = "--data.sources=[{class_path: own.Sums, init_args: {count: 40}}]"
    flags = ("--run_dir=run", sources, "--trainer.max_steps=2", *QUIET)
    cli.main(["fit", "--config=exp/sft_gt_tiny", *flags])
    assert Path("run/adapter/adapter_model.safetensors").is_file()
