"""The configuration parser, with one-line errors that name the nearest key."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
from collections.abc import Sequence
from pydoc import locate
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import callbacks, loggers
from lightning.pytorch.cli import LightningArgumentParser
from torch import optim

from lit_dlm.config_files import nearest, with_files
from lit_dlm.ops.terminal import printable
from lit_dlm.plugs import Plug, difference

_PLUG = re.compile(
    r"(?:Import path (?P<path>\S+ )?does not correspond to a subclass of (?P<plug>\w+)"
    r"|Expected an instantiatable class, but (?P<abstract>\S+ )?is abstract)"
    r"(?:.*?Given value: (?P<given>[\w.]+))?",
    re.DOTALL,
)
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
_UNION_START = "Does not validate against any of the Union subtypes"
_UNION = re.compile(
    _UNION_START + r"\s+Subtypes:.*?\n\s*Errors:\n(?P<items>.*?)\n\s*Given value type:[^\n]*"
    r"(\n\s*Given value:[^\n]*)?",
    re.DOTALL,
)
_KEY = re.compile(r'Parser key "([^"]+)"')
_NO_FILE = re.compile(r"\n\s*- Expected a path but [^\n]* either not accessible or invalid\n\s*- ")
"""An error about options that may name a file; a missing file is reported elsewhere."""
_WRONG_TYPE = re.compile(r"Expected an? (?:<class '([\w.]+)'>|typing\.Literal\[(.*?)\])")
_CALLABLE = re.compile(r"Type typing\.Callable\S* \S* expects a function or a callable class: ")


def explain(message: str, parser: ArgumentParser | None = None) -> str:
    """Condenses an error of the argument parser to one line: its place, the fault, a suggestion."""
    # Before unions are taken apart: the text around them names the base that was meant.
    if told := _plug_fault(message):
        return told
    message = _innermost(_NO_FILE.sub("\n  ", message))
    place = ".".join(_KEY.findall(message))
    at = f"{place}: " if place else ""
    if told := _known_fault(message, at, _CLASS.findall(message), _keys(parser)):
        return told
    message = _KEY.sub("", _CLASS.sub("", message) if place else message)
    message = _WRONG_TYPE.sub(lambda m: f"expected {m[1] or f'one of {m[2]}'}", message)
    message = _CALLABLE.sub("", message).replace(". Got value: ", ", got ")
    told = " ".join(message.replace(":\n", " ").split())
    return f"{at}{told.removeprefix(': ')}"


def _plug_fault(message: str) -> str | None:
    found = _PLUG.search(message)
    path = found and (found["path"] or found["abstract"] or found["given"])
    kind = locate(path.strip()) if path else None
    if found is None or not isinstance(kind, type):
        return None
    # Without a name in the message, the base that the class derives from was meant.
    plug, bases = found["plug"], [one for one in _own_classes() if Plug in one.__bases__]
    meant = [one for one in bases if one.__name__ == plug or (not plug and one in kind.__mro__)]
    told = difference(kind, meant[0]) if meant else None
    at = ".".join(_KEY.findall(message[: found.start()]))
    return told and f"{at}: {told}"


def _known_fault(message: str, at: str, classes: list[str], keys: list[str]) -> str | None:
    """Puts a message of jsonargparse in one line, if it is one of these."""
    if found := re.search(r"No module named '([^']+)'", message):
        return f"{at}no module '{found[1]}' is installed or in {os.getcwd()}, the working folder"
    option = r"Option '([^']+)' is not accepted(?:\. Got value: Namespace\(class_path='([^']+)')?"
    if found := re.search(option, message):
        if owners := [*classes, *filter(None, [found[2]])]:
            return at + _without_option(found[1], owners)
        name = found[1].partition(".")[0]
        if name in ("model", "data"):  # which fit and predict have
            return "--config: expected a decode file (configs/decode), got an experiment"
        return f"{at}unknown option '{name}'{nearest(name, keys)}"
    if found := re.search(r"Expected a dot import path string: (\w+)", message):
        names = [one.__name__ for one in _own_classes()]
        names += [*callbacks.__all__, *loggers.__all__, *optim.__all__]
        if found[1] in names:
            return f"{at}expected a class of another kind, got {found[1]}"
        return f"{at}unknown class '{found[1]}'{nearest(found[1], names)}"
    key = r"(?:(?:Group '([^']+)'|Subcommand '\w+') does not accept option|Key) '([^']+)'"
    if found := re.search(key, message):
        name = f"{found[1]}.{found[2]}" if found[1] else found[2]
        return f"unknown key '{name}'{nearest(name, keys)}"
    if found := re.search(r"[Uu]nrecognized arguments: (--[^\s=]+)", message):
        if classes:
            return at + _without_option(found[1].removeprefix("--"), classes)
        return f"unknown option '{found[1]}'{nearest(found[1], (f'--{key}' for key in keys))}"
    if found := re.search(r"Not a valid subclass of (\w+)", message):
        return f"{at}expected a {found[1]}: a class's name, or class_path and init_args alone"
    missing = r"(?:the following arguments are required: |Key \")(?:\w+\.)?(data|model)\b"
    if found := re.search(missing, message):
        give = "give --config FILE ('lit-dlm recipes' lists the shipped ones)"
        return f"{found[1]}: expected a class, got none; {give}"
    return None


def _innermost(message: str) -> str:
    """Replaces every "no member of the union fits" by the first fault that is not about None."""
    # From the last to the first: unions are nested, and inner ones are resolved by then.
    while (start := message.rfind(_UNION_START)) >= 0:
        found = _UNION.match(message, start)
        if found is None:
            break
        items = re.split(r"\n\s*- ", "\n" + found["items"].strip("\n"))[1:]
        # "None was expected" is true of every optional class and helps nobody.
        faults = [item for item in items if "NoneType" not in item.split("\n")[0]] or items
        fault = faults[0]
        wanted = [m[1] or f"one of {m[2]}" for m in map(_WRONG_TYPE.fullmatch, faults) if m]
        if wanted and not any("Parser key" in one for one in faults):
            given = (found[2] or "").partition("Given value: ")[2]
            fault = f"expected {' or '.join(wanted)}, got {given}"
        message = message[:start] + fault + message[found.end() :]
    return message


def _without_option(name: str, classes: list[str]) -> str:
    """Says that the last of nested classes has no such option, and which one was meant."""
    target = locate(classes[-1])
    owners = [target] if callable(target) else _own_classes()
    known = {parameter for owner in owners for parameter in inspect.signature(owner).parameters}
    hint = nearest(name, known - {"self", "args", "kwargs", name})
    return f"{classes[-1].rpartition('.')[2]} has no option '{name}'{hint}"


def _own_classes() -> list[type]:
    """Public classes of this project that are loaded and can be configured."""
    found: dict[str, type] = {}
    loaded = list(sys.modules.items())  # a copy, since other threads may add to them
    modules = [one for name, one in loaded if name.split(".")[0] == "lit_dlm"]
    for module in modules:
        own = {k: v for k, v in vars(module).items() if isinstance(v, type) and k[0] != "_"}
        own = {k: v for k, v in own.items() if not issubclass(v, BaseException | dict)}
        found.update((k, v) for k, v in own.items() if v.__module__ == module.__name__)
    return list(found.values())


def _keys(parser: ArgumentParser | None) -> list[str]:
    if parser is None:
        return []
    commands = parser._subcommands_action
    parsers = [parser, *(commands._name_parser_map.values() if commands else ())]
    return [action.dest for one in parsers for action in one._actions if action.dest]


def _as_yaml(argument: str) -> str:
    """Rewrites ``--key=value`` with a list, dict or None in Python syntax as YAML."""
    key, equals, text = argument.partition("=")
    if text == "None" or text[:1] in ("[", "{"):
        try:
            text = json.dumps(ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError):
            return argument  # the user's own text, which is not YAML
    return key + equals + text


class Parser(LightningArgumentParser):
    """Argument parser whose errors say what is wrong, where, and what was probably meant."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *rest: Any, **options: Any
    ) -> Namespace:
        """Parses flags and the files they name; inside a class, values come as Python text."""
        if self.exit_on_error:
            args = with_files(sys.argv[1:] if args is None else args)
        elif args is not None:
            args = [_as_yaml(argument) for argument in args]
        return super().parse_args(args, *rest, **options)

    def instantiate(self, *args: Any, **options: Any) -> Any:
        """Builds classes; the fault of a refused value is told as when it is parsed."""
        try:
            return super().instantiate(*args, **options)
        except ValueError as error:
            raise ValueError(explain(str(error))) from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # it parses a class; the caller knows its name and place
            super().error(message, ex)
        sys.stderr.write(f"lit-dlm: error: {printable(explain(message, self))}\n")
        raise SystemExit(2)
