"""Trains the projector as an autoencoder on hidden states of recorded decodes (arXiv 2605.24697).

The release uses such a projector but does not contain its training code; this is our version. The
result can be used wherever principal components can.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.backbones.projection import Autoencoder, Projector, ProjectorConfig
from lit_dlm.predict.decode import CheckedModule
from lit_dlm.tracelock.states import StateBatch, state_snapshots
from lit_dlm.training.checkpoint import CheckpointFiles, best_checkpoints, drop_backbone
from lit_dlm.training.steps import place_in_update

logger = logging.getLogger(__name__)

_MONITOR = "val/loss"
_POSITIONS_PER_STATE = 16  # random positions per state that enter the loss, on average over a batch


class AutoencoderModule(CheckedModule):
    """Trains encoders and decoders of hidden snapshots; exports the best encoders.

    Args:
        hidden_rank: features kept of each snapshot.
        delta_rank: features kept of each difference of neighbouring snapshots.
        dropout: dropout of the codes in training.
        seed: seed of the positions and of dropout.
        export_dir: where the projector folder is written at the end; ``projector`` inside the
            trainer's root directory by default.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_rank: int = 256,
        delta_rank: int = 32,
        dropout: float = 0.1,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-3),
        seed: int = 0,
        export_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        if isinstance(backbone, torch.nn.Module):
            backbone.requires_grad_(False).eval()  # a trainer does not change the mode
        config = ProjectorConfig(
            hidden_size=backbone.hidden_size,
            hidden_rank=hidden_rank,
            delta_rank=delta_rank,
            kind="autoencoder",
        )
        self.autoencoder = Autoencoder(config, dropout=dropout)
        self.optimizer = optimizer
        self.seed = seed
        self.export_dir = None if export_dir is None else Path(export_dir)

    def training_step(self, batch: StateBatch, batch_idx: int) -> Tensor:
        place = place_in_update(self.trainer, batch_idx)
        return self._loss(batch, "train", self.global_step, place)

    def validation_step(self, batch: StateBatch, batch_idx: int) -> None:
        self._loss(batch, "val", batch_idx, self.global_rank)  # at positions that never change

    def _loss(self, batch: StateBatch, stage: str, number: int, place: int) -> Tensor:
        # A few positions of many states: neighbours in one state have much in common.
        rows = state_snapshots(self.backbone, batch)
        count = min(len(rows), _POSITIONS_PER_STATE * len(batch.ids))
        seed = (self.seed * 1_000_003 + number) * 1_000_003 + place
        generator = torch.Generator().manual_seed(seed % 2**63)
        chosen = torch.randperm(len(rows), generator=generator)[:count].to(rows.device)
        errors = self.autoencoder(rows[chosen])
        loss: Tensor = errors["hidden"] + errors["delta"]
        scores = {"loss": loss.detach(), **{f"{k}_mse": v.detach() for k, v in errors.items()}}
        is_val = stage == "val"
        logged = {f"{stage}/{name}": value for name, value in scores.items()}
        self.log_dict(logged, batch_size=max(count, 1), sync_dist=is_val, prog_bar=is_val)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return self.optimizer(self.autoencoder.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        drop_backbone(checkpoint)

    def on_fit_end(self) -> None:
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.export(self.export_dir or Path(self.trainer.default_root_dir) / "projector")

    def export(self, folder: str | Path) -> Projector:
        """Writes the projector with the best validation error, or the last without a checkpoint."""
        autoencoder = self.autoencoder
        if best := best_checkpoints(self).get(_MONITOR):
            stored = CheckpointFiles().load_checkpoint(best.best_model_path)["state_dict"]
            autoencoder = Autoencoder(autoencoder.config)
            autoencoder.load_state_dict(
                {key.removeprefix("autoencoder."): value for key, value in stored.items()}
            )
        projector = autoencoder.projector()
        projector.save(folder)
        logger.info("wrote projector %s to %s", projector.digest()[:12], folder)
        return projector
