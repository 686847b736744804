"""TraceRL: policy optimisation on the states that a rollout went through (arXiv:2509.06949).

The module scores training items and steps the optimiser; it does not know which objective drew the
states (traces, random masks, complements, views) nor where rollouts come from. A data module rolls
out with :class:`~lit_dlm.modules.rollouts.RolloutEngine` between epochs, one epoch being one RL
step, and fills in what the losses need.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import Decoder
from lit_dlm.heads.value import ValueHead
from lit_dlm.losses.actor import actor_loss
from lit_dlm.losses.corruption import TraceMasking
from lit_dlm.losses.states import Corruption
from lit_dlm.losses.value import value_loss
from lit_dlm.losses.views import CoupledViews
from lit_dlm.modules.finetune import FinetuneModule, require_finite
from lit_dlm.modules.objective import PolicyObjective, ValueObjective
from lit_dlm.modules.rollout_batch import RolloutBatch, training_rows
from lit_dlm.modules.rollout_items import RowBuilder
from lit_dlm.modules.rollout_validation import RolloutValidation, ValidationBatch
from lit_dlm.modules.sharding import decoding_weights
from lit_dlm.modules.update_scores import UpdateScores

VALUE = "value"
"""Name of the value model's adapter on the policy's weights."""


class ItemScores(NamedTuple):
    """What the models say of a batch."""

    log_prob: Tensor
    """``(M,)`` log-probability of each unit's token."""
    entropy: Tensor
    """``(N,)`` entropy of each scored cell, nats."""
    value: Tensor | None
    """``(M,)`` value of each token before it was written."""


