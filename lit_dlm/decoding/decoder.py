"""A decoder: one choice of every component, ready to be named in a configuration.

A :class:`Sweep` is one decoder and a list of values, the points of an accuracy-steps curve: a sweep
``threshold`` of ``policy.threshold`` over 0.5 and 0.7 gives the methods ``threshold_05`` and
``threshold_07``, which reports draw as one curve.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from lit_dlm.backbones.base import Backbone, BackboneSpec
from lit_dlm.config.components import checked_component
from lit_dlm.decoding.caches import CacheScheme, CacheSession, Forwards, NoCache
from lit_dlm.decoding.guidance import Guidance, GuidedBackbone
from lit_dlm.decoding.layout import Layout
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.quotas import FixedQuota, Quota
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import Canvas, DecodeState, initial_state
from lit_dlm.decoding.windows import FullWindow, Window, check_window, default_window
from lit_dlm.system.options import at_least, refuse
from lit_dlm.tensors.batches import row_index


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Rules of the loop: step budget, end of the text, stall rule. Recorded with every result."""

    max_steps: int | None = None
    """Most steps that a row may take; ``None``: one per mask, or as many as the window has or a
    policy that takes tokens back may need."""
    stall_rule: Literal["top1", "idle"] = "top1"
    """For a row without a commit: ``top1`` commits its best-scored candidate, ``idle`` commits
    nothing in this step (some releases then stop at the budget with masks left)."""
    eos_rule: Literal["none", "stop", "fill"] = "none"
    """Once an end of text is committed and no mask precedes it: ``stop`` ends the row and keeps the
    masks after it, ``fill`` ends the row and fills them with end of text, ``none`` continues. With
    prefilled cells, only an end of text behind all of them counts."""
    eos_gate: bool = False
    """Until a row holds an end of text, commit one only when all its candidates propose one; not
    for the first cell of a block that only the refresh of a cache predicts (right shift)."""
    max_commits_per_step: int | None = None
    """Cap on the commits of a row in one step; those that the policy scores best are kept."""

    def __post_init__(self) -> None:
        at_least(1, max_steps=self.max_steps, max_commits_per_step=self.max_commits_per_step)
        if self.stall_rule == "idle" and self.max_steps is None:
            raise ValueError("max_steps: expected a number with stall_rule 'idle', got None")


