"""What callbacks refuse, by the name of the option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from lit_dlm.callbacks import (
    AdapterCheckpoint,
    AttentionAnnealing,
    CalibrationPlot,
    DecodeWriter,
    DiscriminationScore,
    HttpJudge,
    JointEarlyStopping,
    TracePictures,
)
from tests.callbacks.letters import Letters, trace_module

METHOD = "method: expected 'confidence' or 'random', got 'no'"
JUDGE = {"model": "m", "url": "http://x"}


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (AttentionAnnealing, {"steps": 0}, "steps"),
        (AdapterCheckpoint, {"folder": "x", "every_n_epochs": 0}, "every_n_epochs"),
        (DecodeWriter, {}, "run_dir"),
        (DecodeWriter, {"trajectories_dir": "x", "max_gigabytes": 0.0}, "max_gigabytes"),
        (DiscriminationScore, {"folder": "x", "num_prompts": 0}, "num_prompts"),
        (HttpJudge, {**JUDGE, "run_dir": "x", "tasks": []}, "tasks"),
        (HttpJudge, {**JUDGE, "run_dir": "x", "tasks": ["sums"], "url": "localhost"}, "url"),
        (JointEarlyStopping, {"monitors": []}, "monitors"),
        (JointEarlyStopping, {"monitors": ["a"], "patience": 0}, "patience"),
        (TracePictures, {"folder": "x", "every_n_validations": 0}, "every_n_validations"),
    ],
)
def test_options_out_of_range_are_named(kind: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kind(**options)


@pytest.mark.parametrize(
    ("callback", "stage", "module", "name"),
    [
        (AdapterCheckpoint("x"), "fit", LightningModule(), "model: expected TrainableModule"),
        (DiscriminationScore("x"), "fit", LightningModule(), "model: expected TrainableModule"),
        (DecodeWriter("x"), "predict", LightningModule(), "model: expected DecodeModule"),
        (TracePictures("x"), "fit", LightningModule(), "model: expected DecodeModule"),
        (TracePictures("x"), "predict", trace_module(capture=False), r"model\.level"),
        (TracePictures("x", prompts=["a"], method="no"), "fit", trace_module(), METHOD),
        (HttpJudge("x", tasks=["sums"], **JUDGE), "predict", None, "tasks: .* 'letters'"),
    ],
)
def test_runs_of_another_kind_are_refused(
    callback: Any, stage: str, module: Any, name: str
) -> None:
    data = SimpleNamespace(tasks=[Letters()])
    with pytest.raises(ValueError, match=name):
        callback.setup(SimpleNamespace(callbacks=[callback], datamodule=data), module, stage)


@pytest.mark.parametrize(
    ("callback", "hook", "name"),
    [
        (JointEarlyStopping(["c"]), "on_validation_end", "'c' was not logged; logged: a"),
        (CalibrationPlot("x"), "on_validation_end", "model: expected TraceLockModule"),
        (AttentionAnnealing(5), "on_fit_start", "from_ar"),
    ],
)
def test_what_a_run_lacks_is_named(callback: Any, hook: str, name: str) -> None:
    trainer = SimpleNamespace(
        sanity_checking=False, training=True, global_step=0, callback_metrics={"a": 1.0}
    )
    with pytest.raises(ValueError, match=name):
        getattr(callback, hook)(trainer, trace_module())
