"""TraceLock trained on outcomes: the actor is the acceptance network, its actions are commits.

Rollouts, rewards, filters, advantages and resuming work as in :mod:`lit_dlm.rl.step`. In a rollout
the model is frozen and the acceptance network *draws* the commits. A sample is one decode,
its states are the steps, and its tokens are the candidates of a step, each with the log-probability
that it was committed or left. The record's features hold what the network saw at each step.

Similar policies, of confidences alone and for other rewards: arXiv 2512.09106, 2510.05725.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn import functional as F

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.projection import Projector, feature_groups
from lit_dlm.decoding import CacheScheme, Decoder, Window
from lit_dlm.rewards.speed import ForwardPrice, PriceConstraint
from lit_dlm.rl.advantages import LessFirst
from lit_dlm.rl.batch import Inputs, RolloutBatch, SampleBuilder, Tokens
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.step import TokenScores
from lit_dlm.system.options import at_least, of_kind, one_of, refuse, within
from lit_dlm.tensors.batches import reads_are_free
from lit_dlm.tracelock.forks import FORK, ForkedPolicy, ForkedRollouts
from lit_dlm.tracelock.network import AcceptanceConfig, PositionState
from lit_dlm.tracelock.policy import TraceLockPolicy, left_of_window_end, scorer_to_train
from lit_dlm.tracelock.scorer import ScorerSettings
from lit_dlm.training.checkpoint import drop_backbone
from lit_dlm.training.states import States
from lit_dlm.trajectories.capture import FeatureCapture, StepSignal, TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory

HELD_BYTES = 2**30
"""Bytes of a capture's features that stay in memory; the rest goes to a file without a name. Of
several processes each has the features of all in memory."""

_PRICE = "price_constraint"  # key in a checkpoint
_COMMITS = "where commits are trained, "  # begins messages about options


class CommitCapture(TrajectoryCapture):
    """Records what the acceptance network saw at every step, and what became of each candidate.

    The signals ``step_commit`` (1 committed, 0 not, -1 no candidate) and ``step_log_odds`` have an
    entry for every cell that is masked before a step.
    """

    def __init__(self, policy: TraceLockPolicy, *, vocab_size: int) -> None:
        scorer = policy.scorer
        features = FeatureCapture(
            function=scorer.features,
            hidden_layers=scorer.settings.hidden_layers,
            groups=feature_groups(scorer.projector.config, scorer.settings.features),
            projector_digest=scorer.projector.digest(),
            scheme="fp16",
            layout="masked",
            scores=scorer.settings.features.scores,
            whole_response=False,  # the network scores candidates alone
        )
        signals: dict[str, StepSignal] = {
            "step_commit": lambda step: torch.where(step.candidates, step.commit.char(), -1),
            "step_log_odds": lambda step: policy.log_odds(step.scores),
        }
        super().__init__(
            vocab_size=vocab_size, level="features", features=features, signals=signals
        )
        self._held = 0  # bytes of features in memory
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open while its records are read

    def trajectories(
        self, uids: Sequence[str], metas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Trajectory]:
        """Returns the records, with features beyond :data:`HELD_BYTES` mapped from a file."""
        records = super().trajectories(uids, metas)
        # Features of every step of every decode may not fit into memory. Each is read once a pass,
        # so pages of a file do.
        begin, placed = self._file.seek(0, 2), {}
        for number, record in enumerate(records):
            size = 0 if record.features is None else record.features.features.nbytes
            if self._held + size <= HELD_BYTES:
                self._held += size
            elif record.features is not None:
                placed[number] = self._file.tell() - begin
                self._file.write(record.features.features.tobytes())
        if not placed:
            return records
        self._file.flush()
        mapped = np.memmap(self._file, np.uint8, "r", begin)  # one for all: each keeps a file open
        for number, offset in placed.items():
            stored = records[number].features
            assert stored is not None
            part = mapped[offset : offset + stored.features.nbytes]
            part = part.view(stored.features.dtype).reshape(stored.features.shape)
            records[number] = replace(records[number], features=replace(stored, features=part))
        return records


@dataclass(frozen=True, eq=False, kw_only=True)
class CommitInputs(Inputs):
    """What the network saw and did in each of ``K`` steps."""

    records: Sequence[Trajectory]
    record: Tensor  # (K,) int64 record of each step
    step: Tensor  # (K,) int64
    visible: Tensor  # (K, G) bool: masked positions that the network saw
    commit: Tensor  # (K, G) bool: positions that the step committed
    # (n, F) float32 of the visible positions, state by state; read from the records when selected.
    features: Tensor | None = None

    def select(self, states: Tensor) -> CommitInputs:
        record, step, visible = self.record[states], self.step[states], self.visible[states]
        rows = []
        for number, at, seen in zip(record.tolist(), step.tolist(), visible.numpy(), strict=True):
            stored = self.records[number].features
            assert stored is not None
            rows.append(stored.features[at, seen[: stored.features.shape[1]]])
        return CommitInputs(
            records=(),
            record=record,
            step=step,
            visible=visible,
            commit=self.commit[states],
            features=torch.from_numpy(np.concatenate(rows).astype(np.float32)),
        )


@dataclass(eq=False)
class CommitSamples(SampleBuilder):
    """Turns records of :class:`CommitCapture` into samples.

    A sample is a decode, a state one of its steps, and a token one of the step's candidates; of
    decodes that differ in one decision, only that one.
    """

    is_forked: bool = False

    def samples(self, records: Sequence[Trajectory], *, epoch: int = 0) -> RolloutBatch:
        responses = self.responses(records, epoch=epoch)
        length = responses.steps.shape[1]
        tables = [_steps_of(record, length) for record in records]
        hidden, commit, log_odds = (torch.cat(parts) for parts in zip(*tables, strict=True))
        counts = torch.tensor([record.num_steps for record in records])
        candidates = log_odds.isfinite()
        # A step that commits only its best candidate drew it or used the stall rule, and the record
        # does not say which. Together these have the probability that no other candidate is drawn,
        # so the best one is left out of the step's units.
        best = log_odds.masked_fill(~candidates, -torch.inf).argmax(1, keepdim=True)
        is_best = torch.zeros_like(commit).scatter_(1, best, value=True)
        is_alone = (commit == (is_best & candidates)).all(1, keepdim=True)
        scored = candidates & ~(is_best & is_alone)
        step = torch.cat([torch.arange(count) for count in counts.tolist()])
        if self.is_forked:
            changed = torch.tensor([record.meta.get(FORK, (-1, 0)) for record in records])
            at, position = changed.repeat_interleave(counts, 0).T[..., None]
            scored &= (step[:, None] == at) & (torch.arange(length) == position)
        # States without a token add nothing to the loss, and samples are found by their tokens.
        kept = scored.any(1)
        hidden, commit, log_odds, candidates, scored = (
            part[kept] for part in (hidden, commit, log_odds, candidates, scored)
        )
        state, position = scored.nonzero(as_tuple=True)
        record = torch.arange(len(records)).repeat_interleave(counts)[kept]
        taken, sample = record.unique(return_inverse=True)
        tokens = Tokens(
            sample=sample[state],
            response=record[state],
            position=position,
            weight=torch.ones(len(position)),
            kl_weight=torch.ones(len(position)),
            sampled=draw_log_prob(log_odds[scored], commit[scored]),
        )
        return RolloutBatch(
            responses=responses,
            states=States(response=record, hidden=hidden, supervised=scored, sample=sample),
            tokens=tokens,
            spec=self.spec,
            size=torch.ones(len(taken), dtype=torch.float64),
            inputs=CommitInputs(
                records=records,
                record=record,
                step=step[kept],
                visible=hidden & left_of_window_end(hidden, candidates),
                commit=commit,
            ),
        )


def _steps_of(record: Trajectory, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a record's ``(T, G)`` masked cells, commits and log-odds, NaN where no candidate."""
    shape = (record.num_steps, length)
    hidden = np.zeros(shape, dtype=np.bool_)
    commit = np.zeros(shape, dtype=np.bool_)
    log_odds = np.full(shape, np.nan, dtype=np.float32)
    step, position = record.masked_rows().T
    done = record.signals["step_commit"]
    hidden[step, position] = True
    commit[step, position] = done == 1
    log_odds[step, position] = np.where(done < 0, np.nan, record.signals["step_log_odds"])
    return torch.from_numpy(hidden), torch.from_numpy(commit), torch.from_numpy(log_odds)


