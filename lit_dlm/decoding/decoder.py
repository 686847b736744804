"""A decoder: one choice of every plug, ready to be named in a configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.engine import DecodeSettings, decode
from lit_dlm.decoding.observers import Observer
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.quotas import FixedQuota, Quota
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import Canvas, DecodeResult
from lit_dlm.decoding.windows import FullWindow, Window


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The plugs of one decoding method."""

    policy: CommitPolicy
    """Which proposals become final."""
    window: Window = field(default_factory=FullWindow)
    """Where a step may commit."""
    quota: Quota = field(default_factory=FixedQuota)
    """How many it commits."""
    sampler: Sampler = field(default_factory=Sampler)
    """Which tokens are proposed."""
    settings: DecodeSettings = field(default_factory=DecodeSettings)
    """Rules of the loop."""

    def __call__(
        self, backbone: Backbone, canvas: Canvas, observers: Sequence[Observer] = ()
    ) -> DecodeResult:
        """Decodes a canvas; see :func:`lit_dlm.decoding.engine.decode`."""
        return decode(
            backbone,
            canvas,
            window=self.window,
            quota=self.quota,
            sampler=self.sampler,
            policy=self.policy,
            settings=self.settings,
            observers=observers,
        )

    def describe(self) -> dict[str, Any]:
        """All settings as JSON types, for result files and run records."""
        plugs = {name: getattr(self, name) for name in ("policy", "window", "quota", "sampler")}
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
