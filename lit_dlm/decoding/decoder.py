"""A decoder: one choice of every plug, ready to be named in a configuration.

A :class:`Sweep` is one decoder and a list of values, the points of an accuracy-steps curve: a sweep
``threshold`` of ``policy.threshold`` over 0.5 and 0.7 gives the methods ``threshold_05`` and
``threshold_07``, which reports draw as one curve.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from lit_dlm.backbones.base import Backbone, BackboneSpec
from lit_dlm.config.components import checked_component
from lit_dlm.decoding.caches import CacheScheme, NoCache
from lit_dlm.decoding.guidance import Guidance, GuidedBackbone
from lit_dlm.decoding.layout import Layout, MarkerLayout, TemplateLayout
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import Canvas, DecodeState, initial_state
from lit_dlm.decoding.windows import (
    BlockWindow,
    BudgetQuota,
    CosineQuota,
    EvenQuota,
    FixedQuota,
    FullWindow,
    NoQuota,
    Quota,
    ScheduleQuota,
    SlidingWindow,
    Window,
    check_window,
    default_window,
)
from lit_dlm.ops.batches import row_index
from lit_dlm.ops.options import at_least


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
    given cells, only an end of text behind all of them counts."""
    eos_gate: bool = False
    """Until a row holds an end of text, commit one only when all its candidates propose one; not
    for the first cell of a block that only the refresh of a cache predicts (right shift)."""
    max_commits_per_step: int | None = None
    """Cap on the commits of a row in one step; those that the policy scores best are kept."""

    def __post_init__(self) -> None:
        at_least(1, max_steps=self.max_steps, max_commits_per_step=self.max_commits_per_step)
        if self.stall_rule == "idle" and self.max_steps is None:
            raise ValueError("max_steps: expected a number with stall_rule 'idle', got None")


class Decoder:
    """The plugs of one decoding method.

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
        self._has_window = window is not None
        self.window = checked_component(window or FullWindow(), Window, option="window")
        self.quota = checked_component(quota or FixedQuota(), Quota, option="quota")
        self.sampler = sampler or Sampler()
        self.cache = checked_component(cache or NoCache(), CacheScheme, option="cache")
        self.settings = settings or DecodeSettings()
        self.layout = layout and checked_component(layout, Layout, option="layout")
        self.guidance = guidance
        self._check_policy()
        if guidance is not None and not isinstance(self.cache, NoCache):
            raise ValueError(
                f"guidance: expected no cache beside it, got {type(self.cache).__name__}"
            )
        if not isinstance(quota, NoQuota | None) and not self.policy.takes_quota:
            raise ValueError(
                f"quota: {type(policy).__name__} decides alone, expected NoQuota, got "
                f"{type(quota).__name__}"
            )
        if isinstance(layout, TemplateLayout | MarkerLayout) and self.settings.eos_rule != "none":
            raise ValueError(
                f"settings.eos_rule: expected 'none' with {type(layout).__name__}, where an end of "
                f"text ends a region and not the response, got {self.settings.eos_rule!r}"
            )

    def _check_policy(self) -> None:
        """Refuses a policy without what it needs, or beside what its own forward excludes."""
        name = type(self.policy).__name__
        missing = {"layout": self.layout is None, "quota": isinstance(self.quota, NoQuota)}
        for part, is_missing in missing.items():
            if is_missing and getattr(self.policy, f"needs_{part}"):
                raise ValueError(f"{part}: {name} needs one, got none")
        if self.policy.denoise is None:
            return
        for part, beside in (("cache", self.cache), ("guidance", self.guidance)):
            if not isinstance(beside, NoCache | None):
                raise ValueError(
                    f"{part}: expected none with {name}, which runs columns of its own, got "
                    f"{type(beside).__name__}"
                )

    @property
    def draws(self) -> bool:
        """Whether another seed can give another response."""
        return self.sampler.temperature > 0.0 or self.policy.draws

    def budget(self, num_masks: int) -> int:
        """Returns the most steps of a row with so many masks."""
        budget = max(self.policy.budget(num_masks), self.window.steps)
        return self.settings.max_steps or budget

    def begin(self, backbone: Backbone, canvas: Canvas) -> DecodeState:
        """Returns the state of a canvas before step 0, with the template of the layout."""
        if self.layout is not None:
            canvas = self.layout.on(canvas, mask_id=backbone.spec.mask_id)
        state = initial_state(backbone.spec, canvas)
        budgets = [self.budget(number) for number in state.masked.sum(1).tolist()]
        dtype = getattr(torch, self.sampler.score_dtype)
        return replace(
            state,
            budget=row_index(budgets, state.ids.device),
            memory=self.policy.new_memory(state, backbone.vocab_size, dtype),
        )

    def guided(self, backbone: Backbone) -> Backbone:
        return backbone if self.guidance is None else GuidedBackbone(backbone, self.guidance)

    def check(self, backbone: Backbone) -> None:
        """Reads a learned policy from disk, and refuses what does not fit the backbone."""
        window, allowed = self.on(backbone.spec).window, self.sampler.allowed_ids
        check_window(window, backbone.spec)
        if allowed is not None and allowed[1] > backbone.vocab_size:
            raise ValueError(
                f"sampler.allowed_ids: expected ids of the model's {backbone.vocab_size}, "
                f"got {allowed}"
            )
        is_scheduled = isinstance(self.quota, ScheduleQuota) and self.quota.steps is not None
        if is_scheduled and isinstance(window, BlockWindow):  # the first blocks would take them all
            raise ValueError(
                "quota: ScheduleQuota with BlockWindow needs steps_per_block, got steps"
            )
        is_sliding = isinstance(window, SlidingWindow)
        is_shared = is_sliding and isinstance(self.quota, EvenQuota | BudgetQuota)
        is_cosine = isinstance(self.quota, CosineQuota) and not isinstance(window, FullWindow)
        if is_shared or is_cosine:
            raise ValueError(
                f"window: expected one that keeps the steps of {type(self.quota).__name__}, such "
                f"as FullWindow, got {type(window).__name__}"
            )
        if self.policy.takes_back and self.cache.commits_first and backbone.spec.shift:
            raise ValueError(
                f"cache: {type(self.cache).__name__} predicts the first cell of a block only where "
                f"it is refreshed, so {type(self.policy).__name__} could not write that cell again "
                f"in a model with a right shift; expected NoCache"
            )
        check = getattr(self.policy, "check_backbone", None)
        if callable(check):
            check(backbone)

    def plugs(self) -> dict[str, Any]:
        """Returns the arguments of the constructor by name, without a window if none was given."""
        parts = dict(vars(self))
        if not parts.pop("_has_window"):
            del parts["window"]
        return parts

    def on(self, spec: BackboneSpec) -> Decoder:
        """Returns the decoder, with the model's default window if it was given none."""
        if self._has_window:
            return self
        named = copy.copy(self)
        named.window, named._has_window = default_window(spec), True
        return named

    def encoded(self, encode: Callable[[str], list[int]]) -> Decoder:
        """Returns the decoder with the text markers of its layout encoded as token ids."""
        if self.layout is None:
            return self
        made = copy.copy(self)
        made.layout = self.layout.encoded(encode)
        return made

    def describe(self) -> dict[str, Any]:
        """Returns all settings as JSON types: of each plug its ``describe()`` or its attributes.

        Cache, layout and guidance are listed only where there is one.
        """
        plugs = {name: getattr(self, name) for name in _PLUGS}
        absent = [name for name, one in plugs.items() if one is None or isinstance(one, NoCache)]
        return {
            **{name: _describe(one) for name, one in plugs.items() if name not in absent},
            **({} if self.guidance is None else {"guidance": {**vars(self.guidance)}}),
            "settings": asdict(self.settings),
        }


