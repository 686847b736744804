"""Folders of a fine-tuning run: per epoch, last and best, also across a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
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


def test_an_unknown_monitor_is_named(tmp_path: Path) -> None:
    callback = AdapterCheckpoint(str(tmp_path / "a"), monitor="val/accuracy_at_5")
    with pytest.raises(ValueError, match="nothing was logged as 'val/accuracy_at_5'"):
        run(module(), data(), tmp_path, steps=3, total=3, callbacks=(callback,))
