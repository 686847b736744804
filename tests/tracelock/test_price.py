"""The price of a forward: its rule by hand, and runs in which it changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.rewards import Graded
from lit_dlm.rewards.speed import ForwardPrice
from lit_dlm.rl.metrics import RolloutValidation
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.tracelock.price import PriceConstraint
from lit_dlm.tracelock.scorer import AcceptanceScorer, ScorerSettings
from tests.rollouts import DigitReward, fit, rollout_data
from tests.tracelock.test_outcome import WORDS, actor

TASKS = [WordProblems("train", num_examples=3, seed=1)]


def test_the_price_rises_while_every_window_holds() -> None:
    """0.80 - 0.02 = 0.78 still holds, 0.77 does not: 0.01 * 1.5 = 0.015, 0.015 / 1.5 = 0.01."""
    rule = PriceConstraint(margin=0.02, rate=0.5)
    start = {"a/accuracy": 0.8, "b/accuracy": 0.5}
    for a, b, before, after in (
        (0.78, 0.9, 0.01, 0.015),
        (0.77, 0.9, 0.015, 0.01),
        (0.9, 0.47, 0.03, 0.02),
    ):
        now = {"a/accuracy": a, "b/accuracy": b, "c/accuracy": 0.0}
        assert rule.next(before, start=start, now=now) == pytest.approx(after)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": -0.1}, r"^constraint\.margin: expected a number in \[0, 1\], got -0\.1$"),
        ({"rate": 0.0}, r"^constraint\.rate: expected a number in \(0, inf\), got 0\.0$"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PriceConstraint(**options)


@pytest.mark.parametrize(
    ("rewards", "tasks", "message"),
    [
        ([Graded()], TASKS, r"^data\.rewards: expected ForwardPrice, .*, got none$"),
        ([Graded(), ForwardPrice(0.0)], TASKS, r"^constraint: ForwardPrice\.price: .* got 0\.0$"),
        ([Graded(), ForwardPrice(0.1)], None, r"^constraint: expected graded val_tasks, .* none$"),
        ([DigitReward(), ForwardPrice(0.1)], TASKS, r"^constraint: expected graded val_tasks, .*"),
    ],
)
def test_runs_without_a_price_or_an_accuracy_are_refused(
    tmp_path: Path, rewards: list[Any], tasks: Any, message: str
) -> None:
    module = actor(family=WORDS, constraint=PriceConstraint())
    with pytest.raises(ValueError, match=message):
        fit(module, rollout_data(rewards=rewards, val_tasks=tasks), tmp_path, steps=1)


def held(
    folder: Path, accuracies: list[float], *, steps: int, resume: Path | None = None
) -> tuple[list[float], AcceptanceScorer]:
    """Prices of the RL steps of a run whose validations find these accuracies, and the policy."""
    settings = ScorerSettings(inputs=("price",))
    rule = PriceConstraint(margin=0.0, rate=1.0)
    module = actor(family=WORDS, constraint=rule, settings=settings)
    data = rollout_data(rewards=[DigitReward(), Graded(), ForwardPrice(0.02)], val_tasks=TASKS)
    prices: list[float] = []

    class Watch(ModelCheckpoint):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            one = pl_module.loop.current.rollouts[0]
            prices.append(round(-one.parts["forwards"] / one.record.num_steps, 6))

    found: Iterator[float] = iter(accuracies)

    def result(self: RolloutValidation, ranks: Any) -> dict[str, float]:
        self.last = {"reward": 0.0, "accuracy": next(found)}
        return self.last

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutValidation, "result", result)
        saver = Watch(folder, filename="last", enable_version_counter=False)
        options: Any = {"callbacks": [saver], "num_sanity_val_steps": -1}
        fit(module, data, folder, steps=steps, resume=resume, **options)
    return prices, module.scorer


def test_the_price_of_a_run_rises_falls_back_and_is_resumed(tmp_path: Path) -> None:
    """Accuracy 0.5 at the start, then 0.5, 0.4, 0.6 and 0.6: 0.02 doubles, halves, doubles."""
    prices, policy = held(tmp_path / "whole", [0.5, 0.5, 0.4, 0.6, 0.6], steps=4)
    assert prices == [0.02, 0.04, 0.02, 0.04]
    assert policy.commits.price == pytest.approx(0.08)  # told at the next step
    held(tmp_path / "part", [0.5, 0.5, 0.4], steps=2)
    # The check at the start of the second part finds another accuracy, which is none of a start.
    last = tmp_path / "part" / "last.ckpt"
    resumed, other = held(tmp_path / "part", [0.7, 0.6, 0.6], steps=4, resume=last)
    assert resumed == prices[2:]
    assert other.digest() == policy.digest()