def draw_log_prob(log_odds: Tensor, commit: Tensor) -> Tensor:
    """Returns ``log Bernoulli(commit; sigmoid(log_odds))`` for tensors of any shape."""
    return F.logsigmoid(torch.where(commit, log_odds, -log_odds))


@dataclass(frozen=True, kw_only=True)
class RolloutWindow:
    """Where rollouts commit, and what they take from earlier forwards."""

    window: Window | None = None
    """By default the whole response, or the model's own blocks if it has block attention."""
    cache: CacheScheme | None = None
    """Nothing by default."""


class TraceLockRLModule(TraceRLModule):
    """Trains the acceptance network of TraceLock on what its decodes are worth.

    The decoder of rollouts draws its commits (``temperature`` of its :class:`TraceLockPolicy`).
    All TraceLock decoders use the weights in training; their own ``path`` is not read.

    Args:
        backbone: the frozen denoiser.
        policy: folder of the policy to start from; ``null`` starts from random weights.
        projector: folder of the projector, for a policy with random weights.
        head: architecture of a policy with random weights.
        settings: inputs of a policy with random weights.
        windows: by name, the windows and caches of rollouts, which RL steps take in turn; each
            replaces those of the decoders. Validation decodes in all of them: ``val/reward`` and
            the like are means, and those of a window begin with ``val/DECODER_NAME/``.
        forks: whether responses to a prompt differ in one decision each, which alone is trained
            (:mod:`lit_dlm.tracelock.forks`), instead of being drawn; ``LessFirst`` is the advantage
            for these.
        constraint: lowers the price of ``ForwardPrice`` while an accuracy of validation is below
            that of the first one; ``null`` leaves it.
        optimizer: constructor of the optimiser.
        common: options of :class:`~lit_dlm.rl.module.TraceRLModule`, except those of states, policy
            loss and value model.
    """

    replays_shards = False
    takes_token_rewards = False  # a token's reward is not that of the commits which led to it

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        policy: str | None = None,
        projector: str | Projector | None = None,
        head: AcceptanceConfig | None = None,
        settings: ScorerSettings | None = None,
        windows: dict[str, RolloutWindow] | None = None,
        forks: bool = False,
        constraint: PriceConstraint | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=5e-4, weight_decay=0.0
        ),
        **common: Any,
    ) -> None:
        # Given here, so no options: commits have no states to draw, no tokens to weigh, no values.
        super().__init__(
            backbone,
            optimizer=optimizer,
            masking=None,
            policy_loss=None,
            value=None,
            value_backbone=None,
            block_alignment=None,
            block_size=None,
            packing=1,
            num_padding=0,
            **common,
        )
        backbone.requires_grad_(False)
        self.scorer = scorer_to_train(backbone, policy, projector, head=head, settings=settings)
        # Records hold the features of masked positions alone.
        one_of("masked", of="settings.", layout=self.scorer.settings.layout)
        self.scorer.eval()
        self.constraint = constraint
        self._priced: ForwardPrice | None = None  # the reward whose price changes
        self._most = 0.0  # what it was at the start
        self._start: dict[str, float] = {}  # accuracies of the first validation, by name
        self.rows = CommitSamples(self.masking, self.row_spec, seed=self.seed, is_forked=forks)
        self.initial = None
        if self.objective.kl_to == "initial":
            self.initial = copy.deepcopy(self.scorer.head).requires_grad_(False)
        # Validation decodes with the weights in training, too, at the threshold of its own decoder.
        for decoder in self.decoders.values():
            if isinstance(decoder.policy, TraceLockPolicy):
                decoder.policy.scorer, decoder.policy.is_in_training = self.scorer, True
        decoder = self.decoders[self.method]
        drawn = self._check_rollouts(decoder)
        if forks:
            one_of(0.0, of="with forks, sampler.", temperature=decoder.sampler.temperature)
            self.online_rollouts = ForkedRollouts
            self.decoders[self.method] = decoder.replace(policy=ForkedPolicy.of(drawn))
        if windows is not None:
            at_least(1, windows=len(windows))
            self.rollout_methods = self._in_windows(windows, self.method)
            each = [self._in_windows(windows, method) for method in self.val_methods]
            self.val_methods = tuple(chain(*each))

    def _in_windows(self, windows: Mapping[str, RolloutWindow], method: str) -> tuple[str, ...]:
        """Adds a decoder for each window, with the other parts of ``method``; returns the names."""
        decoder, spec = self.decoders[method], self.backbone.spec
        for name, one in windows.items():
            try:
                placed = decoder.replace(window=one.window, cache=one.cache).on(spec)
                placed.check(self.backbone)
            except ValueError as error:
                raise ValueError(f"windows.{name}.{error}") from None
            self.decoders[f"{method}_{name}"] = placed
        return tuple(f"{method}_{name}" for name in windows)

    def _check_rollouts(self, decoder: Decoder) -> TraceLockPolicy:
        """Returns the policy of a decoder, whose commits must follow from the draws alone."""
        of = f"{_COMMITS}decoders.{self.method}."
        policy = of_kind(decoder.policy, TraceLockPolicy, option=f"{of}policy")
        within("(0, inf)", of=f"{of}policy.", temperature=policy.temperature)
        within("(0, 1)", of=f"{of}policy.", threshold=policy.commits.threshold)
        # A cap would drop drawn commits; the stall rule's is in what ``CommitSamples`` scores.
        of = f"{of}settings."
        one_of(None, of=of, max_commits_per_step=decoder.settings.max_commits_per_step)
        one_of("top1", of=of, stall_rule=decoder.settings.stall_rule)
        return policy

    def check_objective(self) -> None:
        # Both are about tokens, of which nothing is trained. An initial policy needs no adapter: it
        # is a copy of the network.
        of = f"{_COMMITS}objective."
        one_of(None, of=of, normalise=self.objective.normalise)
        one_of("rollout", of=of, temperature=self.objective.temperature)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.online_rollouts is ForkedRollouts:  # others credit what changed nothing
            of_kind(data.advantage, LessFirst, option="with model.forks, data.advantage")
        if self.constraint is None:
            return
        self._priced = next((one for one in data.rewards if isinstance(one, ForwardPrice)), None)
        if self._priced is None:
            refuse("data.rewards", "ForwardPrice, for a price that changes", "none")
        self._most = self._priced.price
        within("(0, inf)", of="constraint: ForwardPrice.", price=self._most)
        if self.loop.validation is None or "accuracy" not in self.loop.validation.names:
            refuse("constraint", "graded val_tasks, whose accuracy is to hold", "none")

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        priced, validation = self._priced, self.loop.validation
        if self.constraint is None or priced is None or validation is None:
            return
        # Of each window if there are several: their mean could rise while one of them pays.
        each = {k: v for k, v in validation.last.items() if k.endswith("/accuracy")}
        now = each or {"accuracy": validation.last["accuracy"]}
        if self._start and not self.trainer.sanity_checking:
            priced.price = self.constraint.next(priced.price, self._start, now, most=self._most)
        self._start = {**now, **self._start}
        self.log("val/price", priced.price, sync_dist=True)

    def train(self, mode: bool = True) -> TraceLockRLModule:
        super().train(mode)
        self.scorer.eval()  # dropout would turn ratios into noise
        return self

    def rollout_capture(self, method: str) -> TrajectoryCapture:
        policy = self.decoders[method].policy
        if not isinstance(policy, TraceLockPolicy) or not policy.temperature:
            return super().rollout_capture(method)
        return CommitCapture(policy, vocab_size=self.backbone.vocab_size)

    def score(self, batch: RolloutBatch) -> TokenScores:
        return self._drawn(batch, self.scorer.head)

    def _drawn(self, batch: RolloutBatch, head: torch.nn.Module) -> TokenScores:
        hidden, scored, inputs = batch.states.hidden, batch.states.supervised, batch.inputs
        assert isinstance(inputs, CommitInputs)
        assert inputs.features is not None
        states = torch.where(hidden, int(PositionState.GEN), int(PositionState.LOCKED))
        features = inputs.features
        if not reads_are_free(features.device):  # packed rows ask for their number
            dense = features.new_zeros(*inputs.visible.shape, features.shape[1])
            features = dense.index_put(inputs.visible.nonzero(as_tuple=True), features)
        logits = head(features, states, inputs.visible).decision_logits[scored]
        policy = self.decoders[self.method].policy
        assert isinstance(policy, TraceLockPolicy)
        # The temperature of the draws is part of the policy, so it is in the ratios as well.
        log_odds = policy.log_odds(logits)
        log_prob = draw_log_prob(log_odds, inputs.commit[scored])
        entropy = F.softplus(log_odds) - log_odds * log_odds.sigmoid()
        return TokenScores(log_prob, entropy, None)

    @torch.no_grad()
    def reference_log_prob(self, batch: RolloutBatch) -> Tensor:
        assert self.initial is not None
        return self._drawn(batch, self.initial).log_prob

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        drop_backbone(checkpoint)
        if self._priced is not None:
            checkpoint[_PRICE] = {"price": self._priced.price, "start": self._start}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self._priced is not None and _PRICE in checkpoint:
            self._start = dict(checkpoint[_PRICE]["start"])
            self._priced.price = checkpoint[_PRICE]["price"]

    def parameter_groups(self) -> tuple[list[Tensor], list[Tensor]]:
        return list(self.scorer.head.parameters()), []

    def export(self, folder: str | Path) -> None:
        """Writes the policy folder, which every TraceLock decoder loads."""
        tasks = self.trainer.datamodule.tasks if self._trainer else []  # type: ignore[attr-defined]
        before = self.scorer.training_facts.get("tasks", ())
        self.scorer.training_facts = {
            "seed": self.seed,
            "trained_on": "outcomes",
            "tasks": sorted({*before, *(task.name for task in tasks)}),
            "rl_steps": 0 if self._loop is None else self._loop.steps_begun,
        }
        policies = (self.decoders[name].policy for name in (*self.val_methods, self.method))
        policy = next(one for one in policies if isinstance(one, TraceLockPolicy))
        ours, self.scorer.commits = self.scorer.commits, policy.commits
        if self._trainer is None or self.trainer.is_global_zero:
            self.scorer.save(folder)
        self.scorer.commits = ours  # draws may go by it
