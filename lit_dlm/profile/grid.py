"""The grid of a profile: every policy with every cache and every budget of steps.

The grid becomes a configuration for ``predict``: one sweep over ``quota.steps`` for each policy
and cache. So a profile decodes, grades, resumes and reports like any other benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dlm.config_files import find, load
from lit_dlm.decoding.sweep import method_name

CACHES: dict[str, str | None] = {
    "none": None,
    "prefix": "PrefixCache",
    "dual": "DualCache",
    "block": "BlockCache",
}
"""Names for caches on the command line."""
ADAPTIVE = "adaptive"
"""In place of a number of steps: the quota of the decode file, so that a threshold decides."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is crossed."""

    policies: Mapping[str, Path]
    """Decode files by the names that their methods get."""
    steps: Sequence[int | str]
    """Budgets of steps (forwards), and ``adaptive``."""
    caches: Sequence[str] = ()
    """Names of :data:`CACHES`; that of the decode file where there are none."""

    def __post_init__(self) -> None:
        if not self.policies or not self.steps:
            raise ValueError("profile: expected at least one policy and one number of steps")
        for value in self.steps:
            if value != ADAPTIVE and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"steps: expected numbers of at least 1 or '{ADAPTIVE}', got {value!r}"
                )
        for name in self.caches:
            if name not in CACHES:
                raise ValueError(f"caches: expected some of {', '.join(CACHES)}, got {name!r}")

    def config(self) -> dict[str, Any]:
        """The part of a configuration that adds the grid's methods and runs only them."""
        decoders: dict[str, Any] = {}
        sweeps: dict[str, Any] = {}
        methods: list[str] = []
        budgets = [value for value in self.steps if value != ADAPTIVE]
        for policy, path in self.policies.items():
            given = decode_arguments(path)
            caches: list[str | None] = [*self.caches] or [None]
            for cache in caches:
                name = policy if cache in (None, "none") else f"{policy}-{cache}"
                decoder = given if cache is None else _with_cache(given, cache)
                if ADAPTIVE in self.steps:
                    decoders[f"{name}-{ADAPTIVE}"] = decoder
                    methods.append(f"{name}-{ADAPTIVE}")
                if budgets:
                    quota = {"class_path": "BudgetQuota", "init_args": {"steps": budgets[0]}}
                    sweeps[name] = {
                        "decoder": {**decoder, "quota": quota},
                        "option": "quota.steps",
                        "values": budgets,
                    }
                    methods += [method_name(name, value) for value in budgets]
        model = {"decoders": decoders, "sweep": sweeps}
        return {"model": {"init_args": model}, "data": {"init_args": {"methods": methods}}}


def policy_files(given: Sequence[str]) -> dict[str, Path]:
    """Decode files by method name.

    Args:
        given: paths or packaged files such as ``decode/entropy``, or ``name=path``; a path's name
            is that of the file without its suffix.

    Raises:
        ValueError: a file does not exist, or two have one name.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        file = find(path if equals else text)
        name = name if equals else file.stem
        if name in found:
            raise ValueError(f"policies: {file} and {found[name]} are both named '{name}'")
        found[name] = file
    return found


def decode_arguments(path: Path) -> dict[str, Any]:
    """What a decode file sets, with the contents of files that it names.

    Raises:
        ValueError: the file does not describe a decoder.
    """
    content = load(str(path))
    if "class_path" in content:
        content = content.get("init_args") or {}
    if "policy" not in content:
        raise ValueError(f"{path}: expected a decode file with a policy, got {content!r:.60}")
    return content


def _with_cache(decoder: Mapping[str, Any], cache: str) -> dict[str, Any]:
    changed = {key: value for key, value in decoder.items() if key != "cache"}
    class_name = CACHES[cache]
    return changed if class_name is None else {**changed, "cache": {"class_path": class_name}}
