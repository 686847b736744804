"""Rebuilds a decoder from its description: the inverse of ``Decoder.describe``.

A description comes from a file that somebody else may have written, so a class is looked up by name
among the package's own. A component from outside the package is described by its import path and is
imported only from modules that the caller names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lit_dlm.config.names import NAMES
from lit_dlm.decoding.decoder import COMPONENTS, Decoder, DecodeSettings
from lit_dlm.decoding.guidance import Guidance
from lit_dlm.decoding.layout import Layout
from lit_dlm.system.options import refuse


def known_class(part: str, name: str) -> type | None:
    """Returns the class of the package that a description names, if it can be this part."""
    path = NAMES.get(name, "")
    cls: type | None = resolve_name(path) if path.startswith("lit_dlm.") else None
    # By descent: issubclass would only ask for the methods, which a class of another part may have.
    return cls if cls is not None and COMPONENTS[part] in cls.__mro__ else None


def decoder_from_description(
    description: Mapping[str, Any],
    *,
    policy_folders: Sequence[str | Path] = (),
    component_modules: Sequence[str] = (),
) -> Decoder:
    """Builds the decoder that a run record or result file describes.

    Args:
        policy_folders: exported learned policies, folders or hub ids; the one whose weights have
            the recorded digest is used. Those that ship with the package need not be listed.
        component_modules: modules that components from outside the package may be imported from,
            such as ``my_package.policies``.
    """
    parts = {*COMPONENTS, "guidance", "settings"}
    _check_names("decoder", description, parts, parts - {"cache", "layout", "guidance"})
    built = {
        part: _component(part, description[part], policy_folders, component_modules)
        for part in COMPONENTS
        if part in description
    }
    for part, cls in (("settings", DecodeSettings), ("guidance", Guidance)):
        if (settings := description.get(part)) is not None:
            _check_names(part, settings, set(inspect.signature(cls).parameters))
            built[part] = cls(**settings)
    decoder = Decoder(**built)
    # Compared as a whole: a setting that a constructor dropped or changed would decode differently.
    rebuilt = decoder.describe()
    for part, entry in description.items():
        if rebuilt.get(part) != entry:
            raise ValueError(
                f"decoder description: {part} cannot be rebuilt: {entry} gives {rebuilt.get(part)}"
            )
    return decoder


def layout_from_description(description: Mapping[str, Any]) -> Layout | None:
    """Builds only the layout of a described decoder, if any; no policy weights are needed."""
    if "layout" not in description:
        return None
    layout: Layout = _component("layout", description["layout"], (), ())
    return layout


def _component(
    part: str,
    entry: Mapping[str, Any],
    policy_folders: Sequence[str | Path],
    component_modules: Sequence[str],
) -> Any:
    settings = dict(entry)
    name = str(settings.pop("name", None))
    cls: Any = known_class(part, name) or _imported(part, name, component_modules)
    if find := getattr(cls, "find_weights", None):  # of a learned policy
        settings |= find(str(settings.pop("weights", "")), policy_folders)
    _check_names(f"{part} {name}", settings, set(inspect.signature(cls).parameters))
    return cls(**settings)


def _imported(part: str, path: str, component_modules: Sequence[str]) -> type:
    """Imports a class from outside the package; its module runs, so the caller must name it."""
    module, _, name = path.rpartition(".")
    if module not in component_modules:
        known = ", ".join(sorted(name for name in NAMES if known_class(part, name)))
        raise ValueError(
            f"decoder description: {part} {path!r} is none of {known}; if it comes from outside of "
            f"the package and you trust it, name its module with --components {module or 'MODULE'}"
        )
    cls = None
    with suppress(ImportError):
        cls = getattr(importlib.import_module(module), name, None)
    if not isinstance(cls, type):  # else a function that the module imported would be called
        raise ValueError(f"decoder description: {part} {path!r}: expected a class, got {cls!r}")
    return cls


def _check_names(
    where: str, given: Mapping[str, Any], known: set[str], needed: Set[str] = frozenset()
) -> None:
    if not needed <= set(given) <= known:
        wanted, got = (", ".join(sorted(names)) for names in (needed or known, given))
        refuse(f"decoder description: {where}", wanted, got)
