"""Settings of RL: rollouts, policy objective and value model."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Literal

import torch

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.config.components import checked_component
from lit_dlm.rewards import GroupFilter, Reward
from lit_dlm.rl.advantages import Advantage, GroupZScore
from lit_dlm.rl.batch import Normalise
from lit_dlm.rl.engine import RolloutEngine
from lit_dlm.rl.policy_losses import ClippedPolicyLoss, PolicyLoss
from lit_dlm.system.options import at_least, refuse_first, within
from lit_dlm.tasks import Task
from lit_dlm.training.masking import TraceMasking
from lit_dlm.training.states import Masking


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(ClippedPolicyLoss):
    """The clipped policy loss, and which log-probabilities any policy loss gets."""

    kl_to: Literal["old", "initial"] = "old"
    """The divergence is that from the policy at the start of the RL step, or from the initial one,
    which is the backbone without its adapter."""
    normalise: Normalise | None = None
    """What sums over tokens are divided by; by default ``group_mean`` for full attention and
    ``max_gen_length`` for block models."""
    temperature: Literal["rollout"] | float = "rollout"
    """Temperature of the log-probabilities: that of the sampler, or a number (1 in dLLM-RL)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != "rollout":
            within("(0, inf)", temperature=float(self.temperature))

    def loss(self, given: PolicyLoss | None, masking: Masking) -> PolicyLoss:
        """Returns the loss to train on: ``given``, or else this clipped one."""
        if given is None:
            is_idle = self.kl_to == "initial" and not self.beta
            refuse_first(
                (is_idle, "objective.kl_to: 'initial' has no effect with objective.beta 0")
            )
            return self
        checked_component(given, PolicyLoss, option="policy_loss")
        name = type(given).__name__
        refuse_first(
            *(
                (
                    getattr(self, one.name) != one.default,
                    f"objective.{one.name}: belongs to the clipped loss, which policy_loss {name} "
                    "replaces; set it there or leave it out",
                )
                for one in fields(ClippedPolicyLoss)
            ),
            (
                given.needs_bounds and not masking.scores_responses,
                f"masking: expected BoundViews or DecodedViews with {name}, which compares whole "
                f"responses, got {type(masking).__name__}",
            ),
            (
                not given.has_divergence and self.kl_to != "old",
                f"objective.kl_to: has no effect with policy_loss {name}, which has no divergence; "
                f"expected it left out, got {self.kl_to!r}",
            ),
        )
        return given

    def check(self, backbone: HFBackbone) -> None:
        """Refuses an objective that a policy cannot be trained with."""
        adapter, vision = backbone.adapter, backbone.vision
        dropout = 0.0 if adapter is None else adapter.dropout
        is_initial = self.kl_to == "initial"
        refuse_first(
            (
                dropout,
                "backbone.lora.dropout: expected 0, since probabilities of two forwards are "
                f"compared, got {dropout}",
            ),
            (
                is_initial and adapter is None,
                "objective.kl_to: 'initial' is the backbone without its adapter, but it has none; "
                "give it lora settings or use 'old'",
            ),
            (
                is_initial and vision is not None and vision.settings.train != "none",
                "objective.kl_to: 'initial' needs vision.train: none, since what is trained of it "
                "is not kept as it was; use 'old'",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """The diffusion value model: values of tokens just before they are written."""

    backbone: Literal["lora", "full", "head"] = "lora"
    """What the value head reads: the policy's frozen weights with a separate adapter, a second
    model (``value_backbone``, as in dLLM-RL), or the hidden states of the policy itself."""
    lora: LoRASettings = field(default_factory=LoRASettings)
    """Shape of that adapter."""
    gamma: float = 1.0
    """Discount per step."""
    lam: float = 1.0
    """Weight of longer advantage estimates."""
    clip: float = 0.2
    """How far a value may move in one RL step before its gradient is cut."""
    lr: float = 5e-6
    """Learning rate of the value parameters."""

    def __post_init__(self) -> None:
        within("[0, 1]", of="value.", gamma=self.gamma, lam=self.lam)
        within("(0, inf)", of="value.", clip=self.clip)
        within("[0, 0]", of="value.lora.", dropout=self.lora.dropout)  # two forwards are compared
        at_least(0, of="value.", lr=self.lr)

    def trace(self, masking: Masking) -> TraceMasking:
        """Returns the states whose values make returns and advantages.

        ``shrink`` is that of the traces that are trained on, or 1 where other states are.
        """
        shrink = masking.shrink if isinstance(masking, TraceMasking) else 1
        return TraceMasking(shrink=shrink, padding="replayed")

    def needs_whole_trace(self, masking: Masking) -> bool:
        """Whether advantages need the values of more states than those that are trained on.

        With ``gamma = lam = 1`` the values of later steps cancel, and a token's advantage is its
        return less its own value; a cap on the rows of a response then caps the values as well.
        """
        return not (
            self.gamma == self.lam == 1.0
            and isinstance(masking, TraceMasking)
            and masking.rows_per_sample is not None
            and masking.padding == "replayed"
        )


@dataclass(eq=False, repr=False)
class RolloutSettings:
    """Options of ``RolloutDataModule``: what is rolled out, rewarded, filtered and trained on.

    Set ``trainer.max_epochs`` to the number of RL steps, each of which is an epoch.

    Args:
        tasks: training prompts.
        rewards: what responses are worth; with ``source: shards`` only used in validation.
        source: ``online`` rolls out; ``shards`` replays a folder that ``RolloutWriter`` wrote, with
            the groups that were kept then, and does not read the settings of new rollouts.
        shards: that folder.
        engine: rolls out instead of the module's decoder: ``RolloutFiles``, or one of your own by
            its import path. Validation still decodes here.
        val_tasks: held-out prompts; none by default.
        prompts_per_step: prompts of an RL step.
        responses_per_prompt: responses to each prompt.
        response_length: positions of every response.
        max_prompt_length: prompts with more tokens are left out, as are those that do not fit the
            model's positions beside their response.
        rollout_batch_size: responses decoded together.
        batch_size: training samples per batch and process; a packed row is one sample.
        rows_per_update: most rows of one update over all processes, from which the trainer's
            ``accumulate_grad_batches`` follows; ``null`` leaves that unchanged.
        filters: groups that one of them drops are not trained on.
        overlong_is_wrong: scores truncated training responses as incorrect without grading.
        overlong_margin: a response whose end of text is this close to the budget, in positions,
            counts as truncated (5 in dLLM-RL).
        advantage: compares a prompt's responses; ``GroupZScore`` by default.
        passes: passes over the samples, each in its own updates; random states differ.
        val_responses: responses to each held-out prompt.
        val_response_length: positions of those responses; as many as in training by default.
        num_workers: threads that grade.
        require_isolation: weakest isolation that model-written code may run in: ``namespaces``, or
            ``landlock`` where there are none (SECURITY.md).
        seed: seed of the order of prompts and samples.
    """

    tasks: list[Task]
    _: KW_ONLY
    rewards: list[Reward]
    source: Literal["online", "shards"] = "online"
    shards: str | None = None
    engine: RolloutEngine | None = None
    val_tasks: list[Task] | None = None
    prompts_per_step: int = 64
    responses_per_prompt: int = 16
    response_length: int = 256
    max_prompt_length: int = 784
    rollout_batch_size: int = 64
    batch_size: int = 8
    rows_per_update: int | None = None
    filters: list[GroupFilter] | None = None
    overlong_is_wrong: bool = True
    overlong_margin: int = 0
    advantage: Advantage | None = None
    passes: int = 1
    val_responses: int = 1
    val_response_length: int | None = None
    num_workers: int = 1
    require_isolation: Literal["namespaces", "landlock"] = "namespaces"
    seed: int = 0

    def __post_init__(self) -> None:
        self.val_tasks, self.filters = self.val_tasks or [], self.filters or []
        for reward in self.rewards:
            checked_component(reward, Reward, option="rewards")
        for one in self.filters:
            checked_component(one, GroupFilter, option="filters")
        if self.engine is not None:
            checked_component(self.engine, RolloutEngine, option="engine")
        self.advantage = checked_component(
            self.advantage or GroupZScore(), Advantage, option="advantage"
        )
        at_least(1, tasks=len(self.tasks), **{name: getattr(self, name) for name in _POSITIVE})
        within(f"[0, {self.response_length})", overlong_margin=self.overlong_margin)
        is_alone = self.source == "online" and self.responses_per_prompt == 1
        refuse_first(
            (
                (self.source == "shards") != (self.shards is not None),
                "shards: needed with source 'shards' and only there, got "
                f"{self.shards!r} with {self.source!r}",
            ),
            (
                self.source == "shards" and self.engine is not None,
                "engine: rolls out only with source 'online', got source 'shards'",
            ),
            (
                is_alone and not self.advantage.compute(torch.ones(1)).any(),
                "responses_per_prompt: expected at least 2 with advantage "
                f"{type(self.advantage).__name__}, which compares the responses to a prompt and "
                "gives 0 to one alone, got 1; use RawReward",
            ),
        )


_POSITIVE = (
    "prompts_per_step",
    "responses_per_prompt",
    "response_length",
    "max_prompt_length",
    "rollout_batch_size",
    "batch_size",
    "passes",
    "val_responses",
    "val_response_length",
)
