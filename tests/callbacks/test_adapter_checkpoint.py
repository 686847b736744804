"""Folders of a fine-tuning run: per epoch, last and best, also across a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file

from callbacks.adapter_checkpoint import AdapterCheckpoint
from lit_dlm.losses.corruption import RandomMasking
from lit_dlm.modules.sft import SFTModule
from tests.finetuning import Data, examples, run, small

WEIGHTS = "adapter_model.safetensors"


def module() -> SFTModule:
    return SFTModule(
        small(),
        tokenizer="tiny",
        corruption=RandomMasking(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
        warmup_steps=0,
    )


def data() -> Data:
    return Data(examples(16), batch_size=4, val_fraction=0.3)


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
    callback.load_state_dict({"scores": {"epoch-00": -1.0}})
    run(module(), data(), tmp_path, steps=3, total=3, callbacks=(callback,))
    assert not (tmp_path / "a" / "best").exists()
    assert (tmp_path / "a" / "last").is_dir()


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
    """Three batches an epoch are two updates."""

    def go(name: str, resume: Path | None = None) -> Path:
        callback = AdapterCheckpoint(str(tmp_path / name), monitor="val/loss")
        given = {"steps": 6, "total": 6, "accumulate_grad_batches": 2, **options}
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
