from types import SimpleNamespace
from typing import Any

from lit_dlm.callbacks.joint_early_stopping import JointEarlyStopping


def run(callback: JointEarlyStopping, *scores: tuple[float, float]) -> list[bool]:
    trainer: Any = SimpleNamespace(sanity_checking=False, training=True, should_stop=False)
    stops = []
    for a, b in scores:
        trainer.callback_metrics = {"a": a, "b": b}
        callback.on_validation_end(trainer, None)  # type: ignore[arg-type]
        stops.append(trainer.should_stop)
    return stops


def test_stops_after_patience_validations_in_which_no_score_improves() -> None:
    one_improves = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.5), (0.0, 1.5)]
    assert run(JointEarlyStopping(["a", "b"], patience=2), *one_improves) == [False] * 4
    none_does = [(1.0, 1.0), (1.0, 0.0), (0.5, 1.0)]
    assert run(JointEarlyStopping(["a", "b"], patience=2), *none_does) == [False, False, True]
    # A resumed run goes on counting.
    first, second = JointEarlyStopping(["a"], patience=3), JointEarlyStopping(["a"], patience=3)
    run(first, (1.0, 0.0), (1.0, 0.0), (1.0, 0.0))
    second.load_state_dict(first.state_dict())
    assert run(second, (1.0, 0.0)) == [True]
