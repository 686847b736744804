from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerFn

from lit_dlm.callbacks.joint_early_stopping import JointEarlyStopping
from tests.finetuning.runs import quiet


def run(callback: JointEarlyStopping, *scores: tuple[float, float]) -> list[bool]:
    state = SimpleNamespace(fn=TrainerFn.FITTING)
    trainer: Any = SimpleNamespace(sanity_checking=False, state=state, should_stop=False)
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


class Constant(BoringModel):
    """Logs the same score in every validation."""

    def on_validation_epoch_end(self) -> None:
        self.log("score", 1.0)


def test_a_fit_ends_when_nothing_improves(tmp_path: Path) -> None:
    """Two validations behind the best one, which is the first."""
    stopping = JointEarlyStopping(["score"], patience=2)
    options: dict[str, Any] = {"limit_train_batches": 1, "limit_val_batches": 1, "max_epochs": 8}
    trainer = quiet(tmp_path, callbacks=[stopping], **options)
    trainer.fit(Constant())
    assert (trainer.current_epoch, stopping.best) == (3, {"score": 1.0})
    saved = tmp_path / "last.ckpt"
    trainer.save_checkpoint(saved)
    again = JointEarlyStopping(["score"], patience=2)
    trainer = quiet(tmp_path, callbacks=[again], **options)
    trainer.fit(Constant(), ckpt_path=saved, weights_only=True)
    assert (trainer.current_epoch, again.waited) == (3, 2)  # nothing more is trained
