"""Training of the TraceLock acceptance policy on states of recorded decodes (arXiv 2605.24697).

The backbone stays frozen. Features either come from the feature members of the shards, or are
recomputed from the stored tokens with the backbone; both use the same feature function.
"""

from __future__ import annotations

import copy
import logging
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_dlm.backbones.base import Backbone
from lit_dlm.backbones.projection import Projector
from lit_dlm.decoding import Sampler
from lit_dlm.predict.decode import DecodeModule
from lit_dlm.system.options import one_of, refuse, within
from lit_dlm.tensors.sampling import confidence, entropy, margin
from lit_dlm.tracelock.loss import (
    AcceptanceLossSettings,
    acceptance_loss,
    acceptance_weights,
    prefix_crop,
)
from lit_dlm.tracelock.metrics import (
    AcceptanceScores,
    SelectionSettings,
    step_candidates,
    step_commits,
)
from lit_dlm.tracelock.network import AcceptanceConfig, PositionState
from lit_dlm.tracelock.policy import scorer_to_train
from lit_dlm.tracelock.scorer import CommitSettings, ScorerSettings
from lit_dlm.tracelock.states import StateBatch
from lit_dlm.training.checkpoint import CheckpointFiles, best_checkpoints, drop_backbone
from lit_dlm.training.steps import mixed_seed

logger = logging.getLogger(__name__)

Monitor = Literal[
    "val/rollout_proxy_f0_5", "val/rollout_proxy_f1", "val/average_precision", "val/replay_score"
]
"""Scores that a checkpoint may be selected by, all to be maximised. The first three are the
release's; the last needs ``selection``."""
MONITOR: Monitor = "val/rollout_proxy_f0_5"


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedStates:
    """What the network is shown of a batch and what it should answer. ``R`` rows per state."""

    features: Tensor  # (B, R, F) float32
    proposals: Tensor  # (B, R) int64 proposed tokens
    state: Tensor  # (B, R) int64 :class:`~lit_dlm.tracelock.network.PositionState`
    label: Tensor  # (B, R) bool: the proposal is the token that the trace ended with
    in_response: Tensor  # (B, R) bool: response positions, padding excluded
    decidable: Tensor
    """``(B, R)`` bool: masked positions whose final token is known; only they have a label."""
    is_tail: Tensor
    """``(B, R)`` bool: positions that end as padding after the answer; decidable ones only, unless
    the loss counts the written tail."""
    present: Tensor  # (B, R) bool: everything but padding


