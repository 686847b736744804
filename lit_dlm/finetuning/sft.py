"""Base classes of fine-tuning and reinforcement learning, and SFT."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.config.components import checked_component
from lit_dlm.predict.decode import DecodeModule
from lit_dlm.system.options import at_least, within
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.tensors.schedules import warmup_cosine
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.checkpoint import export_trained
from lit_dlm.training.layout import TrainingRows, lay_out
from lit_dlm.training.masking import RandomMasking
from lit_dlm.training.states import Masking, States
from lit_dlm.training.steps import require_finite, require_finite_gradients
from lit_dlm.training.terms import LossTerms
from lit_dlm.trajectories.capture import TrajectoryCapture

logger = logging.getLogger(__name__)


class TrainableModule(DecodeModule):
    """Base of fine-tuning and reinforcement learning: checks of numbers, optimisers, exports.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        masking: which states are trained on, random masking by default; noise is drawn anew in
            every pass over the data.
        num_padding: cells of fill after an answer that are supervised, counted from its end;
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
        masking: Masking | None = None,
        num_padding: int | None = 0,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=2e-5, weight_decay=0.01
        ),
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

    # -- numbers ---------------------------------------------------------------------------------

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
        self, groups: Sequence[Any], factor: Callable[[int], float]
    ) -> OptimizerLRScheduler:
        """Returns the optimiser of parameters or groups, with a factor on its rate by step."""
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
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }

    # -- files -----------------------------------------------------------------------------------

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


