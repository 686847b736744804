"""Training of the TraceLock acceptance policy on states of recorded decodes (arXiv 2605.24697).

The backbone stays frozen. Features come either from the feature members of the shards, or are
recomputed from the stored tokens with the backbone; both go through the same feature function.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding import Decoder
from lit_dlm.decoding.policies.tracelock import backbone_facts
from lit_dlm.heads.acceptance import AcceptanceConfig, PositionState
from lit_dlm.heads.projection import Projector
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings
from lit_dlm.losses.acceptance import (
    AcceptanceLossSettings,
    acceptance_loss,
    acceptance_weights,
    prefix_crop,
)
from lit_dlm.metrics.acceptance import RolloutProxy
from lit_dlm.modules.decode import DecodeModule
from lit_dlm.modules.state_batch import StateBatch
from lit_dlm.ops.scores import confidence, entropy, margin

logger = logging.getLogger(__name__)

MONITOR = "val/rollout_proxy_f0_5"
"""The score that picks the exported weights (to be maximised)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedStates:
    """What the network is shown of a batch and what it should answer. ``R`` rows per state."""

    features: Tensor
    """``(B, R, F)`` float32."""
    state: Tensor
    """``(B, R)`` int64 :class:`~lit_dlm.heads.acceptance.PositionState`."""
    label: Tensor
    """``(B, R)`` bool: the proposal is the token that the trace ended with."""
    in_response: Tensor
    """``(B, R)`` bool: response positions, padding excluded."""
    decidable: Tensor
    """``(B, R)`` bool: masked positions whose final token is known; only they have a label."""
    is_tail: Tensor
    """``(B, R)`` bool: decidable positions that end as padding behind the answer."""
    present: Tensor
    """``(B, R)`` bool: everything but padding."""