# No dataclass: in fields of one the parser would replace references too early.
class Decoder:
    """The parts of one decoding method; :meth:`replace` gives one with others.

    Args:
        policy: which proposals become final.
        window: where a step may commit; by default the whole response, or the model's own
            blocks if it has block attention.
        quota: how many cells it commits; one per step by default.
        sampler: which tokens are proposed; the most probable ones by default.
        cache: what steps take from earlier forwards; nothing by default.
        settings: rules of the loop.
        layout: named regions of the response and the template that it starts from; lockstep
            policies need one, any other policy may have one.
        guidance: away from what the model would write without the prompt; excludes a cache.
    """

    def __init__(
        self,
        *,
        policy: CommitPolicy,
        window: Window | None = None,
        quota: Quota | None = None,
        sampler: Sampler | None = None,
        cache: CacheScheme | None = None,
        settings: DecodeSettings | None = None,
        layout: Layout | None = None,
        guidance: Guidance | None = None,
    ) -> None:
        self.policy = checked_component(policy, CommitPolicy, option="policy")
        self.window = window and checked_component(window, Window, option="window")
        self.quota = checked_component(quota or _ONE_PER_STEP, Quota, option="quota")
        self.sampler = sampler or Sampler()
        self.cache = checked_component(cache or NoCache(), CacheScheme, option="cache")
        self.settings = settings or DecodeSettings()
        self.layout = layout and checked_component(layout, Layout, option="layout")
        self.guidance = guidance
        # All parts are known now: what does not go together is told before a model is loaded.
        for conflict in self._conflicts():
            raise ValueError(conflict)

    def _conflicts(self) -> Iterator[str]:
        """Says which parts do not go together: the option, what was expected, what it got."""
        policy, quota, layout = self.policy, self.quota, self.layout
        name = type(policy).__name__
        if policy.needs_layout and layout is None:
            yield f"layout: {name} needs one, got none"
        if policy.needs_quota and not quota.is_given:
            yield f"quota: {name} needs one, got none"
        # By identity: whoever names FixedQuota requests one, even with the default's number.
        # A policy that decides alone goes with the default quota, not with one that was requested.
        if not policy.takes_quota and quota.is_given and quota is not _ONE_PER_STEP:
            expected = f"expected NoQuota, got {type(quota).__name__}"
            yield f"quota: {name} decides alone, {expected}"
        if policy.denoise is not None:
            cache = self.cache if self.cache.keeps else None
            for part, beside in (("cache", cache), ("guidance", self.guidance)):
                if beside is not None:
                    expected = f"which runs columns of its own, got {type(beside).__name__}"
                    yield f"{part}: expected none with {name}, {expected}"
        if self.guidance is not None and self.cache.keeps:
            yield f"guidance: expected no cache beside it, got {type(self.cache).__name__}"
        if layout is not None and layout.ends_by_region and self.settings.eos_rule != "none":
            yield (
                f"settings.eos_rule: expected 'none' with {type(layout).__name__}, where an end of "
                f"text ends a region and not the response, got {self.settings.eos_rule!r}"
            )

    @property
    def parts(self) -> dict[str, Any]:
        """All parts by name; ``None`` where there is none."""
        return {name: getattr(self, name) for name in (*COMPONENTS, "settings", "guidance")}

    def replace(self, **parts: Any) -> Decoder:
        """Returns a decoder with other parts by name, and with the same ones otherwise."""
        return Decoder(**{**self.parts, **parts})

    @property
    def draws(self) -> bool:
        """Whether another seed can give another response."""
        return self.sampler.temperature > 0.0 or self.policy.draws

    @property
    def graph_safe(self) -> bool:
        """Whether a whole step may be a CUDA graph, and not only its forward."""
        parts = (self.policy, self.window, self.quota)
        return all(one is None or one.graph_safe for one in parts) and not self.sampler.is_filtered

    def budget(self, num_masks: int) -> int:
        """Returns the most steps of a row with so many masks."""
        budget = self.policy.budget(num_masks)
        if self.window is not None:
            budget = max(budget, self.window.steps)
        return self.settings.max_steps or budget

    def begin(self, backbone: Backbone, canvas: Canvas) -> DecodeState:
        """Returns the state of a canvas before step 0, with the template of the layout."""
        if self.layout is not None:
            canvas = self.layout.on(canvas, mask_id=backbone.spec.mask_id)
        state = initial_state(backbone.spec, canvas)
        # On the host, once for each row: a policy's budget is ordinary Python.
        budgets = [self.budget(number) for number in state.masked.sum(1).tolist()]
        dtype = getattr(torch, self.sampler.score_dtype)
        return replace(
            state,
            budget=row_index(budgets, state.ids.device),
            memory=self.policy.new_memory(state, backbone.vocab_size, dtype),
        )

    def forwards(
        self, backbone: Backbone, state: DecodeState, hidden_layers: tuple[int, ...]
    ) -> Forwards:
        """Starts the forwards of a decode from its state before step 0."""
        assert self.window is not None  # see on()
        if not self.cache.keeps:
            return Forwards(backbone, self.policy, hidden_layers)
        parts = (self.cache, self.window, self.policy)
        return CacheSession(backbone, state, *parts, hidden_layers)

    def guided(self, backbone: Backbone) -> Backbone:
        return backbone if self.guidance is None else GuidedBackbone(backbone, self.guidance)

    def check(self, backbone: Backbone) -> None:
        """Reads a learned policy from disk, and refuses what does not fit the backbone."""
        window, allowed = self.window or default_window(backbone.spec), self.sampler.allowed_ids
        check_window(window, backbone.spec)
        if allowed is not None and allowed[1] > backbone.vocab_size:
            refuse("sampler.allowed_ids", f"ids of the model's {backbone.vocab_size}", allowed)
        self.quota.check(window)
        if self.cache.keeps:
            self.cache.check(backbone, window)
        if self.policy.takes_back and self.cache.commits_first and backbone.spec.shift:
            raise ValueError(
                f"cache: {type(self.cache).__name__} predicts the first cell of a block only where "
                f"it is refreshed, so {type(self.policy).__name__} could not write that cell again "
                f"in a model with a right shift; expected NoCache"
            )
        self.policy.check_backbone(backbone)

    def on(self, spec: BackboneSpec) -> Decoder:
        """Returns the decoder, with the model's own window if it was given none."""
        return self if self.window is not None else self.replace(window=default_window(spec))

    def encoded(self, encode: Callable[[str], list[int]]) -> Decoder:
        """Returns the decoder with the text markers of its layout encoded as token ids."""
        return self if self.layout is None else self.replace(layout=self.layout.encoded(encode))

    def describe(self) -> dict[str, Any]:
        """Returns all settings as JSON types: of each part its ``describe()`` or its attributes.

        Cache, layout and guidance are listed only where there is one.
        """
        components = {name: getattr(self, name) for name in COMPONENTS}
        components["window"] = self.window or FullWindow()
        if not self.cache.keeps:
            del components["cache"]
        return {
            **{name: _describe(one) for name, one in components.items() if one is not None},
            **({} if self.guidance is None else {"guidance": asdict(self.guidance)}),
            "settings": asdict(self.settings),
        }


