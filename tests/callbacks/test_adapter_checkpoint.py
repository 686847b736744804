"""Folders of a fine-tuning run: per epoch, last and best, also across a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file

from lit_dlm.callbacks.adapter_checkpoint import AdapterCheckpoint
from lit_dlm.callbacks.discrimination import DiscriminationScore
from lit_dlm.decoding import Decoder, EntropyPolicy
from lit_dlm.losses.corruption import RandomMasking
from lit_dlm.modules.finetune import SFTModule
from tests.finetuning import Data, Watch, examples, run, small

WEIGHTS = "adapter_model.safetensors"


def module() -> SFTModule:
    return SFTModule(
        small(),
        tokenizer="tiny",
        corruption=RandomMasking(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
        warmup_steps=0,
    )


def data(**options: float) -> Data:
    return Data(examples(16), **{"batch_size": 4, "val_fraction": 0.3, **options})


def same(one: Path, other: Path) -> bool:
    left, right = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return all(torch.equal(value, right[name]) for name, value in left.items())


def test_every_epoch_the_last_and_the_best_have_a_folder(tmp_path: Path) -> None:
    callback = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/loss")
    model = module()
    run(model, data(), tmp_path, steps=9, total=9, callbacks=(callback,))
    scores = json.loads((tmp_path / "a" / "scores.json").read_text())["scores"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(
        [*scores, "best", "last", "scores.json"]
    )
    assert len(scores) >= 2
    best = min(scores, key=lambda name: scores[name])
    assert same(tmp_path / "a" / "best", tmp_path / "a" / best)
    assert same(tmp_path / "a" / "last", tmp_path / "a" / max(scores))
    model.export(tmp_path / "now")
    assert same(tmp_path / "a" / "last", tmp_path / "now")


def test_the_best_score_survives_a_restart(tmp_path: Path) -> None:
    """What an earlier run reached stays the best until something is better."""
    callback = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/loss", mode="min")
    callback.load_state_dict({"scores": {"epoch-00": -1.0}, "epochs_ended": None})
    run(module(), data(), tmp_path, steps=3, total=3, callbacks=(callback,))
    assert not (tmp_path / "a" / "best").exists()
    assert (tmp_path / "a" / "last").is_dir()


def test_between_its_epochs_nothing_is_written_but_the_end_is(tmp_path: Path) -> None:
    """Folders are due every second epoch, and the run ends in the middle of two."""
    folder = tmp_path / "a"
    callback = AdapterCheckpoint(str(folder), every_n_epochs=2, monitor="val/loss")
    model = module()
    run(model, data(), tmp_path, steps=100, max_epochs=3, total=-1, callbacks=(callback,))
    assert sorted(path.name for path in folder.iterdir()) == [
        "best", "epoch-01", "last", "scores.json",
    ]  # fmt: skip
    model.export(tmp_path / "now")
    assert same(folder / "last", tmp_path / "now")
    assert not same(folder / "last", folder / "epoch-01")


def test_a_run_too_short_for_a_best_is_not_refused(tmp_path: Path) -> None:
    callback = AdapterCheckpoint(str(tmp_path / "a"), every_n_epochs=2, monitor="val/loss")
    run(
        module(),
        data(val_fraction=0.0),
        tmp_path,
        steps=100,
        max_epochs=1,
        total=-1,
        callbacks=(callback,),
    )
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["last"]


class SaveAtLastBatches(Callback):
    """Saves as ``ModelCheckpoint`` with a number of steps does: before validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.is_last_batch:
            trainer.save_checkpoint(self.folder / f"epoch{trainer.current_epoch}.ckpt")


@pytest.mark.parametrize("options", [{}, {"max_epochs": 3, "total": -1}])
def test_an_epoch_that_ended_in_the_checkpoint_gets_its_folder(
    tmp_path: Path, options: dict[str, int]
) -> None:
    """Two of three batches are an epoch's update; the third is left for another pass."""

    def go(name: str, resume: Path | None = None) -> Path:
        callback = AdapterCheckpoint(str(tmp_path / name), monitor="val/loss")
        given = {"steps": 3, "total": 3, "accumulate_grad_batches": 2, **options}
        savers = (SaveAtLastBatches(tmp_path), callback)
        run(module(), data(), tmp_path, resume=resume, callbacks=savers, **given)  # type: ignore[arg-type]
        return tmp_path / name

    whole = go("whole")
    resumed = go("resumed", tmp_path / "epoch1.ckpt")
    epochs = ["epoch-00", "epoch-01", "epoch-02"]
    assert sorted(path.name for path in whole.glob("epoch-*")) == epochs
    assert sorted(path.name for path in resumed.glob("epoch-*")) == epochs[1:]
    assert all(same(whole / name, resumed / name) for name in [*epochs[1:], "last"])
    scores = json.loads((resumed / "scores.json").read_text())["scores"]
    assert sorted(scores) == ["epoch-00", "epoch-02"]  # the second one was not validated again


