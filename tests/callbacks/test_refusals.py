"""What callbacks refuse, by the name of the option."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lit_dlm.callbacks import (
    AdapterCheckpoint,
    AttentionAnnealing,
    CalibrationPlot,
    DecodeWriter,
    DiscriminationScore,
    HttpJudge,
    JointEarlyStopping,
    RewardCurve,
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


OTHER = LightningModule()


@pytest.mark.parametrize(
    ("callback", "hook", "module", "name"),
    [
        (AdapterCheckpoint("x"), "setup fit", OTHER, "model: expected TrainableModule"),
        (DiscriminationScore("x"), "setup fit", OTHER, "model: expected TrainableModule"),
        (DecodeWriter("x"), "setup predict", OTHER, "model: expected DecodeModule"),
        (TracePictures("x"), "setup fit", OTHER, "model: expected DecodeModule"),
        (TracePictures("x"), "setup predict", trace_module(capture=False), r"model\.level"),
        (TracePictures("x", prompts=["a"], method="no"), "setup fit", trace_module(), METHOD),
        (HttpJudge("x", tasks=["sums"], **JUDGE), "setup predict", None, "tasks: .* 'letters'"),
        (RewardCurve("x"), "setup fit", OTHER, "model: expected TraceRLModule"),
        (CalibrationPlot("x"), "on_validation_end", OTHER, "model: expected TraceLockModule"),
        (JointEarlyStopping(["c"]), "on_validation_end", OTHER, "'c' was not logged; logged: a"),
        (AttentionAnnealing(5), "on_fit_start", trace_module(), "from_ar"),
    ],
)
def test_runs_of_another_kind_are_refused(callback: Any, hook: str, module: Any, name: str) -> None:
    name_of_hook, *stage = hook.split()
    given = {"callbacks": [callback], "datamodule": SimpleNamespace(tasks=[Letters()])}
    state = SimpleNamespace(fn=TrainerFn.FITTING)
    given |= {"sanity_checking": False, "state": state, "callback_metrics": {"a": 1.0}}
    with pytest.raises(ValueError, match=name):
        getattr(callback, name_of_hook)(SimpleNamespace(**given), module, *stage)
