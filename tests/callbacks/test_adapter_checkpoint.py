"""Folders of a fine-tuning run: per epoch, last and best, also across a restart."""

import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from safetensors.torch import load_file

from lit_dlm.callbacks.adapter_checkpoint import AdapterCheckpoint
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.training.masking import RandomMasking
from tests.finetuning.runs import Data, Watch, examples, run, small

WEIGHTS = "adapter_model.safetensors"


def data(**options: float) -> Data:
    return Data(examples(16), **{"batch_size": 4, "val_fraction": 0.3, **options})


def same(one: Path, other: Path) -> bool:
    left, right = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return all(torch.equal(value, right[name]) for name, value in left.items())


def fitted(
    tmp_path: Path, *callbacks: Callback, given: Any = None, steps: int = 3, **options: Any
) -> SFTModule:
    """A run of three batches an epoch."""
    fast: Any = {"optimizer": partial(torch.optim.AdamW, lr=0.05), "warmup_steps": 0}
    model = SFTModule(small(), tokenizer="tiny", masking=RandomMasking(), **fast)
    options = {"total": steps, **options}
    run(model, given or data(), tmp_path, steps=steps, callbacks=callbacks, **options)
    return model


def names(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def test_every_epoch_the_last_and_the_best_have_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    model = fitted(tmp_path, AdapterCheckpoint(str(folder), monitor="val/loss"), steps=9)
    scores = json.loads((folder / "scores.json").read_text())["scores"]
    assert names(folder) == sorted([*scores, "best", "last", "scores.json"])
    assert len(scores) >= 2
    assert same(folder / "best", folder / min(scores, key=lambda name: scores[name]))
    assert same(folder / "last", folder / max(scores))
    model.export(tmp_path / "now")
    assert same(folder / "last", tmp_path / "now")


@pytest.mark.parametrize(("former", "best"), [(-1.0, []), (math.nan, ["best"])])
def test_the_best_score_survives_a_restart(tmp_path: Path, former: float, best: list[str]) -> None:
    """What an earlier run reached stays the best until something is better."""
    callback = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/loss", mode="min")
    state = {"scores": {"epoch-00": former}, "epochs_ended": None, "measured": None}
    callback.load_state_dict(state)
    fitted(tmp_path, callback)
    assert names(tmp_path / "a") == [*best, "epoch-00", "last", "scores.json"]


def test_between_its_epochs_nothing_is_written_but_the_end_is(tmp_path: Path) -> None:
    """Folders are due every second epoch, and the run ends in the middle of two; one that is too
    short for a best is not refused."""
    folder = tmp_path / "a"
    options: dict[str, Any] = {"every_n_epochs": 2, "monitor": "val/loss"}
    callback = AdapterCheckpoint(str(folder), **options)
    model = fitted(tmp_path, callback, steps=100, max_epochs=3, total=-1)
    assert names(folder) == ["best", "epoch-01", "last", "scores.json"]
    model.export(tmp_path / "now")
    assert same(folder / "last", tmp_path / "now")
    assert not same(folder / "last", folder / "epoch-01")
    short, bare = AdapterCheckpoint(str(tmp_path / "b"), **options), data(val_fraction=0.0)
    fitted(tmp_path, short, given=bare, steps=100, max_epochs=1, total=-1)
    assert names(tmp_path / "b") == ["last"]


def saver(folder: Path) -> Callback:
    """Saves as ``ModelCheckpoint`` with a number of steps does: before validation."""

    def save(trainer: Trainer, *_: object) -> None:
        if trainer.is_last_batch:
            trainer.save_checkpoint(folder / f"epoch{trainer.current_epoch}.ckpt")

    return LambdaCallback(on_train_batch_end=save)


@pytest.mark.parametrize("options", [{}, {"max_epochs": 3, "total": -1}])
def test_an_epoch_that_ended_in_the_checkpoint_gets_its_folder(
    tmp_path: Path, options: dict[str, int]
) -> None:
    """Two of three batches are an epoch's update; the third is left for another pass."""

    def go(name: str, resume: Path | None = None) -> Path:
        callback = AdapterCheckpoint(str(tmp_path / name), monitor="val/loss")
        given = {"accumulate_grad_batches": 2, "resume": resume, **options}
        fitted(tmp_path, saver(tmp_path), callback, **given)
        return tmp_path / name

    whole = go("whole")
    resumed = go("resumed", tmp_path / "epoch1.ckpt")
    epochs = ["epoch-00", "epoch-01", "epoch-02"]
    assert names(whole, "epoch-*") == epochs
    assert names(resumed, "epoch-*") == epochs[1:]
    assert all(same(whole / name, resumed / name) for name in [*epochs[1:], "last"])
    scores = json.loads((resumed / "scores.json").read_text())["scores"]
    assert sorted(scores) == ["epoch-00", "epoch-02"]  # the second one was not validated again


def test_an_epoch_resumed_behind_its_validation_has_its_score(tmp_path: Path) -> None:
    """Validated after the fourth batch of six, saved after the fifth one."""

    def save(trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(tmp_path / "fifth.ckpt")

    def go(name: str, resume: Path | None = None) -> str:
        callback = AdapterCheckpoint(str(tmp_path / name), monitor="val/loss")
        saver = LambdaCallback(on_train_batch_end=save)
        given = {"given": data(batch_size=2), "steps": 9, "total": -1, "max_epochs": 1}
        fitted(tmp_path, callback, saver, resume=resume, val_check_interval=4, **given)
        return (tmp_path / name / "scores.json").read_text()

    assert go("whole") == go("resumed", tmp_path / "fifth.ckpt")


def test_a_monitor_that_is_not_logged_is_named(tmp_path: Path) -> None:
    """At the start where no validation will log it, else after the first one."""
    watch, callback = Watch(), AdapterCheckpoint(str(tmp_path / "a"), monitor="val/loss")
    late = {"check_val_every_n_epoch": 3, "max_epochs": 2}
    for options in ({"given": data(val_fraction=0.0)}, late):
        with pytest.raises(ValueError, match="a run with validation, which logs 'val/loss'"):
            fitted(tmp_path, callback, watch, **options)
    assert watch.batches == []
    assert not (tmp_path / "a").exists()
    callback = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/accuracy_at_5")
    with pytest.raises(ValueError, match="nothing was logged as 'val/accuracy_at_5'"):
        fitted(tmp_path, callback)


def test_only_epochs_that_were_validated_have_a_score(tmp_path: Path) -> None:
    """What Lightning keeps of an earlier epoch is not the score of another one's weights."""
    callback = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/loss")
    fitted(tmp_path, callback, steps=15, check_val_every_n_epoch=2)
    assert names(tmp_path / "a", "epoch-*") == [f"epoch-{number:02d}" for number in range(5)]
    assert list(callback.scores) == ["epoch-01", "epoch-03"]


def test_the_weights_of_another_run_are_neither_mixed_nor_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    fitted(tmp_path, AdapterCheckpoint(str(folder)), steps=6)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    watch = Watch()
    with pytest.raises(ValueError, match=rf"{folder}: .* got epoch-00, epoch-01, last of a former"):
        fitted(tmp_path, AdapterCheckpoint(str(folder)), watch)
    assert watch.batches == []
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    fitted(tmp_path, AdapterCheckpoint(str(folder)), steps=9, resume=tmp_path / "run.ckpt")
    assert (folder / "epoch-02").is_dir()


def kill(trainer: Trainer, *_: object) -> None:
    if trainer.current_epoch == 1:
        raise RuntimeError("killed")


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_run_cut_short_is_begun_anew_where_it_cannot_be_resumed(
    tmp_path: Path, has_checkpoint: bool
) -> None:
    folder = tmp_path / "a"
    savers = (saver(tmp_path / "run"),) if has_checkpoint else ()
    killed = AdapterCheckpoint(str(folder), monitor="val/loss")
    killer = LambdaCallback(on_train_epoch_start=kill)
    with pytest.raises(RuntimeError, match="killed"):
        fitted(tmp_path / "run", killed, *savers, killer, steps=6)
    assert (folder / "best").is_dir()
    refusal = pytest.raises(ValueError, match="resume that one with --ckpt_path last")
    with refusal if has_checkpoint else nullcontext():
        fitted(tmp_path / "run", AdapterCheckpoint(str(folder)), steps=2)
    left = {"best", ".unfinished", "scores.json"} if has_checkpoint else set()
    assert set(names(folder)) == {"epoch-00", "last", *left}