class TraceRLModule(FinetuneModule):
    """Trains a policy, and a value model beside it, on rollouts of its own.

    Policy and value are optimised together in two parameter groups whose gradients are clipped
    apart: advantages are fixed before either moves, so this equals training one after the other.
    The learning rate is constant after a warm-up.

    Args:
        backbone: the policy; with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
            Dropout must be 0.
        tokenizer: folder, embedded name or hub id of the tokenizer.
        decoders: decoding methods by name.
        corruption: the states trained on: ``TraceMasking`` (TraceRL; by default every step, exactly
            as it was decoded), ``RandomMasking``, ``CoupledMasking``, ``CoupledViews``
            (coupled-GRPO) or ``MaskedPrompt`` (diffu-GRPO).
        method: decoder of rollouts; the first one by default.
        val_method: decoder of validation, or several, such as a static and a dynamic one; that of
            rollouts by default. The first one gives ``val/reward``, others ``val/NAME/reward``.
        objective: policy loss.
        value: value model; ``null`` for none, then every token has the advantage of its response.
        value_backbone: its own model, with ``value.backbone: full``.
        block_alignment: where blocks of training rows are counted from: ``absolute`` as in
            decoding, ``response`` as in dLLM-RL; ``null`` leaves it to the backbone.
        block_size: cells of a block in training rows; the model's own by default. A larger one
            grows the blocks while rollouts still have the old size.
        packing: states of one response in one row, for block models; 1 keeps them apart. A packed
            row is one item of ``data.batch_size`` and ``packing`` rows of ``data.rows_per_update``.
        num_padding: cells of fill behind an answer that are trained, ``null`` for all
            (``post_num`` in dLLM-RL).
        seed: base seed of rollouts and states.
        optimizer: constructor of the optimiser; its learning rate is the policy's.
        warmup_steps: optimiser steps of a linear warm-up.
        reset_optimizer: forget the optimiser's state before every RL step, as dLLM-RL does.
        export_dir: where the last weights are written.
        chat_template: what stands around the turns of a prompt; the tokenizer's own by default.

    Raises:
        ValueError: options contradict each other.
    """

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        tokenizer: str,
        decoders: dict[str, Decoder],
        corruption: Corruption | None = None,
        method: str | None = None,
        val_method: str | list[str] | None = None,
        objective: PolicyObjective | None = None,
        value: ValueObjective | None = None,
        value_backbone: HFBackbone | None = None,
        block_alignment: Literal["absolute", "response"] | None = None,
        block_size: int | None = None,
        packing: int = 1,
        num_padding: int | None = 0,
        seed: int = 0,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=1e-6, weight_decay=0.0
        ),
        warmup_steps: int = 0,
        reset_optimizer: bool = False,
        export_dir: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(
            backbone,
            corruption=corruption or TraceMasking(padding="replayed"),
            tokenizer=tokenizer,
            decoders=decoders,
            seed=seed,
            num_padding=num_padding,
            optimizer=optimizer,
            warmup_steps=warmup_steps,
            export_dir=export_dir,
            chat_template=chat_template,
        )
        if not self.decoders:
            raise ValueError("decoders: expected at least one, which rolls out, got none")
        self.method = method or next(iter(self.decoders))
        chosen = [val_method] if isinstance(val_method, str) else val_method
        self.val_methods = tuple(dict.fromkeys(chosen or [self.method]))
        """Decoders of validation, the first one in charge."""
        for option, names in (("method", (self.method,)), ("val_method", self.val_methods)):
            for name in names:
                if name not in self.decoders:
                    raise ValueError(
                        f"{option}: expected one of {', '.join(self.decoders)}, got {name!r}"
                    )
        self.objective = objective or PolicyObjective()
        self.value = value
        self.reset_optimizer = reset_optimizer
        spec = backbone.spec
        if block_size is not None:
            if spec.attention != "block" or block_size < 1:
                raise ValueError(
                    "block_size: expected a positive number with block attention, got "
                    f"{block_size} with {spec.attention} attention"
                )
            spec = replace(spec, block_size=block_size)
        if block_alignment is not None:
            if spec.attention != "block":
                raise ValueError(
                    f"block_alignment: only for block attention, got {spec.attention} attention"
                )
            spec = replace(
                spec, block_origin="sequence" if block_alignment == "absolute" else "response"
            )
        self.row_spec = spec
        """Specification of training rows."""
        self.objective.check(
            backbone, self.corruption, row_spec=spec, decoder=self.decoders[self.method]
        )
        self.rows = RowBuilder(
            self.corruption,
            spec,
            seed=seed,
            num_padding=num_padding,
            normalise=self.objective.normalise,
            copies=packing,
        )
        self.value_backbone, self.value_head = self._build_value(value, value_backbone)
        self.update_scores = UpdateScores(with_value=value is not None)
        self.validation: RolloutValidation | None = None
        """What scores held-out prompts; set by the data module."""
        self.facts: dict[str, float] = {}
        """What is known of the RL step, as it is logged."""
        self._skips_update = False
        self.trains_value = True
        """Whether the value model learns in this RL step."""
        self._began = time.perf_counter()

    def _build_value(
        self, value: ValueObjective | None, value_backbone: HFBackbone | None
    ) -> tuple[HFBackbone | None, ValueHead | None]:
        wants_own = value is not None and value.backbone == "full"
        if wants_own != (value_backbone is not None):
            raise ValueError(
                "value_backbone: needed with value.backbone 'full' and only there, got "
                f"{'none' if value_backbone is None else 'one'} with "
                f"{'no value' if value is None else repr(value.backbone)}"
            )
        if value is None:
            return None, None
        if isinstance(self.corruption, CoupledViews):
            raise ValueError("value: CoupledViews has no state of its own per token; use null")
        if value.backbone == "lora":
            if self.backbone.adapter is None:
                raise ValueError(
                    "value.backbone: 'lora' shares frozen weights with a policy that is an adapter "
                    "itself; give the backbone lora settings, or use 'full' or 'head'"
                )
            self.backbone.add_side_adapter(VALUE, value.lora)
        if value_backbone is not None:
            if not value_backbone.architecture.tie_embeddings:
                # No value passes through it, and DDP waits for the gradient of all that trains.
                value_backbone.model.lm_head.requires_grad_(False)
            if not any(parameter.requires_grad for parameter in value_backbone.parameters()):
                raise ValueError("value_backbone: nothing is trainable; set trainable or lora")
        reader = value_backbone or self.backbone
        return value_backbone, ValueHead(reader.hidden_size)

    @property
    def temperature(self) -> float:
        """Temperature of training log-probabilities; 1 where rollouts are greedy."""
        if self.objective.temperature != "rollout":
            return float(self.objective.temperature)
        return self.decoders[self.method].sampler.temperature or 1.0

    # -- scores ----------------------------------------------------------------------------------

    def score(self, batch: RolloutBatch, *, with_value: bool | None = None) -> ItemScores:
        """Scores a batch with the current weights.

        Args:
            batch: on the device of the module.
            with_value: whether values are wanted; by default when there is a value model.

        Returns:
            Log-probabilities, entropies and values, differentiable.
        """
        with_value = self.value is not None if with_value is None else with_value
        rows = training_rows(batch, self.row_spec)
        attention: dict[str, Any] = {
            "mask": rows.mask,
            "position_ids": rows.position_ids,
            "response_start": rows.response_start,
        }
        scored = (rows.ids, rows.targets, rows.rows)
        hidden = None
        if with_value and self.value is not None and self.value.backbone == "head":
            stats, hidden = self.backbone.score_with_rows(
                *scored, **attention, temperature=self.temperature
            )
        else:
            stats = self.backbone.score_tokens(*scored, **attention, temperature=self.temperature)
        values = None
        if with_value:
            values = self._values(rows.ids, rows.rows, attention, hidden)
        return ItemScores(batch.per_unit(stats.log_prob), stats.entropy, values)

    def values(self, batch: RolloutBatch) -> Tensor:
        """Values ``(M,)`` of a batch's tokens, without their probabilities.

        Args:
            batch: on the device of the module.
        """
        rows = training_rows(batch, self.row_spec)
        attention: dict[str, Any] = {
            "mask": rows.mask,
            "position_ids": rows.position_ids,
            "response_start": rows.response_start,
        }
        return self._values(rows.ids, rows.rows, attention, None)

    def _values(
        self, ids: Tensor, rows: Tensor, attention: Mapping[str, Any], hidden: Tensor | None
    ) -> Tensor:
        assert self.value is not None
        assert self.value_head is not None
        if self.value.backbone == "full":
            assert self.value_backbone is not None
            hidden = self.value_backbone.encode_rows(ids, rows, **attention)
        elif self.value.backbone == "lora":
            with self.backbone.using_adapter(VALUE):
                hidden = self.backbone.encode_rows(ids, rows, **attention)
        elif hidden is None:
            hidden = self.backbone.encode_rows(ids, rows, **attention)
        if self.value.backbone == "head":
            hidden = hidden.detach()  # values must not shape the policy
        result: Tensor = self.value_head(hidden)
        return result

    @torch.no_grad()
    def reference_log_prob(self, batch: RolloutBatch) -> Tensor:
        """Log-probabilities ``(M,)`` under the backbone without its adapter."""
        with self.backbone.using_adapter(None):
            return self.score(batch, with_value=False).log_prob

    # -- training --------------------------------------------------------------------------------

    def training_step(self, batch: RolloutBatch, batch_idx: int = 0) -> Tensor:  # type: ignore[override]
        """Policy and value loss of a batch of items."""
        scores = self.score(batch)
        old = scores.log_prob.detach() if batch.old_log_prob is None else batch.old_log_prob
        objective = self.objective
        actor = actor_loss(
            scores.log_prob,
            old.to(scores.log_prob.dtype),
            batch.advantage,
            batch.weight,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            beta=objective.beta,
            kl=objective.kl,
            reference=batch.reference,
            kl_weight=batch.kl_weight,
        )
        total = actor.total
        counted = batch.weight > 0
        cells = counted if batch.unit is None else counted[batch.unit]
        parts = {
            "ratio": actor.parts["ratio"],
            "clip_fraction": actor.parts["clip_fraction"],
            "kl": actor.parts["kl_mean"],
            "entropy": (scores.entropy.detach() * cells).sum() / cells.sum().clamp_min(1),
        }
        is_logged = self._trainer is not None and not batch.is_empty
        if scores.value is not None:
            assert batch.returns is not None
            assert batch.old_value is not None
            assert self.value is not None
            value = value_loss(
                scores.value, batch.old_value, batch.returns, batch.weight, clip=self.value.clip
            )
            # Always in the graph, so that every process reduces the same gradients.
            total = total + value.total * float(self.trains_value)
            if is_logged:
                self.update_scores.add_values(
                    value.total, batch.num_rows, scores.value, batch.returns, counted
                )
        loss = total / batch.num_slots
        uids = batch.responses.uids
        is_finite = torch.isfinite(loss.detach())
        require_finite(
            is_finite,
            self._trainer,
            what="the loss",
            blamed=lambda: [] if bool(is_finite) else uids,
        )
        self._step_uids += uids
        self._skips_update = batch.is_empty
        if is_logged:
            self.update_scores.add_policy(total, actor.parts["policy"], batch.num_rows)
            named: dict[str, Any] = {**parts, **dict(self.update_scores.named_children())}
            self.log_dict(
                {f"train/{name}": value for name, value in named.items()},
                on_step=False,
                on_epoch=True,
                batch_size=int(counted.sum()),
                sync_dist=True,
            )
        return loss

    def note(self, facts: Mapping[str, float]) -> None:
        """Takes what is known of the coming RL step, to be logged when it begins.

        Args:
            facts: values by their full names, such as ``rollout/reward``.
        """
        self.facts = dict(facts)

    def on_train_epoch_start(self) -> None:
        """Logs the facts of the RL step and starts its clock."""
        self._began = time.perf_counter()
        if self.reset_optimizer:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()
        if self.value is not None:
            self.trains_value = self.trainer.current_epoch % self.value.train_every == 0
        if self.facts:
            self.log_dict(self.facts, on_step=False, on_epoch=True, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs how long the updates of the RL step take, as a mean over processes."""
        now = time.perf_counter()
        self.log(
            "time/train",
            (now - self._began) / self.trainer.world_size,
            on_step=False,
            on_epoch=True,
            reduce_fx="sum",
            sync_dist=True,
        )
        self._began = now

    # -- validation ------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Gathers the policy's weights: processes decode different numbers of steps."""
        self._whole.enter_context(decoding_weights(self.backbone))
        if self.validation is not None:
            self.validation.begin()

    def validation_step(self, batch: ValidationBatch, batch_idx: int = 0) -> None:  # type: ignore[override]
        """Decodes held-out prompts and scores them."""
        if self.validation is None:
            raise ValueError(
                "data: expected RolloutDataModule, whose rewards score validation; got "
                f"{type(self.trainer.datamodule).__name__}"  # type: ignore[attr-defined]
            )
        self.validation.add(batch)

    def on_validation_epoch_end(self) -> None:
        """Logs means over all processes."""
        if self.validation is not None:
            scores = self.validation.result(self.trainer.strategy, self.device)
            # Equal on all processes; synchronised all the same, or Lightning warns.
            named = {f"val/{name}": value for name, value in scores.items()}
            self.log_dict(named, sync_dist=True)

    def on_validation_end(self) -> None:
        """Shards the weights again, and takes the adapter out of them."""
        self._whole.close()

    # -- optimisation ----------------------------------------------------------------------------

    def parameter_groups(self) -> tuple[list[Tensor], list[Tensor]]:
        """Trained parameters of the policy and of the value model."""
        side = f".{VALUE}."
        policy: list[Tensor] = []
        value: list[Tensor] = []
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            is_value = not name.startswith("backbone.") or (".lora_" in name and side in name)
            (value if is_value else policy).append(parameter)
        return policy, value

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimiser with a group for the policy and one for the value model."""
        policy, value = self.parameter_groups()
        if not policy:
            raise ValueError(
                "backbone: nothing is trainable; give it lora settings, an adapter with "
                "trainable: true, or trainable: true"
            )
        groups: list[dict[str, Any]] = [{"params": policy}]
        if value:
            assert self.value is not None
            groups.append({"params": value, "lr": self.value.lr})
        optimizer = self.optimizer(groups)
        # The length of a run is not known in updates, so there is nothing to decay over.
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (self.warmup_steps + 1)))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips policy and value gradients apart, each to ``trainer.gradient_clip_val``.

        Parameters that this update leaves alone, all of them after an RL step without anything to
        learn from, lose their gradient, so that neither momentum nor decay moves them.
        """
        names = ("policy", "value")
        for name, group in zip(names, optimizer.param_groups, strict=False):
            if self._skips_update or (name == "value" and not self.trains_value):
                for parameter in group["params"]:
                    parameter.grad = None
                continue
            if gradient_clip_algorithm == "value":
                if gradient_clip_val is not None:
                    torch.nn.utils.clip_grad_value_(group["params"], gradient_clip_val)
                continue
            bound = float("inf") if gradient_clip_val is None else float(gradient_clip_val)
            norm = torch.nn.utils.clip_grad_norm_(group["params"], bound)
            if hasattr(norm, "full_tensor"):
                norm = norm.full_tensor()
            self.log(
                f"train/grad_norm_{name}",
                norm,
                on_step=False,
                on_epoch=True,
                batch_size=1,
                sync_dist=True,
            )