class TraceLockModule(DecodeModule):
    """Trains the acceptance network and exports it as a folder that decoding loads."""

    tail_ids: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        tokenizer: str,
        projector: str | Projector,
        decoders: dict[str, Decoder] | None = None,
        head: AcceptanceConfig | None = None,
        settings: ScorerSettings | None = None,
        loss: AcceptanceLossSettings | None = None,
        tail_ids: Sequence[int] | None = None,
        min_crop_ratio: float = 0.25,
        proxy_threshold: float = 0.99,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=1e-4, weight_decay=0.01
        ),
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int = 0,
        export_dir: str | None = None,
    ) -> None:
        """Sets up training.

        Args:
            backbone: the frozen denoiser; it runs only where features are recomputed.
            tokenizer: folder, embedded name or hub id of the tokenizer (for ``predict``).
            projector: folder of the projector that made (or will make) the features.
            decoders: decoding methods by name (for ``predict``).
            head: architecture of the network.
            settings: what the network is shown; must match stored features.
            loss: weights of the loss.
            tail_ids: tokens that fill the canvas behind an answer; by default the backbone's
                padding and first end-of-text ids.
            min_crop_ratio: training shows a prefix of each response, whose share of the length is
                uniform from here to 1.
            proxy_threshold: acceptance probability of the checkpoint metric.
            optimizer: constructor of the optimiser.
            lr_scheduler: constructor of a schedule, stepped every optimiser step. A plateau
                schedule watches ``val/loss`` and is stepped at every validation.
            seed: seed of crops and dropout, and of decoded samples.
            export_dir: where the policy folder is written at the end; ``policy`` inside the
                trainer's root directory by default.
        """
        super().__init__(backbone, tokenizer=tokenizer, decoders=decoders, seed=seed)
        if not 0.0 < min_crop_ratio <= 1.0:
            raise ValueError(f"min_crop_ratio: expected a number in (0, 1], got {min_crop_ratio}")
        if tail_ids is None:
            tail_ids = (backbone.spec.pad_id, backbone.spec.eos_ids[0])
        if not isinstance(projector, Projector):
            projector = Projector.load(projector)
        self.scorer = AcceptanceScorer(
            projector,
            head=head,
            settings=settings,
            backbone=backbone_facts(backbone),
        )
        self.loss_settings = loss or AcceptanceLossSettings()
        self.register_buffer(
            "tail_ids", torch.tensor(sorted(set(tail_ids)), dtype=torch.long), persistent=False
        )
        self.min_crop_ratio = min_crop_ratio
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.export_dir = None if export_dir is None else Path(export_dir)
        self.auroc = BinaryAUROC()
        self.average_precision = BinaryAveragePrecision()
        self.proxy = RolloutProxy(threshold=proxy_threshold)

    # -- what the network sees -------------------------------------------------------------------

    def observe(self, batch: StateBatch) -> ObservedStates:
        """Features, states and labels of a batch; no gradient.

        Stored features are used where the batch has them, otherwise the backbone runs.
        """
        features, proposals = batch.features, batch.proposals
        if features is None or proposals is None:
            features, proposals = self._recompute(batch)
        first = batch.ids.shape[1] - features.shape[1]
        masked, present = batch.masked[:, first:], batch.pad_mask[:, first:]
        target = batch.target[:, first:]
        columns = torch.arange(first, batch.ids.shape[1], device=target.device)
        in_response = (columns >= batch.start).expand_as(present) & present
        state = torch.where(in_response, int(PositionState.LOCKED), int(PositionState.PROMPT))
        decidable = masked & (target != batch.mask_id) & batch.is_real[:, None]
        return ObservedStates(
            features=features,
            state=torch.where(masked, int(PositionState.GEN), state),
            label=(proposals == target) & decidable,
            in_response=in_response,
            decidable=decidable,
            is_tail=decidable & torch.isin(target, self.tail_ids),
            present=present,
        )

    @torch.no_grad()
    def _recompute(self, batch: StateBatch) -> tuple[Tensor, Tensor]:
        settings = self.scorer.settings
        L = batch.ids.shape[1]
        first = batch.start if settings.layout == "generation" else 0
        columns = torch.arange(batch.start, L, device=batch.ids.device)
        denoised = self.backbone.denoise(
            batch.ids,
            pad_mask=batch.pad_mask,
            columns=columns.expand(len(batch.ids), -1),
            hidden_layers=settings.hidden_layers,
        )
        assert denoised.hidden is not None
        logits = denoised.logits.float()
        proposals = logits.argmax(-1)

        def rows(values: Tensor) -> Tensor:
            """Prompt rows have no proposal: zeros, as in the decode loop."""
            return torch.nn.functional.pad(values, (batch.start - first, 0))

        features = self.scorer.features(
            denoised.hidden[:, first:],
            rows(confidence(logits, proposals)),
            entropy=rows(entropy(logits)) if settings.features.entropy else None,
            margin=rows(margin(logits)) if settings.features.margin else None,
        )
        return features, rows(proposals)

    # -- training --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Keeps the frozen backbone in evaluation mode."""
        if isinstance(self.backbone, torch.nn.Module):
            self.backbone.eval()

    def on_train_batch_start(self, batch: StateBatch, batch_idx: int) -> None:
        """Seeds crops and dropout from the step alone, so that a resumed run repeats them."""
        accumulated = batch_idx % self.trainer.accumulate_grad_batches
        torch.manual_seed(
            _mixed_seed(self.seed, self.global_step, accumulated, self.trainer.global_rank)
        )

    def training_step(self, batch: StateBatch, batch_idx: int) -> Tensor:
        """One weighted cross-entropy step on cropped states."""
        seen = self.observe(batch)
        share = torch.rand(len(batch.ids), device=batch.ids.device)
        ratio = self.min_crop_ratio + (1.0 - self.min_crop_ratio) * share
        crop = prefix_crop(ratio, seen.in_response, seen.decidable, seen.label)
        visible = crop & seen.present
        output = self.scorer(seen.features, seen.state, visible)
        weight = acceptance_weights(
            seen.label,
            seen.decidable,
            seen.is_tail,
            visible,
            kept=output.kept,
            settings=self.loss_settings,
        )
        terms = acceptance_loss(
            output.logits, output.tau, seen.label, weight, settings=self.loss_settings
        )
        self.log("train/loss", terms.total.detach(), prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in terms.parts.items()})
        self.log("train/tau", output.tau.detach().mean())
        return terms.total

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimiser over the network's parameters and the optional schedule."""
        optimizer = self.optimizer(self.scorer.head.parameters())
        if self.lr_scheduler is None:
            return optimizer
        scheduler = self.lr_scheduler(optimizer)
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "step", "frequency": 1}
        if isinstance(scheduler, ReduceLROnPlateau):
            every = self.trainer.val_check_interval
            config["monitor"] = "val/loss"
            config["frequency"] = every if isinstance(every, int) else 1
            config["interval"] = "step" if isinstance(every, int) else "epoch"
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    # -- validation ------------------------------------------------------------------------------

    def validation_step(self, batch: StateBatch, batch_idx: int) -> None:
        """Unweighted loss and ranking scores uncropped; the rollout proxy on a fresh crop."""
        seen = self.observe(batch)
        chosen = seen.decidable & ~seen.is_tail
        decision = self.scorer(seen.features, seen.state, seen.present).decision_logits
        logits, label = decision[chosen], seen.label[chosen]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, label.float(), reduction="sum"
        )
        count = max(label.numel(), 1)
        self.log("val/loss", loss / count, batch_size=count, sync_dist=True, on_epoch=True)
        self.auroc.update(logits.sigmoid(), label.long())
        self.average_precision.update(logits.sigmoid(), label.long())
        generator = torch.Generator().manual_seed(
            self.seed + 100_000 * self.global_step + batch_idx
        )
        share = torch.rand(len(batch.ids), generator=generator).to(batch.ids.device)
        ratio = self.min_crop_ratio + (1.0 - self.min_crop_ratio) * share
        crop = prefix_crop(ratio, seen.in_response, seen.decidable, seen.label)
        visible = crop & seen.present
        cropped = self.scorer(seen.features, seen.state, visible).decision_logits
        chosen = chosen & visible
        self.proxy.update(cropped[chosen], seen.label[chosen])

    def on_validation_epoch_end(self) -> None:
        """Logs the scores of the whole validation set."""
        proxy = self.proxy.compute()
        scores = {
            MONITOR: proxy["f_beta"],
            **{
                f"val/rollout_proxy_{name}": proxy[name]
                for name in ("precision", "recall", "accept_rate")
            },
            "val/auroc": self.auroc.compute(),
            "val/average_precision": self.average_precision.compute(),
        }
        # Already equal on all ranks; Lightning warns about epoch values that are not reduced.
        self.log_dict(scores, sync_dist=True)
        for metric in (self.proxy, self.auroc, self.average_precision):
            metric.reset()

    # -- files -----------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Drops the frozen backbone from the file."""
        state = checkpoint["state_dict"]
        for key in [key for key in state if key.startswith("backbone.")]:
            del state[key]

    def on_fit_end(self) -> None:
        """Exports the best weights (the last ones where no checkpoint watches the monitor)."""
        if self.trainer.is_global_zero:
            self.export(self.export_dir or Path(self.trainer.default_root_dir) / "policy")

    def export(self, folder: str | Path) -> None:
        """Writes the policy folder.

        Args:
            folder: target folder; created.
        """
        scorer = self.scorer
        facts: dict[str, Any] = {"seed": self.seed, "global_step": int(self.global_step)}
        best = _best_checkpoint(self.trainer.checkpoint_callbacks) if self._trainer else None
        if best is not None:
            stored = torch.load(best.best_model_path, map_location="cpu", weights_only=True)
            prefix = "scorer."
            weights = {
                key.removeprefix(prefix): value
                for key, value in stored["state_dict"].items()
                if key.startswith(prefix)
            }
            scorer = AcceptanceScorer(
                Projector(scorer.projector.config),
                head=scorer.head.config,
                settings=scorer.settings,
                backbone=scorer.backbone,
            )
            scorer.load_state_dict(weights)
            facts["global_step"] = int(stored["global_step"])
            if best.best_model_score is not None:
                facts[MONITOR] = float(best.best_model_score)
        scorer.training_facts = facts
        scorer.save(folder)
        logger.info("wrote the acceptance policy to %s", folder)


def _best_checkpoint(callbacks: Sequence[Any]) -> ModelCheckpoint | None:
    """The checkpoint callback that watched the monitor and saved something, if there is one."""
    for callback in callbacks:
        if (
            isinstance(callback, ModelCheckpoint)
            and callback.monitor == MONITOR
            and callback.best_model_path
        ):
            return callback
    return None


def _mixed_seed(*parts: int) -> int:
    """One 63-bit seed from several integers (splitmix64 rounds)."""
    value = 0
    for part in parts:
        value = (value ^ (part & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1