def _describe(plug: object) -> dict[str, Any]:
    """Returns a plug's class and settings: our classes by bare name, others by import path."""
    public = {key: value for key, value in vars(plug).items() if not key.startswith("_")}
    settings = getattr(plug, "describe", lambda: public)()
    cls = type(plug)
    is_ours = cls.__module__.split(".")[0] == __name__.split(".")[0]
    name = cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"
    for key, value in settings.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(
                f"{name}.{key}: records cannot hold a {type(value).__name__}; name it _{key}, or "
                "give the class a method describe()"
            ) from None
    return {"name": name, **settings}


_PLUGS = ("policy", "window", "quota", "sampler", "cache", "layout")


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
    found = dict(decoders)
    for name, one in sweep.items():
        points = {
            method_name(name, value): with_option(one.decoder, one.option, value)
            for value in one.values
        }
        if twice := sorted(found.keys() & points.keys()):
            raise ValueError(f"sweep.{name}: there is a decoder named '{twice[0]}' already")
        if len(points) < len(one.values):
            raise ValueError(
                f"sweep.{name}: expected values with names of their own, which have no dot, got "
                f"{one.values} for {', '.join(points)}"
            )
        found |= points
    return found


def with_option(decoder: Decoder, option: str, value: Any) -> Decoder:
    """Returns a copy with another value of ``{plug}.{option}``; unchanged plugs are shared."""
    part, _, name = option.partition(".")
    plug: Any = getattr(decoder, part) if part in (*_PLUGS, "settings") else None
    parameters = [] if plug is None else inspect.signature(type(plug)).parameters
    arguments = {key: vars(plug)[key] for key in parameters if key in vars(plug)}
    if name not in arguments:
        raise ValueError(
            f"sweep.option: {option!r} is unknown; expected {'|'.join(_PLUGS)}|settings and of "
            f"{part} one of: {', '.join(arguments) or 'none'}"
        )
    return Decoder(**{**decoder.plugs(), part: type(plug)(**{**arguments, name: value})})