class TraceLockModule(DecodeModule):
    """Trains the acceptance network and exports it as a folder that decoding loads.

    Args:
        backbone: the frozen denoiser; it runs only where features are recomputed.
        policy: folder of a policy to start from, or to validate; ``null`` starts from random
            weights. It keeps its projector; another ``head`` or ``settings`` is refused.
        projector: folder of the projector that made (or will make) the features, for random
            weights.
        settings: what the network is shown; must match stored features.
        min_crop_ratio: training shows a prefix of each response; its share of the length is
            uniform between this ratio and 1.
        selection: how validation decodes for the replay score; without it there is no such score.
        export_monitor: the score whose best checkpoint is exported as the policy; best checkpoints
            by other scores are exported beside it.
        lr_scheduler: constructor of a schedule, stepped every optimiser step. A plateau schedule
            watches ``val/loss`` and is stepped at every validation.
        export_dir: where the policy folder is written at the end; ``policy`` inside the trainer's
            root directory by default. Best checkpoints by other scores go to
            ``{export_dir}_by/{score}``.
    """

    tail_ids: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        policy: str | None = None,
        projector: str | Projector | None = None,
        head: AcceptanceConfig | None = None,
        settings: ScorerSettings | None = None,
        loss: AcceptanceLossSettings | None = None,
        min_crop_ratio: float = 0.25,
        selection: SelectionSettings | None = None,
        export_monitor: Monitor = MONITOR,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=1e-4, weight_decay=0.01
        ),
        lr_scheduler: LRSchedulerCallable | None = None,
        export_dir: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(backbone, **common)
        if isinstance(backbone, torch.nn.Module):
            backbone.eval()  # a trainer does not change the mode
        within("(0, 1]", min_crop_ratio=min_crop_ratio)
        made = scorer_to_train(backbone, policy, projector, head=head, settings=settings)
        self.scorer = made.train()
        self.loss_settings = loss or AcceptanceLossSettings()
        if self.loss_settings.written_tail:  # the network must see written positions
            of = "loss.written_tail: settings."
            one_of("generation", "all", of=of, layout=self.scorer.settings.layout)
        # What fills the canvas after an answer.
        tail = {backbone.spec.pad_id, backbone.spec.eos_ids[0]}
        self.register_buffer("tail_ids", torch.tensor(sorted(tail)), persistent=False)
        self.min_crop_ratio = min_crop_ratio
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.export_dir = None if export_dir is None else Path(export_dir)
        self.export_monitor = export_monitor
        self.selection = selection
        self.scores = AcceptanceScores(with_replay=selection is not None)
        self.calibration_curve: dict[str, Tensor] | None = None

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            why = "for TraceLock, whose network is small and whose backbone is frozen"
            refuse("trainer.strategy", f"ddp or one device {why}", "ModelParallelStrategy")

    # -- what the network sees -------------------------------------------------------------------

    def observe(self, batch: StateBatch) -> ObservedStates:
        """Returns features (stored or recomputed), states and labels of a batch; no gradient."""
        features, proposals = batch.features, batch.proposals
        if features is None or proposals is None:
            features, proposals = self._recompute(batch)
        first = batch.ids.shape[1] - features.shape[1]
        masked, present = batch.masked[:, first:], batch.pad_mask[:, first:]
        target = batch.target[:, first:]
        columns = torch.arange(first, batch.ids.shape[1], device=target.device)
        in_response = (columns >= batch.start).expand_as(present) & present
        state = torch.where(in_response, int(PositionState.LOCKED), int(PositionState.PROMPT))
        # A trace that ran out of steps leaves masks, whose final token is not known. Copies that
        # only fill the batch count nowhere.
        decidable = masked & (target != batch.mask_id) & batch.is_real[:, None]
        is_tail = decidable & torch.isin(target, self.tail_ids)
        if self.loss_settings.written_tail:
            ends_as_tail = in_response & torch.isin(target, self.tail_ids)
            is_tail = ends_as_tail & batch.is_real[:, None]
        return ObservedStates(
            features=features,
            proposals=proposals,
            state=torch.where(masked, int(PositionState.GEN), state),
            label=(proposals == target) & (decidable | is_tail),
            in_response=in_response,
            decidable=decidable,
            is_tail=is_tail,
            present=present,
        )

    @torch.no_grad()
    def _recompute(self, batch: StateBatch) -> tuple[Tensor, Tensor]:
        # As in a decode, so that stored and recomputed features of a state agree.
        settings = self.scorer.settings
        columns = torch.arange(batch.start, batch.ids.shape[1], device=batch.ids.device)
        denoised = self.backbone.denoise(
            batch.ids,
            pad_mask=batch.pad_mask,
            columns=columns.expand(len(batch.ids), -1),
            hidden_layers=settings.hidden_layers,
            **batch.shown(),
        )
        assert denoised.hidden is not None
        Sampler().restrict(denoised, self.backbone.spec)
        logits = denoised.logits.float()
        proposals = logits.argmax(-1)
        # Prompt rows have no proposal: zeros, as in the decode loop.
        num_prompt = batch.start if settings.layout == "all" else 0

        def rows(values: Tensor) -> Tensor:
            return F.pad(values, (num_prompt, 0))

        features = self.scorer.features(
            denoised.hidden[:, batch.start - num_prompt :],
            rows(confidence(logits, proposals)),
            entropy=rows(entropy(logits)) if settings.features.entropy else None,
            margin=rows(margin(logits)) if settings.features.margin else None,
        )
        return features, rows(proposals)

    # -- training --------------------------------------------------------------------------------

    def training_step(self, batch: StateBatch, batch_idx: int) -> Tensor:
        seen = self.observe(batch)
        # A decode shows the network what is left of its window's end; training shows prefixes of
        # any length, so that one policy serves all windows.
        visible = self._cropped(seen, self._crop_shares(batch, batch_idx))
        output = self.scorer(seen.features, seen.state, visible)
        weight = acceptance_weights(
            seen.label,
            seen.decidable,
            seen.is_tail,
            visible,
            is_correct=batch.is_correct,
            settings=self.loss_settings,
        )
        # Every process divides by the same number, since their gradients are averaged.
        norm = weight.sum()
        if self.trainer.world_size > 1:
            norm = self.all_gather(norm.detach()).mean()  # type: ignore[union-attr]
        terms = acceptance_loss(output.logits, output.tau, seen.label, weight, norm=norm)
        self.log("train/loss", terms.total.detach(), prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in terms.parts.items()})
        self.log("train/tau", output.tau.detach().mean())
        return terms.total

    def _crop_shares(self, batch: StateBatch, batch_idx: int) -> Tensor:
        """Returns ``(B,)`` uniform draws that make several processes train like a single one.

        Rank ``r`` has the rows from ``r * B`` on of the batch that a single process would have.
        """
        # The generator is the step's alone, not that of dropout: a resumed run draws the same.
        B = len(batch.ids)
        accumulated = batch_idx % self.trainer.accumulate_grad_batches
        seed = mixed_seed(self.seed, self.global_step, accumulated)
        draws = torch.rand(
            B * self.trainer.world_size,
            dtype=torch.float32,
            generator=torch.Generator().manual_seed(seed),
        )
        first = B * self.trainer.global_rank
        return draws[first : first + B].to(batch.ids.device, non_blocking=True)

    def _cropped(self, seen: ObservedStates, shares: Tensor) -> Tensor:
        """Returns ``(B, R)`` bool positions that are visible after a prefix crop."""
        ratio = self.min_crop_ratio + (1.0 - self.min_crop_ratio) * shares
        decidable = seen.decidable & ~seen.is_tail
        return prefix_crop(ratio, seen.in_response, decidable, seen.label) & seen.present

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.optimizer(self.scorer.head.parameters())
        if self.lr_scheduler is None:
            return optimizer
        scheduler = self.lr_scheduler(optimizer)
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):  # Lightning never steps it: we do
            config |= {"monitor": "val/loss", "interval": "epoch", "frequency": sys.maxsize}
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    # -- validation ------------------------------------------------------------------------------

    def validation_step(self, batch: StateBatch, batch_idx: int) -> None:
        # As in the release: loss and ranking scores of whole states, the proxy's of a fresh crop.
        seen = self.observe(batch)
        chosen = seen.decidable & ~seen.is_tail
        output = self.scorer(seen.features, seen.state, seen.present)
        logits, label = output.decision_logits[chosen], seen.label[chosen]
        loss = F.binary_cross_entropy_with_logits(logits, label.float(), reduction="sum")
        count = max(label.numel(), 1)
        self.log("val/loss", loss / count, batch_size=count, sync_dist=True, on_epoch=True)
        generator = torch.Generator().manual_seed(
            self.seed + 100_000 * self.global_step + batch_idx
        )
        share = torch.rand(len(batch.ids), dtype=torch.float32, generator=generator)
        share = share.to(batch.ids.device)
        self.scores.update(logits, label, output.tau[batch.is_real])
        visible = self._cropped(seen, share)
        cropped = self.scorer(seen.features, seen.state, visible).decision_logits
        chosen = chosen & visible
        self.scores.proxy.update(cropped[chosen], seen.label[chosen])
        if self.selection is not None:
            self._update_replay(batch, seen)

    def _update_replay(self, batch: StateBatch, seen: ObservedStates) -> None:
        """Applies window, gate, cap and fallback to stored states."""
        assert self.selection is not None
        assert self.scores.replay is not None
        first = batch.ids.shape[1] - seen.features.shape[1]
        proposals = batch.ids.clone()
        proposals[:, first:] = torch.where(seen.state > 0, seen.proposals, proposals[:, first:])
        candidates, visible = step_candidates(batch, proposals, self.backbone, self.selection)
        # States with positions that the trace never wrote do not count, nor do copies.
        decided = (~seen.in_response | seen.decidable | (seen.state != PositionState.GEN)).all(1)
        candidates = candidates[:, first:] & decided[:, None]
        output = self.scorer(seen.features, seen.state, visible[:, first:] & seen.present)
        self.scores.replay.update(
            step_commits(output.decision_logits, candidates, self.selection),
            seen.label,
            seen.state == PositionState.GEN,
            seen.in_response.sum(1),
        )

    def on_validation_epoch_end(self) -> None:
        scores = self.scores.compute()
        self.calibration_curve = self.scores.calibration.compute()
        # Already equal on all ranks; Lightning warns about epoch values that are not reduced.
        self.log_dict(scores, sync_dist=True)
        self.scores.reset()
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            for config in self.trainer.lr_scheduler_configs:
                if isinstance(config.scheduler, ReduceLROnPlateau):
                    config.scheduler.step(self.trainer.callback_metrics["val/loss"])

    # -- files -----------------------------------------------------------------------------------

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        # A schedule has the length of this run; ``OneCycleLR`` would restore the old length.
        for state in checkpoint.get("lr_schedulers", ()):
            for length in ("total_steps", "_schedule_phases"):
                state.pop(length, None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        drop_backbone(checkpoint)

    def on_fit_end(self) -> None:
        if self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        folder = self.export_dir or Path(self.trainer.default_root_dir) / "policy"
        self.export(folder)
        for monitor in best_checkpoints(self):
            if monitor in get_args(Monitor) and monitor != self.export_monitor:
                by = folder.with_name(f"{folder.name}_by") / monitor.rpartition("/")[2]
                self.export(by, monitor=monitor)

    def export(self, folder: str | Path, *, monitor: str | None = None) -> None:
        """Writes the policy folder: the best checkpoint by ``monitor`` (or ``export_monitor``).

        If no checkpoint monitors it, the present weights are taken.
        """
        scorer, monitor = self.scorer, monitor or self.export_monitor
        facts: dict[str, Any] = {"seed": self.seed, "global_step": int(self.global_step)}
        data = self.trainer.datamodule if self._trainer else None  # type: ignore[attr-defined]
        known = scorer.training_facts.get("tasks", ()), getattr(data, "tasks", ())
        facts["tasks"] = sorted({*chain(*known)})  # those of the policy that it began with, too
        if best := best_checkpoints(self).get(monitor):
            # Into a copy: a run may go on after the export.
            stored = CheckpointFiles().load_checkpoint(best.best_model_path)
            scorer = copy.deepcopy(scorer)
            weights = stored["state_dict"].items()
            scorer.load_state_dict({key.removeprefix("scorer."): value for key, value in weights})
            facts["global_step"] = int(stored["global_step"])
            if best.best_model_score is not None:
                facts[monitor] = float(best.best_model_score)
        scorer.training_facts = facts
        chosen = self.selection or scorer.commits
        scorer.commits = CommitSettings(
            threshold=chosen.threshold, max_accept_per_step=chosen.max_accept_per_step
        )
        scorer.save(folder)
        logger.info("wrote the acceptance policy to %s", folder)
