"""A decoder: one choice of every plug, ready to be named in a configuration."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from lit_dlm.backbones.base import Backbone, BackboneSpec
from lit_dlm.decoding.caches import CacheScheme, NoCache
from lit_dlm.decoding.engine import DecodeSettings, Plugs, decode, decode_queue
from lit_dlm.decoding.guidance import Guidance, GuidedBackbone
from lit_dlm.decoding.layout import LAYOUT_WANTED, Layout, MarkerLayout, TemplateLayout
from lit_dlm.decoding.observers import Observer, QueueObserver
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.policies.topk import RandomPolicy
from lit_dlm.decoding.quotas import FixedQuota, Quota
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import Canvas, DecodeResult, prompt_canvas
from lit_dlm.decoding.windows import FullWindow, Window, check_window, default_window
from lit_dlm.plugs import checked_plug


class Decoder:
    """The plugs of one decoding method."""

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
        """Puts the plugs together.

        Args:
            policy: which proposals become final.
            window: where a step may commit; by default the whole response, or the model's own
                blocks where its attention has some.
            quota: how many it commits; one per step by default.
            sampler: which tokens are proposed; the most probable ones by default.
            cache: what steps take from earlier forwards; nothing by default.
            settings: rules of the loop.
            layout: named regions of the response and the template that it starts from; lockstep
                policies need one, any other policy may have one.
            guidance: away from what the model would write without the prompt; not with a cache.
        """
        self.policy = checked_plug(policy, CommitPolicy, option="policy")
        self.window = window and checked_plug(window, Window, option="window")
        self.quota = checked_plug(quota or FixedQuota(), Quota, option="quota")
        self.sampler = sampler or Sampler()
        self.cache = checked_plug(cache or NoCache(), CacheScheme, option="cache")
        self.settings = settings or DecodeSettings()
        self.layout = layout and checked_plug(layout, Layout, option="layout")
        self.guidance = guidance
        if guidance is not None and not isinstance(self.cache, NoCache):
            raise ValueError(
                f"guidance: expected no cache beside it, got {type(self.cache).__name__}"
            )
        if layout is None and getattr(policy, "needs_layout", False):
            raise ValueError(f"layout: {type(policy).__name__} {LAYOUT_WANTED}")
        if isinstance(layout, TemplateLayout | MarkerLayout) and self.settings.eos_rule != "none":
            raise ValueError(
                f"settings.eos_rule: expected 'none' with {type(layout).__name__}, where an end of "
                f"text ends a region and not the response, got {self.settings.eos_rule!r}"
            )

    @property
    def draws(self) -> bool:
        """Whether another seed can give another response."""
        return self.sampler.temperature > 0.0 or isinstance(self.policy, RandomPolicy)

    def __call__(
        self, backbone: Backbone, canvas: Canvas, observers: Sequence[Observer] = ()
    ) -> DecodeResult:
        """Decodes a canvas; see :func:`lit_dlm.decoding.engine.decode`."""
        self.check(backbone)
        return decode(
            self.guided(backbone),
            self.prepared(canvas, backbone),
            self.plugs(backbone.spec),
            observers=observers,
        )

    def queue(
        self,
        backbone: Backbone,
        source: Callable[[int], Canvas | None],
        *,
        num_slots: int,
        observers: Sequence[QueueObserver] = (),
    ) -> Iterator[DecodeResult]:
        """Decodes rows as slots become free; see :func:`~lit_dlm.decoding.engine.decode_queue`.

        Args:
            source: gives the next rows, ``None`` where there are none.
        """
        self.check(backbone)

        def prepared(count: int) -> Canvas | None:
            canvas = source(count)
            return None if canvas is None else self.prepared(canvas, backbone)

        return decode_queue(
            self.guided(backbone),
            prepared,
            self.plugs(backbone.spec),
            num_slots=num_slots,
            observers=observers,
        )

    def guided(self, backbone: Backbone) -> Backbone:
        """The backbone that decides: with guidance where there is some."""
        return backbone if self.guidance is None else GuidedBackbone(backbone, self.guidance)

    def plugs(self, spec: BackboneSpec) -> Plugs:
        """What decides on a model, whose own window stands in where none is named."""
        return Plugs(
            window=self.window or default_window(spec),
            quota=self.quota,
            sampler=self.sampler,
            policy=self.policy,
            cache=self.cache,
            settings=self.settings,
        )

    def check(self, backbone: Backbone) -> None:
        """Reads a learned policy from disk, and refuses what does not fit the backbone."""
        if self.window is not None:
            check_window(self.window, backbone.spec)
        check = getattr(self.policy, "check_backbone", None)
        if callable(check):
            check(backbone)

    def on(self, spec: BackboneSpec) -> Decoder:
        """This decoder with the window that it has on a model: what is to be described.

        Returns:
            The decoder itself where it names a window, else a copy that does.
        """
        if self.window is not None:
            return self
        named = copy.copy(self)
        named.window = default_window(spec)
        return named

    def encoded(self, encode: Callable[[str], list[int]]) -> Decoder:
        """This decoder with the token ids of markers that its layout has as text."""
        if self.layout is None or not any(
            isinstance(region.marker, str) for region in self.layout.regions
        ):
            return self
        made = copy.copy(self)
        made.layout = self.layout.encoded(encode)
        return made

    def prepared(self, canvas: Canvas, backbone: Backbone) -> Canvas:
        """The canvas with the layout's template and regions; doing it twice changes nothing."""
        if self.layout is None:
            return canvas
        return self.layout.on(canvas, mask_id=backbone.spec.mask_id)

    def describe(self) -> dict[str, Any]:
        """All settings as JSON types, for result files and run records.

        Those of a plug are what its method ``describe`` says, or else its public attributes.

        Cache, layout and guidance are listed only where there is one, so that older records stay
        valid. A decoder without a window describes itself as on a model with full attention; see
        :meth:`on`.
        """
        names = ["policy", "window", "quota", "sampler"]
        if not isinstance(self.cache, NoCache):
            names.append("cache")
        if self.layout is not None:
            names.append("layout")
        plugs = {name: getattr(self, name) for name in names}
        plugs["window"] = self.window or FullWindow()
        return {
            **{name: _describe(plug) for name, plug in plugs.items()},
            **({} if self.guidance is None else {"guidance": self.guidance.describe()}),
            "settings": asdict(self.settings),
        }

    def digest(self) -> str:
        """First 16 hexadecimal digits of SHA-256 over :meth:`describe`."""
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def decode_prompts(
    backbone: Backbone,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    response_length: int,
    seeds: Sequence[int],
    observers: Sequence[Observer] = (),
) -> DecodeResult:
    """Decodes token ids of prompts on the backbone's device: canvas, then the loop.

    Args:
        seeds: one per prompt, usually :func:`~lit_dlm.ops.noise.sample_seed` of the sample's uid.
    """
    longest = max(map(len, prompts), default=0)
    limit = getattr(backbone, "max_positions", None)
    if limit is not None and longest + response_length > limit:
        raise ValueError(
            f"response_length: expected at most {limit} tokens of prompt and response, the "
            f"positions that the model was made for, got {longest} + {response_length}"
        )
    canvas = prompt_canvas(
        prompts,
        response_length=response_length,
        spec=backbone.spec,
        seeds=seeds,
        device=getattr(backbone, "device", "cpu"),
    )
    result = decoder(backbone, canvas, observers)
    if (vision := getattr(backbone, "vision", None)) is not None:
        for prompt in prompts:
            vision.release(prompt)
    return result


def _describe(plug: object) -> dict[str, Any]:
    """A plug's class and settings: its own ``describe`` or its public plain attributes.

    Our classes go by their bare name, all others by their import path.
    """
    own = getattr(plug, "describe", None)
    if callable(own):
        settings = own()
    else:
        settings = {k: v for k, v in vars(plug).items() if not k.startswith("_")}
    cls = type(plug)
    is_ours = cls.__module__.split(".")[0] == __name__.split(".")[0]
    name = cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"
    for key, value in settings.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(
                f"{name}.{key}: expected numbers, texts or lists of them, got a "
                f"{type(value).__name__}, which records cannot hold; name it _{key}, or give the "
                "class a method describe()"
            ) from error
    return {"name": name, **settings}
