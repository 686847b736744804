"""Pre-training of a small masked diffusion model from scratch, as the embedded models were made."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import get_wsd_schedule

from lit_dlm.backbones.base import Rows
from lit_dlm.backbones.export import export_model
from lit_dlm.backbones.hf import DType, HFBackbone
from lit_dlm.finetuning.muon import MuonAdamW
from lit_dlm.predict.decode import DecodeModule
from lit_dlm.training.checkpoint import copy_tokenizer
from lit_dlm.training.terms import masked_nelbo

_DRILL_WEIGHT = 0.7  # factor on the drills' cross-entropy
_MATRIX_LR, _OTHER_LR = 0.01, 3e-3  # learning rates of Muon and AdamW

logger = logging.getLogger(__name__)


@dataclass
class DrillBatch:
    """Lines without a prompt, partly hidden."""

    ids: Tensor  # (B, L) int64, clean, left-padded
    pad_mask: Tensor  # (B, L) bool, True on real tokens
    hidden: Tensor  # (B, L) bool, cells shown as mask; never padding


@dataclass
class PretrainBatch:
    """Prompts with completions, whose cells are partly hidden."""

    ids: Tensor  # (B, L) int64, clean: left padding, prompt, response filled with end of text
    pad_mask: Tensor  # (B, L) bool, True on real tokens
    start: int  # First response column
    hidden: Tensor  # (B, L - start) bool, response cells shown as mask
    drill: DrillBatch | None = None  # Drills of this step, if it has any


class PretrainModule(DecodeModule):
    """Trains every weight of a backbone on the masked diffusion bound, plus drills.

    Muon trains the matrices, AdamW the embeddings, norms and biases; both learning rates warm up
    linearly, stay constant, and fall linearly to zero. At the end the backbone and the tokenizer
    are exported as a folder that ``HFBackbone`` loads.

    Args:
        backbone: a trainable backbone, usually with random weights of an architecture.
        warmup_steps: steps of the warm-up.
        decay_share: share of the run over which the learning rates fall.
        export_dir: where the trained model is written; ``None`` exports nothing.
        export_dtype: dtype of the exported weights.
        compile: whether to compile the forward: 1.4 times faster on a CPU, needs a C++ compiler.
    """

    backbone: HFBackbone

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        warmup_steps: int = 50,
        decay_share: float = 0.4,
        export_dir: str | None = None,
        export_dtype: DType = "float16",
        compile: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(backbone, **common)
        if not all(parameter.requires_grad for parameter in backbone.parameters()):
            raise ValueError("backbone.trainable: expected true, pre-training updates every weight")
        self.warmup_steps = warmup_steps
        self.decay_share = decay_share
        self.export_dir = None if export_dir is None else Path(export_dir)
        self.export_dtype = export_dtype
        if compile:
            backbone.model.model.compile(dynamic=True)

    def training_step(self, batch: PretrainBatch, batch_idx: int = 0) -> Tensor:
        targets = batch.ids[:, batch.start :]
        shown = targets.masked_fill(batch.hidden, self.backbone.spec.mask_id)
        rows = Rows(
            ids=torch.cat([batch.ids[:, : batch.start], shown], dim=1),
            targets=batch.ids,
            scored=F.pad(batch.hidden, (batch.start, 0)),
            mask=batch.pad_mask,
            response_start=batch.start,
        )
        stats = self.backbone.score_tokens(rows)
        terms = masked_nelbo(stats, batch.hidden)
        size = len(batch.ids)
        self.log("train/nelbo", terms.total.detach(), prog_bar=True, batch_size=size)
        self.log_dict({f"train/{k}": v for k, v in terms.parts.items()}, batch_size=size)
        if batch.drill is None:
            return terms.total
        return terms.total + _DRILL_WEIGHT * self._drill_loss(batch.drill)

    def _drill_loss(self, drill: DrillBatch) -> Tensor:
        shown = drill.ids.masked_fill(drill.hidden, self.backbone.spec.mask_id)
        stats = self.backbone.score_tokens(
            Rows(shown, drill.ids, drill.hidden, mask=drill.pad_mask)
        )
        count = max(len(stats.ce), 1)
        accuracy = stats.is_top.float().sum() / count
        self.log("train/drill_accuracy", accuracy, batch_size=len(drill.ids))
        return stats.ce.sum() / count

    def configure_optimizers(self) -> OptimizerLRScheduler:
        num_steps = self.trainer.max_steps
        if num_steps < 1:
            raise ValueError(f"trainer.max_steps: expected at least 1, got {num_steps}")
        matrices, others = _split_parameters(self.backbone)
        optimizer = MuonAdamW(matrices, others, matrix_lr=_MATRIX_LR, other_lr=_OTHER_LR)
        num_decayed = round(self.decay_share * num_steps)
        schedule = get_wsd_schedule(
            optimizer, self.warmup_steps, num_decayed, num_steps, decay_type="linear"
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_fit_end(self) -> None:
        if self.export_dir is None or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        # Sharded weights are gathered one by one, so every process must take part.
        export_model(self.backbone, self.export_dir, dtype=self.export_dtype)
        if self.trainer.is_global_zero:
            copy_tokenizer(self.tokenizer_path, self.export_dir)
            logger.info("wrote the model to %s", self.export_dir)


def _split_parameters(backbone: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Separates matrices between hidden spaces from embeddings, norms and biases."""
    tables = {module.weight for module in backbone.modules() if isinstance(module, nn.Embedding)}
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in backbone.parameters():
        parts[parameter.ndim != 2 or parameter in tables].append(parameter)
    return parts
