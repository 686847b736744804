from types import SimpleNamespace
from typing import Any

import torch

from lit_dlm.callbacks.joint_early_stopping import JointEarlyStopping


def run(callback: JointEarlyStopping, *scores: tuple[float, float]) -> list[bool]:
    trainer: Any = SimpleNamespace(sanity_checking=False, training=True, should_stop=False)
    stops = []
    for a, b in scores:
        trainer.callback_metrics = {"a": torch.tensor(a), "b": torch.tensor(b)}
        callback.on_validation_end(trainer, None)  # type: ignore[arg-type]
        stops.append(trainer.should_stop)
    return stops


def test_one_improving_score_keeps_training_alive() -> None:
    callback = JointEarlyStopping(["a", "b"], patience=2)
    assert run(callback, (1.0, 0.0), (0.0, 1.0), (0.0, 0.5), (0.0, 1.5)) == [False] * 4


def test_stops_after_patience_validations_without_any_improvement() -> None:
    callback = JointEarlyStopping(["a", "b"], patience=2)
    assert run(callback, (1.0, 1.0), (1.0, 0.0), (0.5, 1.0)) == [False, False, True]


def test_a_resumed_run_goes_on_counting() -> None:
    first = JointEarlyStopping(["a"], patience=3)
    run(first, (1.0, 0.0), (1.0, 0.0), (1.0, 0.0))
    second = JointEarlyStopping(["a"], patience=3)
    second.load_state_dict(first.state_dict())
    assert run(second, (1.0, 0.0)) == [True]
