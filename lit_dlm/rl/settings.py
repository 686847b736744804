"""Settings of RL: rollouts, policy objective and value model."""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Literal

import torch

from lit_dlm.backbones.base import BackboneSpec
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora_settings import LoRASettings
from lit_dlm.decoding import BlockWindow, Decoder
from lit_dlm.losses.corruption import TraceMasking
from lit_dlm.losses.states import Corruption
from lit_dlm.ops.options import at_least, one_of, within
from lit_dlm.plugs import checked_plug
from lit_dlm.rewards import GroupFilter, Reward
from lit_dlm.rl.advantages import Advantage, StepGAE, as_advantage
from lit_dlm.rl.items import Normalise
from lit_dlm.rl.policy_losses import ClippedPolicyLoss, PolicyLoss
from lit_dlm.tasks import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(ClippedPolicyLoss):
    """The clipped policy loss, and what the log-probabilities are that any policy loss gets."""

    kl_to: Literal["old", "initial"] = "old"
    """The divergence is measured to the policy at the start of the RL step, or to the initial one,
    which is the backbone without its adapter."""
    normalise: Normalise | None = None
    """What sums over tokens are divided by; by default ``group_mean`` for full attention and
    ``max_gen_length`` for block models."""
    old_log_prob: Literal["recompute", "behaviour", "detach"] = "recompute"
    """Where the old log-probabilities come from: the training forward before the first update, the
    sampler's own record (where states, blocks and temperature of training are the sampler's; it
    decodes with merged adapters, so half-precision weights are rounded otherwise), or the current
    forward itself (a ratio of 1, exact for a single update per RL step)."""
    temperature: Literal["rollout"] | float = "rollout"
    """Temperature of the log-probabilities: that of the sampler, or a number (1 in dLLM-RL)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("old", "initial", kl_to=self.kl_to)
        one_of("recompute", "behaviour", "detach", old_log_prob=self.old_log_prob)
        if self.temperature != "rollout" and not float(self.temperature) > 0.0:
            raise ValueError(
                f"temperature: expected 'rollout' or a positive number, got {self.temperature}"
            )

    def loss(self, given: PolicyLoss | None) -> PolicyLoss:
        """The loss that is trained on.

        Args:
            given: a loss that takes the place of the clipped one, if any.
        """
        if given is None:
            return self
        checked_plug(given, PolicyLoss, option="policy_loss")
        unread = [
            one.name for one in fields(ClippedPolicyLoss) if getattr(self, one.name) != one.default
        ]
        if unread:
            raise ValueError(
                f"objective.{unread[0]}: belongs to the clipped loss, which policy_loss "
                f"{type(given).__name__} replaces; set it there or leave it out"
            )
        return given

    def check(
        self,
        backbone: HFBackbone,
        corruption: Corruption,
        *,
        row_spec: BackboneSpec,
        decoder: Decoder,
    ) -> None:
        """Tells whether it can be pursued with a policy and its training states.

        Args:
            backbone: the policy.
            corruption: the states.
            row_spec: of training rows.
            decoder: that of rollouts.
        """
        if backbone.adapter is not None and backbone.adapter.dropout:
            raise ValueError(
                "backbone.lora.dropout: expected 0, since probabilities of two forwards are "
                f"compared, got {backbone.adapter.dropout}"
            )
        if self.kl_to == "initial" and backbone.adapter is None:
            raise ValueError(
                "objective.kl_to: 'initial' is the backbone without its adapter, but it has none; "
                "give it lora settings or use 'old'"
            )
        vision = backbone.vision
        if self.kl_to == "initial" and vision is not None and vision.settings.train != "none":
            raise ValueError(
                "objective.kl_to: 'initial' needs vision.train: none, since what is trained of it "
                "is not kept as it was; use 'old'"
            )
        if self.old_log_prob == "behaviour":
            self._check_behaviour(corruption, backbone.spec, row_spec, decoder)

    def _check_behaviour(
        self, corruption: Corruption, spec: BackboneSpec, row_spec: BackboneSpec, decoder: Decoder
    ) -> None:
        """Refuses training forwards that differ from the sampler's."""
        states = type(corruption).__name__
        if isinstance(corruption, TraceMasking):
            states += f" with shrink {corruption.shrink} and padding '{corruption.padding}'"
        wanted_states = "TraceMasking with shrink 1 and padding 'replayed'"
        temperature = decoder.sampler.temperature or 1.0  # a greedy record is the model's own
        own = temperature if self.temperature == "rollout" else float(self.temperature)
        window, blocks = decoder.window, "no blocks"
        if isinstance(window, BlockWindow):
            blocks = _blocks(window.block_length, window.origin)
        wanted_blocks = _blocks(spec.block_size, spec.block_origin)
        row_blocks = _blocks(row_spec.block_size, row_spec.block_origin)
        is_block = spec.attention == "block"
        for is_met, option, wanted, got in (
            (states == wanted_states, "corruption", wanted_states, states),
            (own == temperature, "objective.temperature", f"the sampler's {temperature}", own),
            (
                not is_block or row_blocks == wanted_blocks,
                "block_size, block_alignment",
                wanted_blocks,
                row_blocks,
            ),
            (not is_block or blocks == wanted_blocks, "decoder's window", wanted_blocks, blocks),
        ):
            if not is_met:
                raise ValueError(
                    "objective.old_log_prob: 'behaviour' is the probability in the state that the "
                    f"sampler saw, which needs {option}: {wanted}, got {got}; use 'recompute'"
                )


