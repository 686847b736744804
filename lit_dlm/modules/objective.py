"""Settings of policy and value objectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lit_dlm.backbones.base import BackboneSpec
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.decoding import BlockWindow, Decoder
from lit_dlm.losses.actor import KLEstimator
from lit_dlm.losses.corruption import TraceMasking
from lit_dlm.losses.states import Corruption
from lit_dlm.modules.rollout_items import Normalise


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """The clipped policy objective (TraceRL, arXiv:2509.06949)."""

    clip_low: float = 0.2
    """How far a ratio of probabilities may fall before its gradient is cut."""
    clip_high: float | None = None
    """How far it may rise; ``clip_low`` by default."""
    beta: float = 0.01
    """Weight of the divergence."""
    kl: KLEstimator = "k3"
    """Estimator of the divergence: ``k3``, or ``k1`` for the difference of log-probabilities."""
    kl_to: Literal["old", "initial"] = "old"
    """Measured to the policy at the start of the RL step, or to the initial one, which is the
    backbone without its adapter."""
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
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low: expected a number in [0, 1], got {self.clip_low}")
        if self.clip_high is not None and self.clip_high < 0.0:
            raise ValueError(f"clip_high: expected 0 or more, got {self.clip_high}")
        if self.beta < 0.0:
            raise ValueError(f"beta: expected 0 or more, got {self.beta}")
        for name, known in (
            ("kl", ("k3", "k1")),
            ("kl_to", ("old", "initial")),
            ("old_log_prob", ("recompute", "behaviour", "detach")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if self.temperature != "rollout" and not float(self.temperature) > 0.0:
            raise ValueError(
                f"temperature: expected 'rollout' or a positive number, got {self.temperature}"
            )

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

        Raises:
            ValueError: it cannot.
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
        if self.backbone not in ("lora", "full", "head"):
            raise ValueError(
                f"value.backbone: expected 'lora', 'full' or 'head', got {self.backbone!r}"
            )
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(
                    f"value.{name}: expected a number in [0, 1], got {getattr(self, name)}"
                )
        for name in ("shrink", "train_every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"value.{name}: expected at least 1, got {number}")
        if self.clip <= 0.0 or self.lr < 0.0:
            raise ValueError(
                f"value.clip, value.lr: expected positive numbers, got {self.clip}, {self.lr}"
            )
        if self.lora.dropout:
            raise ValueError("value.lora.dropout: expected 0, values of two forwards are compared")

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
