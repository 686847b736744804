"""What fine-tuning and reinforcement learning share: checks of numbers, optimisers, exports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.config.components import checked_component
from lit_dlm.predict.decode import DecodeModule
from lit_dlm.system.options import at_least
from lit_dlm.training.checkpoint import export_trained
from lit_dlm.training.masking import RandomMasking
from lit_dlm.training.states import Masking
from lit_dlm.training.steps import require_finite, require_finite_gradients
from lit_dlm.trajectories.capture import TrajectoryCapture

logger = logging.getLogger(__name__)


class TrainableModule(DecodeModule):
    """Base of the modules that train a backbone, or its adapter.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        masking: which states are trained on, random masking by default; noise is drawn anew in
            every pass over the data.
        num_padding: positions of fill after an answer that are supervised, counted from its end;
            ``null`` for all (``post_num`` in dLLM-RL). They teach a model to end.
        optimizer: constructor of the optimiser, given the trainable parameters.
        warmup_steps: optimiser steps of the warm-up.
        export_dir: where the last weights are written as an adapter or model folder; ``null``
            leaves that to callbacks.
    """

    backbone: HFBackbone

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        optimizer: OptimizerCallable,
        masking: Masking | None = None,
        num_padding: int | None = 0,
        warmup_steps: int = 50,
        export_dir: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(backbone, **common)
        at_least(0, num_padding=num_padding, warmup_steps=warmup_steps)
        self.masking = checked_component(masking or RandomMasking(), Masking, option="masking")
        self.num_padding = num_padding
        self.optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.export_dir = None if export_dir is None else Path(export_dir)
        self._step_uids: list[str] = []  # since the last optimiser step

    def rollout_capture(self, method: str) -> TrajectoryCapture:
        return TrajectoryCapture(vocab_size=self.backbone.vocab_size)

    def require_finite_loss(
        self, loss: Tensor, uids: Sequence[str], blamed: Callable[[], list[str]] | None = None
    ) -> None:
        """Stops all processes when the loss of one is not finite, before any weight has changed.

        On failure ``blamed`` returns the samples to name; by default it is all of the batch.
        """
        is_finite = torch.isfinite(loss.detach())
        require_finite(
            is_finite,
            self._trainer,
            what="the loss",
            blamed=lambda: [] if bool(is_finite) else blamed() if blamed else list(uids),
        )
        self._step_uids += uids

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        uids, self._step_uids = self._step_uids, []
        require_finite_gradients(self, uids)

    def scheduled(
        self, groups: Sequence[Any], schedule: Callable[[Optimizer], LRScheduler]
    ) -> OptimizerLRScheduler:
        """Returns the optimiser of parameters or groups, with a schedule of its rate by step."""
        if not groups:
            raise ValueError(
                "backbone: nothing is trainable; give it lora settings, an adapter with "
                "trainable: true, or trainable: true"
            )
        optimizer = self.optimizer(groups)
        # torch itself defaults to a slower loop; a configuration may set ``fused: false``.
        if isinstance(optimizer, torch.optim.Adam) and self.device.type == "cuda":
            for group in optimizer.param_groups:
                if group["fused"] is None and not group["foreach"]:
                    group["fused"] = True
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"},
        }

    def on_fit_end(self) -> None:
        if self.export_dir is not None and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.export(self.export_dir)
            kind = "model" if self.backbone.adapter is None else "adapter"
            if self.trainer.is_global_zero:
                logger.info("wrote the %s to %s", kind, self.export_dir)

    def export(self, folder: str | Path) -> None:
        """Writes the adapter, or the whole model without one; every process must call it."""
        is_first = self._trainer is None or self.trainer.is_global_zero
        export_trained(self.backbone, self.tokenizer_path, Path(folder), write=is_first)
