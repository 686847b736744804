"""Supervised fine-tuning: a training method from batch to loss, in four steps.

Read :meth:`SFTModule.training_step` first; all other fine-tuning keeps its steps and replaces some.
TABOM (``tabom.py``) has states and a second loss of its own, dParallel (``dparallel.py``) states,
scores and losses, D2F (``d2f.py``) states and a teacher, editing (``editing.py``) states, the
hybrid (``hybrid.py``) more scores and a second loss, DPO (``dpo.py``) a loss of pairs. A masked
diffusion model learns to predict hidden tokens from those around them, so what is new beside an
autoregressive model is step 1: which tokens are hidden.

``B`` responses of ``G`` positions have ``K`` states, in which ``N`` positions are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.finetuning.trainable import TrainableModule
from lit_dlm.system.options import refuse, within
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.layout import lay_out
from lit_dlm.training.states import Masking, States
from lit_dlm.training.terms import LossTerms


class SFTModule(TrainableModule):
    """Cross-entropy of hidden response tokens.

    The learning rate warms up linearly and then falls along half a cosine until the last optimiser
    step. A logged value is a mean per target, pair or state, or a count, over all processes and
    batches of one optimiser step (``train/``) or validation (``val/``), as if they were one batch.
    To adapt an autoregressive checkpoint, give the backbone ``from_ar``.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        loss_norm: ``local`` divides by the targets of each process's own batch; ``global`` by
            those of all processes together, as if they had one batch.
        lr_floor: factor on the learning rate at the end; 1 keeps it constant after the warm-up.
        optimizer: constructor of the optimiser, given the trainable parameters.
    """

    trains_on_pairs: ClassVar[bool] = False  # a chosen and a rejected response, in adjacent rows

    masking: Masking  # draws the states of a response; see TrainableModule
    # (2,) float64 sum and units of each part, since the last optimiser step and in validation.
    _train_sums: dict[str, Tensor]
    _val_sums: dict[str, Tensor]

    def training_step(self, batch: SupervisedBatch, batch_idx: int = 0) -> Tensor:
        # 1. States: what is hidden of each response, and which hidden tokens are to be predicted.
        # The noise is a hash of the sample and the pass over the data, so a sample has the same
        # states in any batch, on any number of processes, and in a run that was resumed.
        states = self.states(batch)
        # 2. Forward: each predicted token gets its cross-entropy and entropy, (N,).
        stats = self.score(batch, states)
        # 3. Loss: one number, and the sums that it is made of.
        terms = self.loss_terms(batch, states, stats)
        # Checked here, as backward would spread one bad number to all weights.
        self.require_finite_loss(
            terms.total, batch.uids, lambda: _non_finite_samples(batch, states, stats)
        )
        # 4. Log: sums now, means at the optimiser step (``on_before_optimizer_step``).
        _add_sums(self._train_sums, terms)
        return terms.total

    def states(self, batch: SupervisedBatch) -> States:
        """Step 1: returns what is hidden and what is to be predicted."""
        return self.masking.states(batch)

    def score(self, batch: SupervisedBatch, states: States) -> TokenStats:
        """Step 2: returns the scores of all targets, state by state, from one forward.

        Ids that the model may not produce (the mask) have probability 0 in it: no answer contains
        them, and decoding never proposes them.
        """
        # How a state becomes a row depends on the model's attention. One with blocks learns all of
        # them in one row, of a clean and a noisy copy of the response.
        rows = lay_out(batch, states, self.backbone.spec)
        # Only what is predicted passes the head, in chunks: all logits of a batch would take many
        # gigabytes. Run even where nothing is: every process takes part in every backward.
        return self.backbone.score_tokens(rows)

    def loss_terms(self, batch: SupervisedBatch, states: States, stats: TokenStats) -> LossTerms:
        """Step 3: returns the loss of scored states; here it is the cross-entropy."""
        ce = stats.ce  # (N,)
        if states.weight is not None:
            ce = ce * states.weight[states.supervised].to(ce.dtype)
        # Units are targets, or states for a mean of means. They depend on the noise alone.
        summed, units = ce.sum(), states.num_units()
        count = states.supervised.sum()
        sums = {
            "loss_ce": (summed.detach(), units),
            "num_supervised": (count, torch.zeros_like(count)),  # a count is divided by no units
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
            # A positive mean over processes may be below 1, which a local count may not.
            total = self.trainer.strategy.reduce(count, reduce_op="sum")
            return (total / world_size).clamp_min(1.0 / world_size)
        return count.clamp_min(1.0)

    # -- step 4, and validation, which is steps 1 to 3 without gradients --------------------------

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        sums, self._train_sums = self._train_sums, {}
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        # Sums over processes cost a reduction, so they are made only for steps that loggers write.
        # All processes choose the same steps, since each of them must take part.
        is_written = every > 0 and (self.trainer.global_step + 1) % every == 0
        if sums and (is_written or self.trainer.world_size == 1):
            self._log_means("train", sums)
        super().on_before_optimizer_step(optimizer)

    def terms(self, batch: SupervisedBatch) -> LossTerms:
        """Returns the loss of a batch: steps 1 to 3, as validation needs them."""
        states = self.states(batch)
        return self.loss_terms(batch, states, self.score(batch, states))

    def on_validation_epoch_start(self) -> None:
        self._val_sums = {}

    def validation_step(self, batch: SupervisedBatch, batch_idx: int = 0) -> None:
        _add_sums(self._val_sums, self.terms(batch))

    def on_validation_epoch_end(self) -> None:
        # Equal on all processes; Lightning warns about values of epochs that are not reduced.
        self._log_means("val", self._val_sums, sync_dist=True)

    def _log_means(self, stage: str, sums: Mapping[str, Tensor], **options: Any) -> None:
        for name, value in self._means(sums).items():
            self.log(f"{stage}/{name}", value, prog_bar=name in ("loss", "accuracy"), **options)

    def _means(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the loss and its parts over the batches of all processes; each must call it."""
        stacked = torch.stack(list(sums.values()))  # (parts, 2)
        if self.trainer.world_size > 1:
            stacked = self.trainer.strategy.reduce(stacked, reduce_op="sum")
        means = (stacked[:, 0] / stacked[:, 1].clamp_min(1)).float()  # counts have no units
        parts = dict(zip(sums, means, strict=True))
        return {"loss": self.combined(parts), **parts}

    # -- before training --------------------------------------------------------------------------

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        loss_norm: Literal["local", "global"] = "local",
        lr_floor: float = 0.0,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=1e-5, weight_decay=0.01
        ),
        **common: Any,
    ) -> None:
        super().__init__(backbone, optimizer=optimizer, **common)
        within("[0, 1]", lr_floor=lr_floor)
        self.loss_norm = loss_norm
        self.lr_floor = lr_floor
        self._train_sums, self._val_sums = {}, {}

    def needs(self) -> dict[str, str]:
        """Returns fields that no example may lack, each with what to say of one that does."""
        return self.masking.needs()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        num_steps = self.trainer.estimated_stepping_batches
        if num_steps == float("inf"):
            needed = "a length of the run (or max_epochs), which the learning rate's schedule needs"
            refuse("trainer.max_steps", needed, "none")
        if self.warmup_steps >= num_steps:
            told = f"warmup_steps: {self.warmup_steps} of {num_steps} updates"
            rank_zero_info(f"{told}, so the learning rate stays below its setting")
        schedule = partial(
            get_cosine_with_min_lr_schedule_with_warmup,
            num_warmup_steps=self.warmup_steps,
            num_training_steps=int(num_steps),
            min_lr_rate=self.lr_floor,
        )
        return self.scheduled([one for one in self.parameters() if one.requires_grad], schedule)


def _add_sums(sums: dict[str, Tensor], terms: LossTerms) -> None:
    for name, found in terms.sums.items():
        # In float64, and on the device: adding up must neither round nor make the host wait.
        sums[name] = sums.get(name, 0.0) + torch.stack([one.double() for one in found])


def _non_finite_samples(batch: SupervisedBatch, states: States, stats: TokenStats) -> list[str]:
    """Returns uids of samples with scores that are not finite; all uids if no score is to blame."""
    bad = ~(torch.isfinite(stats.ce.detach()) & torch.isfinite(stats.entropy.detach()))
    state, _ = states.supervised.nonzero(as_tuple=True)  # in the order of the scores
    rows = states.response[state[bad[: len(state)]]].unique().tolist()
    return [batch.uids[row] for row in rows] or batch.uids
