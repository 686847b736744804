"""A callback that notes what a run did."""

from collections import Counter
from typing import Any

from lightning.pytorch import Callback, Trainer

SEEN: Counter[str] = Counter()
"""How often each thing happened; cleared by who starts a run."""


class Witness(Callback):
    """Counts optimiser steps and batches, and keeps losses."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        assert gradients, "an optimiser step without gradients"
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        SEEN["steps"] += 1

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        SEEN["validation"] += 1

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        SEEN["predict"] += 1
