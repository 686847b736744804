"""A run folder belongs to one set of settings."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_dlm.config.saved import claim, with_references
from tests.e2e.runs import problems, run

Change = Callable[[dict[str, Any]], object]


def config(run_dir: Path, ckpt_path: str | None = None) -> dict[str, Any]:
    """As a command of two stages parses it; the folder of the second is in that of the first."""
    judge = {"class_path": "HttpStepJudge", "init_args": {"url": "http://one", "model": "judge"}}
    return {
        "run_dir": str(run_dir),
        "seed_everything": 0,
        "tf32": False,
        "ckpt_path": ckpt_path,
        "trainer": {
            "default_root_dir": str(run_dir / "second"),
            "precision": None,
            "max_epochs": 3,
            "callbacks": None,
        },
        "model": {"init_args": {"policy": f"{run_dir}/policy", "optimizer": {"lr": 0.001}}},
        "data": {"init_args": {"num_workers": 0, "rewards": [judge], "seed": 0}},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a run whose second stage has begun, as has a third one in its folder."""
    for name in ("second", "second/third"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fit.yaml").write_text(yaml.safe_dump(config(tmp_path)))
    (tmp_path / "second/third/last.ckpt").touch()
    return tmp_path


def put(path: str, value: object) -> Change:
    """A change of one value, such as ``model.init_args.optimizer.lr``."""

    def change(options: Any) -> None:
        *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in keys:
            options = options[key]
        options[last] = value

    return change


SAME = {
    "nothing": lambda options: None,
    "length": put("trainer.max_epochs", 5),
    "callbacks": put("trainer.callbacks", ["RewardCurve"]),
    "workers": put("data.init_args.num_workers", 4),
    "graphs, which the folder does not know": put("model.init_args.cuda_graphs", True),
    "judge's address": put("data.init_args.rewards.0.init_args.url", "http://other"),
}
OTHER = {
    "model.optimizer.lr: 0.001, now 0.5": put("model.init_args.optimizer.lr", 0.5),
    "data.rewards.0.model: 'judge', now 'x'": put("data.init_args.rewards.0.init_args.model", "x"),
    "data.seed: 0, now 1": put("data.init_args.seed", 1),
    "seed_everything: 0, now 1": put("seed_everything", 1),
    "tf32: False, now True": put("tf32", True),
    "trainer.precision: None, now 'bf16-mixed'": put("trainer.precision", "bf16-mixed"),
    "trainer.gradient_clip_val: None, now 1.0": put("trainer.gradient_clip_val", 1.0),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_a_fit_without_checkpoints_begins_anew_with_the_same_settings(change: Change, saved: Path):
    options = config(saved)
    change(options)
    claim(options, {})


@pytest.mark.parametrize(("told", "change"), OTHER.items(), ids=OTHER)
@pytest.mark.parametrize("ckpt_path", [None, "last", "a.ckpt"])
def test_other_settings_are_named(told: str, change: Change, ckpt_path: str | None, saved: Path):
    options = config(saved, ckpt_path)
    change(options)
    with pytest.raises(ValueError, match="choose another --run_dir, or remove") as error:
        claim(options, {})
    folder = saved / "second"
    assert str(error.value).startswith(f"run_dir: {folder} holds a fit of other settings ({told})")
    assert str(error.value).endswith(f"remove {folder}/fit.yaml")
    (folder / "fit.yaml").unlink()
    claim(options, {})


def test_three_differences_are_named(saved: Path):
    options = config(saved)
    for change in OTHER.values():
        change(options)
    first = r"\(data.rewards.0.model: 'judge', now 'x'; data.seed: 0, now 1; model[^;]*0.5; ...\)"
    with pytest.raises(ValueError, match=first):
        claim(options, {})


@pytest.mark.parametrize(
    ("name", "way_on"), [("last.ckpt", "last"), ("last-former.ckpt", "last"), ("best.ckpt", None)]
)
def test_a_fit_with_checkpoints_goes_on_or_is_left_alone(
    name: str, way_on: str | None, saved: Path
):
    file = saved / "second/checkpoints" / name
    file.parent.mkdir()
    file.touch()
    way_on = way_on or str(file)
    for refused in {None, "last"} - {way_on}:
        with pytest.raises(ValueError, match=f"goes on with --ckpt_path {way_on}; a new one"):
            claim(config(saved, refused), {})
    for taken in (way_on, "elsewhere/last.ckpt"):
        claim(config(saved, taken), {})


def test_a_moved_folder_goes_on(saved: Path):
    moved = saved / "moved"
    (saved / "second").rename(moved.with_name("second-later"))
    moved.mkdir()
    (saved / "second-later").rename(moved / "second")
    claim(config(moved), {})
    options = deepcopy(config(moved))
    options["model"]["init_args"]["policy"] = f"{saved}/policy"
    with pytest.raises(ValueError, match=r"model.policy: '\$\{run_dir\}/policy', now '/"):
        claim(options, {})


def test_what_is_saved_runs_in_another_folder(monkeypatch: pytest.MonkeyPatch):
    """Texts like the folder's name that are no references stay, as do references to settings."""
    monkeypatch.setenv("DATA", "/é")
    composed = {
        "run_dir": "tiny",
        "trainer": {
            "default_root_dir": "${run_dir}/x",
            "every": "${model.number}",
            "save_dir": "${trainer.default_root_dir}",
        },
        "model": {"number": "3", "decoders": {"x": {"path": "${run_dir}/p"}}},
        "data": {"tasks": [{"file": "${oc.env:DATA}/a.jsonl"}], "path": "tiny"},
        "more": "${oc.env:DATA,here}/b.jsonl",
    }
    parsed = {
        "run_dir": "tiny",
        "trainer": {"default_root_dir": "tiny/x", "every": 3, "save_dir": "tiny/x"},
        "model": {"number": 3, "decoders": {"x": {"init_args": {"path": "tiny/p"}}}},
        "data": {"tasks": [{"class_path": "A", "file": "/é/a.jsonl"}], "path": "tiny"},
        "more": "/é/b.jsonl",
    }
    assert with_references(parsed, composed) == {
        "run_dir": "tiny",
        "trainer": {
            "default_root_dir": "${run_dir}/x",
            "every": 3,
            "save_dir": "${trainer.default_root_dir}",
        },
        "model": {"number": 3, "decoders": {"x": {"init_args": {"path": "${run_dir}/p"}}}},
        "data": {
            "tasks": [{"class_path": "A", "file": "${oc.env:DATA}/a.jsonl"}],
            "path": "tiny",
        },
        "more": '${oc.env:DATA,"/é"}/b.jsonl',  # and the value that was read
    }


@pytest.mark.slow  # two runs of one step
def test_a_saved_file_runs_in_the_folder_that_it_is_given(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    sources = (
        f"--data.sources=[{{class_path: TaskReferences, init_args: {{tasks: {problems(8)}}}}}]"
    )
    run("fit", "--config=exp/sft_gt_tiny", f"--run_dir={old}", sources, "--trainer.max_steps=1")
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*")}
    run("fit", f"--config={old}/fit.yaml", f"--run_dir={new}")
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*")} == before
    names = [{path.relative_to(one) for path in one.rglob("*")} for one in (old, new)]
    assert names[0] == names[1]
    saved = (new / "fit.yaml").read_text()
    assert saved == (old / "fit.yaml").read_text().replace(f"run_dir: {old}\n", f"run_dir: {new}\n")
