"""A decoder: one choice of every plug, ready to be named in a configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.caches import CacheScheme, NoCache
from lit_dlm.decoding.engine import DecodeSettings, decode
from lit_dlm.decoding.observers import Observer
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.quotas import FixedQuota, Quota
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import Canvas, DecodeResult
from lit_dlm.decoding.windows import FullWindow, Window


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
    ) -> None:
        """Puts the plugs together.

        Args:
            policy: which proposals become final.
            window: where a step may commit; the whole response by default.
            quota: how many it commits; one per step by default.
            sampler: which tokens are proposed; the most probable ones by default.
            cache: what steps take from earlier forwards; nothing by default.
            settings: rules of the loop.
        """
        self.policy = policy
        self.window = window or FullWindow()
        self.quota = quota or FixedQuota()
        self.sampler = sampler or Sampler()
        self.cache = cache or NoCache()
        self.settings = settings or DecodeSettings()

    def __call__(
        self, backbone: Backbone, canvas: Canvas, observers: Sequence[Observer] = ()
    ) -> DecodeResult:
        """Decodes a canvas; see :func:`lit_dlm.decoding.engine.decode`.

        Raises:
            ValueError: the policy was trained for another backbone.
        """
        check = getattr(self.policy, "check_backbone", None)
        if callable(check):
            check(backbone)
        return decode(
            backbone,
            canvas,
            window=self.window,
            quota=self.quota,
            sampler=self.sampler,
            policy=self.policy,
            cache=self.cache,
            settings=self.settings,
            observers=observers,
        )

    def describe(self) -> dict[str, Any]:
        """All settings as JSON types, for result files and run records.

        The cache is listed only where there is one, so that records from before caches stay valid.
        """
        names = ["policy", "window", "quota", "sampler"]
        if not isinstance(self.cache, NoCache):
            names.append("cache")
        plugs = {name: getattr(self, name) for name in names}
        return {
            **{name: _describe(plug) for name, plug in plugs.items()},
            "settings": asdict(self.settings),
        }

    def digest(self) -> str:
        """First 16 hexadecimal digits of SHA-256 over :meth:`describe`."""
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _describe(plug: object) -> dict[str, Any]:
    """A plug's class name and settings: its own ``describe`` or its public plain attributes."""
    own = getattr(plug, "describe", None)
    if callable(own):
        settings = own()
    else:
        settings = {k: v for k, v in vars(plug).items() if not k.startswith("_")}
    return {"name": type(plug).__name__, **settings}
