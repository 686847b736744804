"""One decoder and a list of values: the points of an accuracy-steps curve, as one entry of YAML.

A sweep ``threshold`` of ``policy.threshold`` over 0.5 and 0.7 gives the methods ``threshold_05``
and ``threshold_07``, which reports draw as one curve.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_dlm.decoding.decoder import Decoder

_PLUGS = ("policy", "window", "quota", "sampler", "cache", "layout", "settings")


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
    """Name of a point of a sweep: ``threshold_095`` for 0.95, as flags do not reach dots."""
    return f"{name}_{'none' if value is None else value}".replace(".", "")


def expanded(decoders: Mapping[str, Decoder], sweep: Mapping[str, Sweep]) -> dict[str, Decoder]:
    """All decoders by name, the points of the sweeps behind the given ones."""
    found = dict(decoders)
    for name, one in sweep.items():
        points = {
            method_name(name, value): with_option(one.decoder, one.option, value)
            for value in one.values
        }
        twice = sorted(found.keys() & points.keys())
        if twice:
            raise ValueError(f"sweep.{name}: there is a decoder named '{twice[0]}' already")
        found |= points
    return found


def with_option(decoder: Decoder, option: str, value: Any) -> Decoder:
    """A copy with another value of ``{plug}.{option}``; plugs that do not change are shared."""
    part, _, name = option.partition(".")
    plug: Any = getattr(decoder, part) if part in _PLUGS else None
    parameters = [] if plug is None else inspect.signature(type(plug)).parameters
    arguments = {key: vars(plug)[key] for key in parameters if key in vars(plug)}
    if name not in arguments:
        raise ValueError(
            f"sweep.option: {option!r} is unknown; expected {'|'.join(_PLUGS)} and of {part} one "
            f"of: {', '.join(arguments) or 'none'}"
        )
    changed = copy.copy(decoder)
    setattr(changed, part, type(plug)(**{**arguments, name: value}))
    return changed
