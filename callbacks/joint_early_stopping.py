"""Stops training when none of several scores improves any more."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lit_dlm.system.options import at_least

logger = logging.getLogger(__name__)


class JointEarlyStopping(Callback):
    """Stops after ``patience`` validations in which no watched score rose above its best.

    With several ``EarlyStopping`` callbacks, in contrast, each may end the run alone.

    Args:
        monitors: names of logged scores, all to be maximised.
        patience: validations without an improvement of any of them.
    """

    def __init__(self, monitors: Sequence[str], *, patience: int = 8) -> None:
        super().__init__()
        at_least(1, monitors=len(monitors), patience=patience)
        self.monitors = list(monitors)
        self.patience = patience
        self.best: dict[str, float] = {}
        self.waited = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop |= self.waited >= self.patience  # in a run that is started again

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        # Set back to 0 below if any score improves.
        self.waited += 1
        for name in self.monitors:
            if name not in trainer.callback_metrics:
                known = ", ".join(sorted(trainer.callback_metrics))
                raise ValueError(f"monitors: '{name}' was not logged; logged: {known}")
            score = float(trainer.callback_metrics[name])
            if score > self.best.get(name, -math.inf):
                self.best[name] = score
                self.waited = 0
        if self.waited >= self.patience:
            trainer.should_stop = True
            logger.info(
                "no score of %s improved in %d validations", ", ".join(self.monitors), self.patience
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.waited = dict(state_dict["best"]), int(state_dict["waited"])