def _blocks(size: int | None, origin: str) -> str:
    return f"blocks of {size} from the {origin}"


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """The diffusion value model: values of tokens just before they are written."""

    backbone: Literal["lora", "full", "head"] = "lora"
    """What the value head reads: the policy's frozen weights with an adapter of their own, a second
    model (``value_backbone``, as in dLLM-RL), or the policy's hidden rows as they are."""
    lora: LoRASettings = field(default_factory=LoRASettings)
    """Shape of that adapter."""
    gamma: float = 1.0
    """Discount per step."""
    lam: float = 1.0
    """Weight of longer advantage estimates."""
    shrink: int | None = None
    """Consecutive steps that count as one in returns and advantages; as many as in the states that
    are trained on by default, 1 where these are not of traces."""
    clip: float = 0.2
    """How far a value may move in one RL step before its gradient is cut."""
    lr: float = 5e-6
    """Learning rate of the value parameters."""
    train_every: int = 1
    """The values are trained in every so many RL steps."""

    def __post_init__(self) -> None:
        one_of("lora", "full", "head", of="value.", backbone=self.backbone)
        within("[0, 1]", of="value.", gamma=self.gamma, lam=self.lam)
        at_least(1, of="value.", shrink=self.shrink, train_every=self.train_every)
        if self.clip <= 0.0 or self.lr < 0.0:
            raise ValueError(
                f"value.clip, value.lr: expected positive numbers, got {self.clip}, {self.lr}"
            )
        if self.lora.dropout:
            raise ValueError("value.lora.dropout: expected 0, values of two forwards are compared")

    @property
    def estimator(self) -> StepGAE:
        """Returns and advantages from values."""
        return StepGAE(self.gamma, self.lam)

    def trace(self, corruption: Corruption) -> TraceMasking:
        """The states whose values make returns and advantages.

        Args:
            corruption: the states that are trained on.
        """
        shrink = self.shrink
        if shrink is None:
            shrink = corruption.shrink if isinstance(corruption, TraceMasking) else 1
        return TraceMasking(shrink=shrink, padding="replayed")

    def needs_whole_trace(self, corruption: Corruption) -> bool:
        """Whether advantages take values of more states than those that are trained on.

        With ``gamma = lam = 1`` the values of later steps cancel, and a token's advantage is its
        return less its own value; so a cap on the rows of a response caps the values as well.

        Args:
            corruption: the states that are trained on.
        """
        return not (
            self.gamma == self.lam == 1.0
            and isinstance(corruption, TraceMasking)
            and corruption.rows_per_sample is not None
            and corruption.padding == "replayed"
            and corruption.shrink == self.trace(corruption).shrink
        )


