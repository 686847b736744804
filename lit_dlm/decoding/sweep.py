"""One decoder and a list of values: the points of an accuracy-steps curve, as one entry of YAML.

A sweep ``threshold`` of ``policy.threshold`` over 0.5 and 0.7 gives the methods ``threshold_05``
and ``threshold_07``, which reports draw as one curve.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lit_dlm.decoding.decoder import Decoder

_PLUGS = ("policy", "window", "quota", "sampler", "cache", "layout")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A decoder and the values of one of its options."""

    decoder: Decoder
    """What all points share."""
    option: str
    """``{plug}.{option}`` such as ``policy.threshold``, ``window.width`` or
    ``settings.max_steps``."""
    values: list[int | float | str | None]
    """One point each; at least one."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("sweep: expected at least one value, got none")

    def decoders(self, name: str) -> dict[str, Decoder]:
        """``{name}_{value}`` of every point, without dots; ``none`` stands for null."""
        return {
            method_name(name, value): with_option(self.decoder, self.option, value)
            for value in self.values
        }


def method_name(name: str, value: int | float | str | None) -> str:
    """Name of a point of a sweep: ``threshold_095`` for 0.95, as flags do not reach dots."""
    return f"{name}_{'none' if value is None else value}".replace(".", "")


def expanded(decoders: Mapping[str, Decoder], sweep: Mapping[str, Sweep]) -> dict[str, Decoder]:
    """All decoders by name, the points of the sweeps behind the given ones."""
    found = dict(decoders)
    for name, one in sweep.items():
        points = one.decoders(name)
        twice = sorted(found.keys() & points.keys())
        if twice:
            raise ValueError(f"sweep.{name}: there is a decoder named '{twice[0]}' already")
        found |= points
    return found


def with_option(decoder: Decoder, option: str, value: Any) -> Decoder:
    """The same decoder with another value of one option.

    Args:
        option: ``{plug}.{option}``.

    Returns:
        A new decoder; plugs that do not change are shared.
    """
    plug_name, _, name = option.partition(".")
    changed = copy.copy(decoder)
    if plug_name == "settings":
        known = list(type(decoder.settings).__dataclass_fields__)
        _check(option, name, known)
        changed.settings = replace(decoder.settings, **{name: value})
        return changed
    if plug_name not in _PLUGS:
        raise ValueError(
            f"sweep.option: expected one that begins with {', '.join(_PLUGS)} or settings, "
            f"got {option!r}"
        )
    plug = getattr(decoder, plug_name)
    parameters = [] if plug is None else inspect.signature(type(plug)).parameters
    known = [key for key in parameters if key in vars(plug)]
    _check(option, name, known)
    arguments = {key: getattr(plug, key) for key in known}
    setattr(changed, plug_name, type(plug)(**{**arguments, name: value}))
    return changed


def _check(option: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ValueError(
            f"sweep.option: {option!r} is unknown; known there: {', '.join(known) or 'none'}"
        )
