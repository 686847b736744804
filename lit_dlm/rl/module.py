"""TraceRL: policy optimisation on the states that a rollout went through (arXiv:2509.06949).

An epoch is one RL step: at its beginning the module calls :func:`~lit_dlm.rl.step.rl_step`, then it
trains on the batches returned. It does not know which masking drew their states (traces, random
masks, complements, views) or where the rollouts come from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.base import Rows
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import Decoder
from lit_dlm.finetuning.trainable import TrainableModule
from lit_dlm.rl.batch import RolloutBatch, SampleBuilder
from lit_dlm.rl.loop import RLLoop
from lit_dlm.rl.metrics import UpdateScores
from lit_dlm.rl.policy_losses import PolicyLoss
from lit_dlm.rl.rollout import OnlineRollouts
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from lit_dlm.rl.step import TokenScores
from lit_dlm.rl.value import ValueHead, value_loss
from lit_dlm.system.options import at_least, one_of, refuse_first, within
from lit_dlm.tensors.precision import evaluating
from lit_dlm.training.fit_loop import make_epochs_whole, restart_epoch
from lit_dlm.training.masking import TraceMasking
from lit_dlm.training.sharding import decoding_weights, whole_weights
from lit_dlm.training.states import Masking
from lit_dlm.training.terms import LossTerms

VALUE = "value"  # name of the value model's adapter on the policy's weights
_PROGRESS = "rl_progress"  # key in a checkpoint


class TraceRLModule(TrainableModule):
    """Trains a policy, and with ``value`` a value model, on the policy's own rollouts.

    Both are optimised together in two parameter groups whose gradients are clipped separately.
    Advantages are fixed before either changes, so this equals training one after the other.

    Args:
        backbone: the policy: with ``lora``, with a trainable ``adapter``, or fully ``trainable``.
            Dropout must be 0.
        decoders: decoding methods by name.
        masking: the states trained on: ``TraceMasking`` (TraceRL; by default every step, exactly
            as it was decoded), ``RandomMasking``, ``CoupledMasking``, ``CoupledViews``
            (coupled-GRPO), ``MaskedPrompt`` (diffu-GRPO), ``BoundViews`` (bounds of responses) or
            ``DecodedViews`` (states of decodes that rewrite).
        method: decoder of rollouts; the first one by default.
        val_method: decoder of validation, or several; that of rollouts by default. The first one
            logs ``val/reward``, the others ``val/NAME/reward``.
        objective: the clipped policy loss, and which log-probabilities a policy loss gets.
        policy_loss: replaces the clipped loss: ``EBPO``, ``ESPO``, ``SPG``,
            ``WeightedLikelihood`` (wd1), or one of your own by its import path.
        value: value model; with ``null`` every token has the advantage of its response.
        value_backbone: a separate value model, with ``value.backbone: full``.
        block_alignment: ``response`` counts blocks of training rows from its start, as in dLLM-RL;
            ``null`` leaves it to the backbone.
        block_size: positions of a block in training rows; the model's own by default. A larger
            value trains the model for larger blocks, while rollouts still use the old size.
        packing: states of one response in one row, for block models; 1 keeps them apart. A packed
            row is one sample in ``data.batch_size``, ``packing`` rows in ``data.rows_per_update``.
        optimizer: constructor of the optimiser; its learning rate is the policy's.
        warmup_steps: optimiser steps of a linear warm-up.
        decay_share: share of the run's RL steps over whose end the learning rates fall to 0.
    """

    replays_shards: ClassVar[bool] = True
    """Whether shards hold all that it trains on, so that it can replay a former run."""
    online_rollouts: type[OnlineRollouts] = OnlineRollouts
    """How it rolls out prompts."""

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        decoders: dict[str, Decoder],
        masking: Masking | None = None,
        method: str | None = None,
        val_method: str | list[str] | None = None,
        objective: PolicyObjective | None = None,
        policy_loss: PolicyLoss | None = None,
        value: ValueObjective | None = None,
        value_backbone: HFBackbone | None = None,
        block_alignment: Literal["response"] | None = None,
        block_size: int | None = None,
        packing: int = 1,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=1e-6, weight_decay=0.0
        ),
        warmup_steps: int = 0,
        decay_share: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(
            backbone,
            masking=masking or TraceMasking(padding="replayed"),
            decoders=decoders,
            optimizer=optimizer,
            warmup_steps=warmup_steps,
            **common,
        )
        within("[0, 1]", decay_share=decay_share)
        self.decay_share = decay_share
        chosen = [val_method] if isinstance(val_method, str) else val_method
        self.method = method or next(iter(self.decoders), "")
        self.val_methods = tuple(dict.fromkeys(chosen or [self.method]))
        self.rollout_methods: tuple[str, ...] = (self.method,)  # RL steps take them in turn
        at_least(1, decoders=len(self.decoders))
        one_of(*self.decoders, method=self.method)
        for name in self.val_methods:
            one_of(*self.decoders, val_method=name)
        self.objective = objective or PolicyObjective()
        self.policy_loss = self.objective.loss(policy_loss, self.masking)
        self.value = value
        self.row_spec = _row_spec(backbone.spec, block_size, block_alignment)
        self.check_objective()
        self.rows = SampleBuilder(
            self.masking,
            self.row_spec,
            seed=self.seed,
            num_padding=self.num_padding,
            normalise=self.objective.normalise,
            copies=packing,
        )
        self._check_value(value_backbone)
        self.value_backbone = value_backbone
        self.value_head: ValueHead | None = None
        if value is not None:
            self._add_value(value)
        self.update_scores = UpdateScores(with_value=value is not None)
        self._loop: RLLoop | None = None
        self._skips_update = False
        self._began = time.perf_counter()

    def check_objective(self) -> None:
        """Refuses an objective that the model in training cannot have."""
        self.objective.check(self.backbone)

    def _check_value(self, value_backbone: HFBackbone | None) -> None:
        kind = None if self.value is None else self.value.backbone
        own = [] if value_backbone is None else list(value_backbone.parameters())
        refuse_first(
            (
                (kind == "full") != (value_backbone is not None),
                "value_backbone: needed with value.backbone 'full' and only there, got "
                f"{'none' if value_backbone is None else 'one'} with {kind!r}",
            ),
            (
                own and not any(parameter.requires_grad for parameter in own),
                "value_backbone: nothing is trainable; set trainable or lora",
            ),
            (
                kind is not None and not self.masking.scores_tokens,
                f"value: {type(self.masking).__name__} has no state of its own per token; use null",
            ),
            (
                kind == "lora" and self.backbone.adapter is None,
                "value.backbone: 'lora' shares frozen weights with a policy that is an adapter "
                "itself; give the backbone lora settings, or use 'full' or 'head'",
            ),
        )

    def _add_value(self, value: ValueObjective) -> None:
        """Adds the value head and, with ``lora``, the adapter that it reads."""
        own = self.value_backbone
        if value.backbone == "lora":
            self.backbone.add_side_adapter(VALUE, value.lora)
        if own is not None and not own.architecture.tie_embeddings:
            # Values do not pass through it, and DDP waits for the gradients of all that trains.
            own.model.lm_head.requires_grad_(False)
        reader = own or self.backbone
        if self.backbone.vision is not None and reader.vision is not None:
            reader.vision.known = self.backbone.vision.known
        self.value_head = ValueHead(reader.hidden_size)

    # -- what RL needs from the trainer ----------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        """Sets up the trainer in the first hook of a run, before callbacks read its settings."""
        if self.trainer.state.fn == "fit":
            make_epochs_whole(self.trainer)
        return []

    @property
    def loop(self) -> RLLoop:
        """The RL steps of the run; the data module makes them when it is set up."""
        assert self._loop is not None
        return self._loop

    @loop.setter
    def loop(self, loop: RLLoop) -> None:
        self._loop = loop

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluation mode, under the trainer's precision, as in training."""
        with self.trainer.precision_plugin.forward_context(), evaluating(self):
            yield

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._loop is not None:
            checkpoint[_PROGRESS] = self.loop.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        # Lightning sets the data module up before it loads. Only ``predict`` has another one, whose
        # decodes do not depend on how far training was.
        if self._loop is not None and self.loop.load_state_dict(checkpoint.get(_PROGRESS, {})):
            restart_epoch(checkpoint)

    # -- the policy of an RL step ----------------------------------------------------------------

    @property
    def takes_token_rewards(self) -> bool:
        """Whether rewards may be of tokens, whose states are then trained on one by one."""
        return not self.masking.scores_responses

    def rollout_weights(self) -> AbstractContextManager[None]:
        # Whole, since processes decode different numbers of steps and would wait for each other's
        # shards. The merged weights are restored from copies, bit for bit: adding the adapter and
        # subtracting it again would round, and the policy would drift from its checkpoints.
        return decoding_weights(self.backbone)

    @contextmanager
    def value_weights(self) -> Iterator[None]:
        # Whole, since processes have different numbers of states to value.
        assert self.value_head is not None
        with whole_weights(self.value_backbone or self.backbone), whole_weights(self.value_head):
            yield

    @property
    def temperature(self) -> float:
        """Temperature of training log-probabilities; 1 where rollouts are greedy."""
        # That of the sampler by default, so that ratios compare the distribution that was drawn
        # from; a greedy decode has none to divide by.
        if self.objective.temperature != "rollout":
            return float(self.objective.temperature)
        return self.decoders[self.method].sampler.temperature or 1.0

    # -- scores ----------------------------------------------------------------------------------

    def score(self, batch: RolloutBatch) -> TokenScores:
        """Scores a batch, on the module's device, with the current weights; differentiable."""
        rows = batch.rows()
        stats, hidden = self.backbone.score_with_hidden(rows, **self._drawn_with)
        log_prob = self.policy_loss.estimate(stats.log_prob, batch)
        value = None if self.value is None else self._values(rows, hidden)
        return TokenScores(log_prob, stats.entropy, value)

    @property
    def _drawn_with(self) -> dict[str, Any]:
        """The temperature and ids that rollouts drew with: a ratio compares like with like."""
        id_range = self.decoders[self.method].sampler.id_range(self.backbone.spec)
        return {"temperature": self.temperature, "id_range": id_range}

    def values(self, batch: RolloutBatch) -> Tensor:
        """Returns ``(M,)`` values of a batch on the module's device, without scoring its tokens."""
        return self._values(batch.rows(), None)

    def _values(self, rows: Rows, hidden: Tensor | None) -> Tensor:
        """``hidden`` is that of the policy, which a value head on it reads."""
        assert self.value is not None
        assert self.value_head is not None
        if self.value.backbone != "head" or hidden is None:
            reader = self.value_backbone or self.backbone
            is_lora = self.value.backbone == "lora"
            with self.backbone.using_adapter(VALUE) if is_lora else nullcontext():
                hidden = reader.encode_rows(rows)
        if self.value.backbone == "head":
            # The value loss would train the policy towards states whose worth is easy to tell.
            hidden = hidden.detach()
        result: Tensor = self.value_head(hidden)
        return result

    @torch.no_grad()
    def reference_log_prob(self, batch: RolloutBatch) -> Tensor:
        """Returns log-probabilities ``(M,)`` under the backbone without its adapter."""
        with self.backbone.using_adapter(None):
            stats = self.backbone.score_tokens(batch.rows(), **self._drawn_with)
        return self.policy_loss.estimate(stats.log_prob, batch)

    # -- training --------------------------------------------------------------------------------

    def training_step(self, batch: RolloutBatch, batch_idx: int = 0) -> Tensor:
        # 1. Scores under the weights as they are now.
        scores, tokens = self.score(batch), batch.tokens
        assert tokens.advantage is not None
        assert tokens.old_log_prob is not None
        # 2. The policy's loss, from the ratio to the weights of the rollouts.
        actor = self.policy_loss.compute(
            scores.log_prob,
            tokens.old_log_prob.to(scores.log_prob.dtype),
            tokens.advantage,
            tokens.weight,
            reference=tokens.reference,
            kl_weight=tokens.kl_weight,
        )
        # 3. The value model's.
        value = None
        if scores.value is not None:
            assert tokens.returns is not None
            assert tokens.old_value is not None
            assert self.value is not None
            value = value_loss(
                scores.value, tokens.old_value, tokens.returns, tokens.weight, clip=self.value.clip
            )
        total = actor.total if value is None else actor.total + value.total
        # 4. Sums over states, divided by the samples of a full batch. Smaller updates weight their
        # samples more (``shard_samples``), so every update is a mean over rows.
        loss = total / batch.num_slots
        self.require_finite_loss(loss, batch.responses.uids)
        self._skips_update = batch.is_empty
        # 5. Log; what the filters dropped would count as samples without a loss.
        if self._trainer is not None and not batch.is_empty:
            self._log_update(batch, scores, actor, value)
        return loss

    def _log_update(
        self, batch: RolloutBatch, scores: TokenScores, actor: LossTerms, value: LossTerms | None
    ) -> None:
        parts, counted = dict(actor.parts), batch.tokens.weight > 0
        policy, total = parts.pop("policy", actor.total.detach()), actor.total
        if value is not None:
            assert scores.value is not None
            assert batch.tokens.returns is not None
            total = total + value.total
            self.update_scores.value_loss.update(value.total, batch.num_rows)
            for fit in (self.update_scores.value_error, self.update_scores.value_explained):
                fit.update(scores.value, batch.tokens.returns, counted)
        self.update_scores.loss.update(total, batch.num_rows)
        self.update_scores.policy_loss.update(policy, batch.num_rows)
        scored = counted if batch.token is None else counted[batch.token]
        entropy = (scores.entropy.detach() * scored).sum() / scored.sum().clamp_min(1)
        named: dict[str, Any] = {**parts, "entropy": entropy}
        named |= dict(self.update_scores.named_children())
        self.log_dict(
            {f"train/{name}": metric for name, metric in named.items()},
            on_step=False,
            on_epoch=True,
            batch_size=int(counted.sum()),
            sync_dist=True,
        )

    def on_train_epoch_start(self) -> None:
        self._began = time.perf_counter()
        for name, value in self.loop.current.metrics.items():
            self._log_over_step({name: value}, prog_bar=name == "rollout/reward")

    def _log_over_step(self, values: dict[str, Any], **options: Any) -> None:
        """Logs values once, at the end of the RL step, over its updates and all processes."""
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, **options)

    def on_train_epoch_end(self) -> None:
        """Marks the RL step as done, before checkpoints are written."""
        self.loop.finish()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs how long the updates of the RL step take, as a mean over processes."""
        now = time.perf_counter()
        # A sum over updates and processes; Lightning has no mean over the latter alone.
        seconds = (now - self._began) / self.trainer.world_size
        self._log_over_step({"time/train": seconds}, reduce_fx="sum")
        self._began = now

    # -- validation ------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Gathers the policy's weights: processes decode different numbers of steps."""
        self._whole.enter_context(decoding_weights(self.backbone))
        if self.loop.validation is not None:
            self.loop.validation.begin()

    def validation_step(self, batch: str, batch_idx: int = 0) -> None:
        """Decodes the held-out prompts with the decoder named ``batch``, and scores responses."""
        assert self.loop.validation is not None
        self.loop.validation.add(batch)

    def on_validation_epoch_end(self) -> None:
        if self.loop.validation is not None:
            scores = self.loop.validation.result(self.loop.ranks)
            # Equal on all processes; synchronised all the same, or Lightning warns.
            named = {f"val/{name}": value for name, value in scores.items()}
            self.log_dict(named, sync_dist=True)

    def on_validation_end(self) -> None:
        self._whole.close()

    # -- optimisation ----------------------------------------------------------------------------

    def parameter_groups(self) -> tuple[list[Tensor], list[Tensor]]:
        """Trained parameters of the policy and of the value model."""
        # The value's adapter is among the backbone's own parameters, so names must tell.
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
        # Two groups: a value model learns from scratch and takes larger steps.
        policy, value = self.parameter_groups()
        groups: list[dict[str, Any]] = [{"params": policy}] if policy else []
        if policy and value:
            assert self.value is not None
            groups.append({"params": value, "lr": self.value.lr})
        if self.decay_share:
            at_least(1, of="trainer.", max_epochs=self.trainer.max_epochs or 0)
        return self.scheduled(groups, lambda optimizer: LambdaLR(optimizer, self._rate))

    def _rate(self, update: int) -> float:
        # Falls by RL step, since the number of updates of a run is not known. It is the rate of the
        # next update: behind the last batch of an RL step that of the RL step that follows.
        ended = self.trainer.current_epoch + self.trainer.is_last_batch
        left = 1 - ended / (self.trainer.max_epochs or -1)
        falling = left / self.decay_share if self.decay_share else 1.0
        return min(1.0, falling, (update + 1) / (self.warmup_steps + 1))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips policy and value gradients separately, each to ``trainer.gradient_clip_val``.

        Together, the larger of both would shrink the other.
        """
        if self._skips_update:
            # Gradients of 0 are not enough: momentum and weight decay would still move weights. An
            # optimiser leaves parameters without gradients alone.
            optimizer.zero_grad()
            return
        bound = float("inf") if gradient_clip_val is None else float(gradient_clip_val)
        if gradient_clip_algorithm == "value":
            for group in optimizer.param_groups:
                torch.nn.utils.clip_grad_value_(group["params"], bound)
            return
        norms = {}
        for name, group in zip(("policy", "value"), optimizer.param_groups, strict=False):
            norm = torch.nn.utils.clip_grad_norm_(group["params"], bound)
            if hasattr(norm, "full_tensor"):  # of sharded weights
                norm = norm.full_tensor()
            norms[f"train/grad_norm_{name}"] = norm
        self._log_over_step(norms, batch_size=1)


def _row_spec(
    spec: BackboneSpec, block_size: int | None, alignment: Literal["response"] | None
) -> BackboneSpec:
    """Returns the specification of training rows, whose blocks may differ from the model's."""
    is_block, message = spec.attention == "block", f"only for block attention, got {spec.attention}"
    refuse_first(
        (block_size is not None and not is_block, f"block_size: {message} attention"),
        (alignment is not None and not is_block, f"block_alignment: {message} attention"),
    )
    at_least(1, block_size=block_size)
    origin = alignment or spec.block_origin
    return replace(spec, block_size=block_size or spec.block_size, block_origin=origin)