def test_an_unknown_monitor_is_named(tmp_path: Path) -> None:
    callback = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/accuracy_at_5")
    with pytest.raises(ValueError, match="nothing was logged as 'val/accuracy_at_5'"):
        run(module(), data(), tmp_path, steps=3, total=3, callbacks=(callback,))


def test_a_monitor_that_no_validation_will_log_is_refused_at_the_start(tmp_path: Path) -> None:
    watch = Watch()
    late = {"check_val_every_n_epoch": 3, "max_epochs": 2}
    for given, options in ((data(val_fraction=0.0), {}), (data(), late)):
        callback = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/loss")
        with pytest.raises(ValueError, match="a run with validation, which logs 'val/loss'"):
            run(module(), given, tmp_path, steps=3, callbacks=(callback, watch), **options)
    assert watch.batches == []
    assert not (tmp_path / "a").exists()


def test_only_epochs_that_were_validated_have_a_score(tmp_path: Path) -> None:
    """What Lightning keeps of an earlier epoch is not the score of another one's weights."""
    callback = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/loss")
    run(
        module(), data(), tmp_path, steps=15, total=15, callbacks=(callback,),
        check_val_every_n_epoch=2,
    )  # fmt: skip
    epochs = [f"epoch-{number:02d}" for number in range(5)]
    assert sorted(path.name for path in (tmp_path / "a").glob("epoch-*")) == epochs
    assert list(callback.scores) == ["epoch-01", "epoch-03"]


def test_an_epoch_without_the_discrimination_score_has_none(tmp_path: Path) -> None:
    """Measured by a callback, it needs no validation, and not every epoch has it."""
    model = module()
    model.decoders["entropy"] = Decoder(policy=EntropyPolicy())
    measure = DiscriminationScore(str(tmp_path / "tds"), num_prompts=2, every_n_epochs=2)
    best = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/tds", mode="max")
    run(model, data(val_fraction=0.0), tmp_path, steps=12, total=12, callbacks=(measure, best))
    assert list(best.scores) == ["epoch-01"]
    assert best.scores["epoch-01"] == pytest.approx(measure.scores["epoch 1"], rel=1e-6)


def test_the_weights_of_another_run_are_neither_mixed_nor_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    run(module(), data(), tmp_path, steps=6, total=6, callbacks=(AdapterCheckpoint(str(folder)),))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    watch = Watch()
    with pytest.raises(ValueError, match=rf"{folder}: .* got epoch-00, epoch-01, last of a former"):
        run(
            module(), data(), tmp_path, steps=3, total=3,
            callbacks=(AdapterCheckpoint(str(folder)), watch),
        )  # fmt: skip
    assert watch.batches == []
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    resume = tmp_path / "run.ckpt"
    callback = AdapterCheckpoint(str(folder))
    run(module(), data(), tmp_path, steps=9, total=9, resume=resume, callbacks=(callback,))
    assert (folder / "epoch-02").is_dir()


class Kill(Callback):
    """Ends the run in its second epoch."""

    def on_train_epoch_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("killed")


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_run_cut_short_is_begun_anew_where_it_cannot_be_resumed(
    tmp_path: Path, has_checkpoint: bool
) -> None:
    folder = tmp_path / "a"
    savers = (SaveAtLastBatches(tmp_path / "run"),) if has_checkpoint else ()
    killed = (AdapterCheckpoint(str(folder), monitor="val/loss"), *savers, Kill())
    with pytest.raises(RuntimeError, match="killed"):
        run(module(), data(), tmp_path / "run", steps=6, total=6, callbacks=killed)
    assert (folder / "best").is_dir()

    def again() -> None:
        anew = AdapterCheckpoint(str(folder))
        run(module(), data(), tmp_path / "run", steps=2, total=2, callbacks=(anew,))

    if has_checkpoint:
        with pytest.raises(ValueError, match="resume that one with --ckpt_path last"):
            again()
        assert (folder / "best").is_dir()
    else:
        again()
        assert sorted(path.name for path in folder.iterdir()) == ["epoch-00", "last"]