@dataclass(eq=False, repr=False)
class RolloutSettings:
    """Options of ``RolloutDataModule``: what is rolled out, rewarded, filtered and trained on.

    Set ``trainer.max_epochs`` to the number of RL steps, each of which is an epoch.

    Args:
        tasks: training prompts.
        rewards: what responses are worth; with ``source: shards`` only used in validation.
        source: ``online`` rolls out, ``shards`` replays a folder that ``RolloutWriter`` wrote, with
            the groups that were kept; settings of new rollouts are not read then, with a warning.
        shards: that folder.
        val_tasks: held-out prompts; none by default.
        prompts_per_step: prompts of an RL step.
        responses_per_prompt: responses to each.
        response_length: cells of every response.
        max_prompt_length: prompts with more tokens are left out.
        rollout_batch_size: responses decoded together.
        batch_size: training items per batch and process; rows that are packed are one.
        max_tokens_per_batch: cuts the items of an update into batches of similar lengths with at
            most so many tokens, padding included, instead of ``batch_size`` items each, which then
            only says how many an update has. An item with more is a batch of its own.
        rows_per_update: most rows of one update over all processes, from which the trainer's
            ``accumulate_grad_batches`` follows for any number of them; ``null`` leaves it alone.
        filters: groups that one of them drops are not trained on.
        max_rollout_rounds: rounds of rollouts per RL step; from the second on dropped groups are
            made up for by new prompts.
        overlong_is_wrong: scores truncated training responses as incorrect without grading.
        overlong_margin: so many cells short of the budget count as truncated, too (5 in dLLM-RL).
        advantage: turns the rewards of a prompt's responses into advantages: ``GroupZScore``,
            ``LeaveOneOut``, ``RawReward``, or a class of one's own by its import path. The names
            ``group_zscore``, ``leave_one_out`` and ``none`` stand for the first three.
        passes: passes over the items of an RL step, each in updates of its own; random states are
            drawn anew in each.
        val_responses: responses to each held-out prompt.
        val_response_length: cells of those; as many as in training by default.
        smoothing: weight of the past in ``rollout/reward_smoothed``.
        num_workers: threads that grade.
        require_isolation: the least that model-written code must run in: ``namespaces``, or
            ``landlock`` where there are none (SECURITY.md).
        seed: seed of the order of prompts and items.
    """

    tasks: list[Task]
    _: KW_ONLY
    rewards: list[Reward]
    source: Literal["online", "shards"] = "online"
    shards: str | None = None
    val_tasks: list[Task] | None = None
    prompts_per_step: int = 64
    responses_per_prompt: int = 16
    response_length: int = 256
    max_prompt_length: int = 784
    rollout_batch_size: int = 64
    batch_size: int = 8
    max_tokens_per_batch: int | None = None
    rows_per_update: int | None = None
    filters: list[GroupFilter] | None = None
    max_rollout_rounds: int = 1
    overlong_is_wrong: bool = True
    overlong_margin: int = 0
    advantage: Advantage | str = "group_zscore"
    passes: int = 1
    val_responses: int = 1
    val_response_length: int | None = None
    smoothing: float = 0.9
    num_workers: int = 1
    require_isolation: Literal["namespaces", "landlock"] = "namespaces"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        one_of("online", "shards", source=self.source)
        if (self.source == "shards") != (self.shards is not None):
            raise ValueError(
                "shards: needed with source 'shards' and only there, "
                f"got {self.shards!r} with {self.source!r}"
            )
        if not self.tasks:
            raise ValueError("tasks: expected at least one task, got none")
        self.val_tasks, self.filters = self.val_tasks or [], self.filters or []
        for one in self.filters:
            checked_plug(one, GroupFilter, option="filters")
        if self.val_response_length is None:
            self.val_response_length = self.response_length
        at_least(1, **{name: getattr(self, name) for name in _POSITIVE})
        self.advantage = as_advantage(self.advantage)
        alone = self.source == "online" and self.responses_per_prompt == 1
        if alone and not self.advantage.compute(torch.ones(1)).any():
            raise ValueError(
                "responses_per_prompt: expected at least 2 with advantage "
                f"{type(self.advantage).__name__}, which compares the responses to a prompt and "
                "gives 0 to one alone, got 1; use RawReward"
            )
        within("[0, 1)", smoothing=self.smoothing)

    def warn_of_unread(self) -> None:
        """Names the settings of new rollouts that are set, though stored ones are trained on."""
        defaults = {one.name: one.default for one in fields(RolloutSettings)}
        given = [
            name for name in _OF_NEW_ROLLOUTS if getattr(self, name) not in (defaults[name], [])
        ]
        if given:
            logger.warning(
                "source 'shards' takes rewards and kept groups as they are stored in %s: not read "
                "are the settings %s",
                self.shards,
                ", ".join(given),
            )


_POSITIVE = (
    "prompts_per_step",
    "responses_per_prompt",
    "response_length",
    "max_prompt_length",
    "rollout_batch_size",
    "batch_size",
    "max_rollout_rounds",
    "passes",
    "val_responses",
    "val_response_length",
)
_OF_NEW_ROLLOUTS = (
    "prompts_per_step",
    "responses_per_prompt",
    "filters",
    "max_rollout_rounds",
    "overlong_is_wrong",
    "overlong_margin",
)