def _describe(component: object) -> dict[str, Any]:
    """Returns a component's class and settings: our classes by bare name, others by import path."""
    settings = getattr(component, "describe", lambda: _settings(component))()
    cls = type(component)
    is_ours = cls.__module__.split(".")[0] == __name__.split(".")[0]
    name = cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"
    # Whoever reads a record rebuilds its decoder: nothing may be left out silently.
    for key, value in settings.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(
                f"{name}.{key}: records cannot hold a {type(value).__name__}; name it _{key}, or "
                "give the class a method describe()"
            ) from None
    return {"name": name, **settings}


def _settings(component: object) -> dict[str, Any]:
    """Returns the public attributes of a component, under the names of its constructor."""
    return {key: value for key, value in vars(component).items() if not key.startswith("_")}


COMPONENTS: dict[str, type] = {
    "policy": CommitPolicy,
    "window": Window,
    "quota": Quota,
    "sampler": Sampler,
    "cache": CacheScheme,
    "layout": Layout,
}
"""The base class of each component."""
_ONE_PER_STEP = FixedQuota()


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A decoder and the values of one of its options."""

    decoder: Decoder
    """What all points share."""
    option: str
    """Such as ``policy.threshold``, ``window.width`` or ``settings.max_steps``."""
    values: list[int | float | str | None]
    """One point each."""


def method_name(name: str, value: int | float | str | None) -> str:
    """Returns the name of a sweep's point: ``threshold_095`` for 0.95; flags cannot take dots."""
    return f"{name}_{'none' if value is None else value}".replace(".", "")


def expanded(decoders: Mapping[str, Decoder], sweep: Mapping[str, Sweep]) -> dict[str, Decoder]:
    """Returns all decoders by name: the given ones, then the points of the sweeps."""
    result = dict(decoders)
    for name, one in sweep.items():
        points = {
            method_name(name, value): with_option(one.decoder, one.option, value)
            for value in one.values
        }
        # Result files are named after decoders: two of one name would overwrite each other.
        if twice := sorted(result.keys() & points.keys()):
            raise ValueError(f"sweep.{name}: there is a decoder named '{twice[0]}' already")
        if len(points) < len(one.values):
            wanted = "values with names of their own, which have no dot"
            refuse(f"sweep.{name}", wanted, f"{one.values} for {', '.join(points)}")
        result |= points
    return result


def with_option(decoder: Decoder, option: str, value: Any) -> Decoder:
    """Returns a copy with another value of ``{component}.{option}``; the others are shared."""
    part, _, name = option.partition(".")
    component: Any = getattr(decoder, part) if part in (*COMPONENTS, "settings") else None
    arguments: dict[str, Any] = {}
    if component is not None:
        parameters = inspect.signature(type(component)).parameters
        arguments = {key: one for key, one in _settings(component).items() if key in parameters}
    if name not in arguments:
        raise ValueError(
            f"sweep.option: {option!r} is unknown; expected {'|'.join(COMPONENTS)}|settings and of "
            f"{part} one of: {', '.join(arguments) or 'none'}"
        )
    # Made anew, so that the constructor checks the value.
    return decoder.replace(**{part: type(component)(**{**arguments, name: value})})