class FinetuneModule(TrainableModule):
    """Trains a backbone, or its adapter, on states of finished responses.

    The learning rate warms up linearly and then falls along half a cosine until the last optimiser
    step. A logged value is a mean per target, pair or state, or a count, over all processes and
    batches of one optimiser step (``train/``) or validation (``val/``), as if they were one batch.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        loss_norm: ``local`` divides by the targets of each process's own batch; ``global`` by
            those of all processes together, as if they had one batch.
        lr_floor: factor on the learning rate at the end; 1 keeps it constant after the warm-up.
    """

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        loss_norm: Literal["local", "global"] = "local",
        lr_floor: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(backbone, **common)
        within("[0, 1]", lr_floor=lr_floor)
        self.loss_norm = loss_norm
        self.lr_floor = lr_floor
        # (2,) float64 sum and units of each part, since the last optimiser step or in validation
        self._train_sums: dict[str, Tensor] = {}
        self._val_sums: dict[str, Tensor] = {}

    # -- the loss --------------------------------------------------------------------------------

    def loss_terms(self, batch: SupervisedBatch, states: States, stats: TokenStats) -> LossTerms:
        """Returns the loss of scored states; here it is the cross-entropy.

        Ids that the model may not produce (the mask) have probability 0 in it: no answer contains
        them, and decoding never proposes them. ``stats`` scores the targets, state by state.
        """
        ce = stats.ce
        if states.weight is not None:
            ce = ce * states.weight[states.supervised].to(ce.dtype)
        summed, units = ce.sum(), states.num_units()
        count = states.supervised.sum()
        sums = {
            "loss_ce": (summed.detach(), units),
            "num_supervised": (count, torch.zeros_like(count)),
            "accuracy": (stats.is_top.sum(), count),
        }
        return LossTerms(summed / self.divisor(units), sums=sums)

    def combined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the total of a loss's parts, which may be means over a whole validation."""
        return parts["loss_ce"]

    def divisor(self, count: Tensor) -> Tensor:
        """Returns what a sum over this process's batch is divided by: its ``count``, a scalar.

        With ``loss_norm: global`` it is the mean count of all processes, since their gradients are
        averaged. It is never 0: a batch without targets has a loss of 0 with gradients of 0.
        """
        count = count.detach().float()
        world_size = self.trainer.world_size if self._trainer is not None else 1
        if self.loss_norm == "global" and world_size > 1:
            count = self.trainer.strategy.reduce(count, reduce_op="sum") / world_size
        # A positive global mean may be below 1, a positive local count may not.
        return count.clamp_min(1.0 / world_size if self.loss_norm == "global" else 1.0)

    def terms(self, batch: SupervisedBatch) -> LossTerms:
        return self.loss_terms(batch, *self._scored(batch))

    def _scored(self, batch: SupervisedBatch) -> tuple[States, TokenStats]:
        states = self.masking.states(batch)
        rows = lay_out(batch, states, self.backbone.spec)
        # Even where nothing is supervised: every process takes part in every backward.
        return states, self.score_rows(rows)

    def score_rows(self, rows: TrainingRows) -> TokenStats:
        """Returns scores of the targets of one forward, row by row."""
        return self.backbone.score_tokens(rows.ids, rows.targets, rows.rows, **rows.context())

    def training_step(self, batch: SupervisedBatch, batch_idx: int = 0) -> Tensor:
        states, stats = self._scored(batch)
        terms = self.loss_terms(batch, states, stats)
        self.require_finite_loss(
            terms.total, batch.uids, lambda: _non_finite_samples(batch, states, stats)
        )
        _add_sums(self._train_sums, terms)
        return terms.total

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        sums, self._train_sums = self._train_sums, {}
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        # Sums over processes cost a reduction, so they are made only for steps that loggers write.
        # All processes choose the same steps, since each of them must take part.
        is_written = every > 0 and (self.trainer.global_step + 1) % every == 0
        if sums and (is_written or self.trainer.world_size == 1):
            means = self._means(sums)
            self.log_dict({f"train/{name}": value for name, value in means.items()})
        super().on_before_optimizer_step(optimizer)

    def on_validation_epoch_start(self) -> None:
        self._val_sums = {}

    def validation_step(self, batch: SupervisedBatch, batch_idx: int = 0) -> None:
        _add_sums(self._val_sums, self.terms(batch))

    def on_validation_epoch_end(self) -> None:
        values = self._means(self._val_sums)
        # Equal on all processes; Lightning warns about values of epochs that are not reduced.
        self.log_dict({f"val/{name}": value for name, value in values.items()}, sync_dist=True)

    def _means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the loss and its parts over the batches of all processes; each must call it."""
        stacked = torch.stack(list(sums.values()))  # (parts, 2)
        if self.trainer.world_size > 1:
            stacked = self.trainer.strategy.reduce(stacked, reduce_op="sum")
        means = (stacked[:, 0] / stacked[:, 1].clamp_min(1)).float()  # counts have no units
        parts = dict(zip(sums, means, strict=True))
        return {"loss": self.combined(parts), **parts}

    # -- optimisation ----------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        num_steps = self.trainer.estimated_stepping_batches
        if num_steps == float("inf"):
            raise ValueError(
                "trainer.max_steps: expected a length of the run (or max_epochs), which the "
                "learning rate's schedule needs, got none"
            )
        return self.scheduled(
            [value for value in self.parameters() if value.requires_grad],
            lambda step: warmup_cosine(
                step, int(num_steps), warmup_steps=self.warmup_steps, floor=self.lr_floor
            ),
        )


def _add_sums(sums: dict[str, Tensor], terms: LossTerms) -> None:
    for name, found in terms.sums.items():
        sums[name] = sums.get(name, 0.0) + torch.stack([one.double() for one in found])


def _non_finite_samples(batch: SupervisedBatch, states: States, stats: TokenStats) -> list[str]:
    """Returns uids of samples with scores that are not finite; all uids if no score is to blame."""
    bad = ~(torch.isfinite(stats.ce.detach()) & torch.isfinite(stats.entropy.detach()))
    row, _ = states.supervised.nonzero(as_tuple=True)  # in the order of the scores
    samples = states.response[row[bad]].unique().tolist()
    return [batch.uids[sample] for sample in samples] or batch.uids


class SFTModule(FinetuneModule):
    """Cross-entropy of hidden response tokens.

    To adapt an autoregressive checkpoint, give the backbone ``from_ar``.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        optimizer: constructor of the optimiser, given the trainable parameters.
    """

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=1e-5, weight_decay=0.01
        ),
        **common: Any,
    ) -> None:
        super().__init__(backbone, optimizer=optimizer, **common)
