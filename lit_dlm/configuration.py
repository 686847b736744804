"""Turns the parser's nested error reports into one line that names the nearest right key."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from pydoc import locate

from jsonargparse import ArgumentParser

_UNKNOWN_OPTION = re.compile(r"Option '([^']+)' is not accepted")
_UNKNOWN_KEY = re.compile(r"(?:Group '([^']+)' does not accept option|Key) '([^']+)'")
_UNKNOWN_FLAG = re.compile(r"[Uu]nrecognized arguments: (--\S+)")
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\w+)")
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
_TYPE = re.compile(r"<class '([\w.]+)'>")
_MOST_LISTED = 20
_KEY = re.compile(r'Parser key "([^"]+)"')


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'threshold'?``, or a short list of all names when none is near.

    Args:
        name: what was given.
        known: what would have been right.

    Returns:
        The hint, or an empty string when nothing is known.
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= _MOST_LISTED else ""


def explain(message: str, parser: ArgumentParser) -> str:
    """Condenses an error of the argument parser.

    Args:
        message: the parser's own report, possibly nested over many lines.
        parser: the parser, for its known keys.

    Returns:
        The place, the fault and a suggestion; the report itself when it has none of the known forms.
    """
    place = ".".join(_KEY.findall(message))
    at = f"{place}: " if place else ""
    if found := _UNKNOWN_OPTION.search(message):
        classes = _CLASS.findall(message[: found.start()])
        owner = classes[-1] if classes else ""
        hint = nearest(found[1], _parameters(owner))
        return f"{at}{owner.rsplit('.', 1)[-1]} has no option '{found[1]}'{hint}"
    if found := _UNKNOWN_CLASS.search(message):
        # The innermost list of accepted types before the fault is the one that was not met.
        bases = _TYPE.findall(message[: found.start()].rsplit("Subtypes:", 1)[-1])
        names = [name for base in bases for name in _subclasses(base)]
        return f"{at}unknown class '{found[1]}'{nearest(found[1], names)}"
    if found := _UNKNOWN_KEY.search(message):
        key = f"{found[1]}.{found[2]}" if found[1] else found[2]
        return f"unknown key '{key}'{nearest(key, _keys(parser))}"
    if found := _UNKNOWN_FLAG.search(message):
        flag = found[1].split("=")[0]
        return f"unknown option '{flag}'{nearest(flag, (f'--{k}' for k in _keys(parser)))}"
    return message


def _parameters(class_path: str) -> list[str]:
    target = locate(class_path)
    if not callable(target):
        return []
    return [name for name in inspect.signature(target).parameters if name != "self"]


def _subclasses(class_path: str) -> list[str]:
    """Names of all public subclasses of a class of ours or of Lightning's."""
    root = locate(class_path)
    if not isinstance(root, type) or root.__module__ == "builtins":
        return []
    found: list[str] = []
    pending = [root]
    while pending:
        children = pending.pop().__subclasses__()
        pending.extend(children)
        found.extend(child.__name__ for child in children if not child.__name__.startswith("_"))
    return found


def _keys(parser: ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if action.dest]
