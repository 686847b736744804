"""The argument parser: one line about what is refused, with its place and what was meant."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from pydoc import locate
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lit_dlm.config.components import Component, difference
from lit_dlm.config.files import Composed
from lit_dlm.config.names import NAMES
from lit_dlm.system.extras import install_hint
from lit_dlm.system.options import nearest
from lit_dlm.system.terminal import printable

_CALLABLE = re.compile(r"Type typing\.Callable\S* \S* expects a function or a callable class: ")
_FRAME = re.compile(
    r"$|(- )?(Does not validate against|Subtypes:|Errors:|Given value|Expected a path but"
    r"|Expected a <class 'NoneType'>|(Problem with given class_path|Parser key) \S+:$"
    r"|Subclass types expect one of:|a class path \(str\)|a dict with)"
)
"""Lines around a fault: its place, members of a union that do not fit, the value."""
_VALUE = re.compile(r"(?:Got|Given) value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
_KIND = re.compile(r"Expected an? (?:<class '([\w.]+)'>|typing\.Literal\[(.*?)\])")
_CLASS = re.compile(r"Expected a dot import path string: (\w+)")
_OPTION = re.compile(
    r"(?:Option|Group '(?P<group>[^']+)' .* option|Subcommand .* option) '(?P<key>[^']+)'"
    r"|nrecognized arguments: --(?P<flag>[^\s=]+)"
)
_COMPONENT = re.compile(
    r"Import path (?P<path>\S+ )?does not correspond to a subclass of (?P<base>\w+)"
    r"|Expected an instantiatable class, but (?P<abstract>\S+ )?is abstract"
)


def explain(message: str, parser: Parser | None = None) -> str:
    """Condenses an error of the argument parser to one line: its place, the fault, a suggestion."""
    lines = [(len(one) - len(one.lstrip()), one) for one in _CALLABLE.sub("", message).split("\n")]
    faults = [number for number, (_, one) in enumerate(lines) if not _FRAME.match(one.strip())]
    if len(faults) in (0, len(lines)):
        faults, lines = [0], [(0, " ".join(message.split()))]
    # A union reports a fault for each member; the most specific one is of what was meant.
    first = min(faults, key=lambda number: _vagueness(lines[number][1]))
    # What is indented less and stands above says where the fault is.
    depth, line = lines[first]
    above = " ".join(reversed(list(_enclosing(lines[:first], depth))))
    keys = re.findall(r'Parser key "([^"]+)"', above)
    value = "".join(_VALUE.findall("\n".join(one for _, one in lines[first:]))[:1])
    if match := _OPTION.search(line):
        name = match["flag"] or ".".join(filter(None, [match["group"], match["key"]]))
        name = name.partition(".init_args")[0]
        # From the outside in; the innermost may be that of the value, but not of an entry of it.
        owners = re.findall(r"class_path[ =]'([^']+)'", f"{above} {re.split('[,:]', value)[0]}")
        text = _without_option([*keys, name], owners, parser)
    elif _KIND.search(line):
        beside = [_KIND.search(lines[number][1]) for number in faults if lines[number][0] == depth]
        kinds = dict.fromkeys(one[1] or f"one of {one[2]}" for one in beside if one)
        wanted = " or ".join(kinds).replace("list", f"a list, such as [{value}]")
        text = f"expected {wanted}, got {value}"
    else:
        text = _translated(line.strip().removeprefix("- "), value)
    return ": ".join([".".join(keys), text] if keys else [text]) + install_hint(text)


def _vagueness(fault: str) -> int:
    """Orders the faults of a union's members: that a number was expected says the least."""
    if match := _CLASS.search(fault):
        return 1 if match[1] in NAMES or nearest(match[1], NAMES) else 3
    return 2 if _KIND.search(fault) or "Not a valid subclass" in fault else 0


def _enclosing(lines: Sequence[tuple[int, str]], depth: int) -> Iterator[str]:
    """Yields the lines that a line of this depth is part of, from the innermost one."""
    for indent, line in reversed(lines):
        if line.strip() and indent < depth:
            depth = indent
            yield line


def _translated(fault: str, value: str) -> str:
    if match := _CLASS.search(fault):
        if match[1] in NAMES:
            return f"expected a class of another kind, got {match[1]}"
        return f"unknown class '{match[1]}'{nearest(match[1], NAMES)}"
    if (match := _COMPONENT.search(fault)) and (lack := _lack(match, value)):
        return lack
    name = re.search(r"(?:No module named '|import path format: )([\w/-]+)", fault)
    if name and f"{name[1]}.yaml" in value:
        return f"there is no file '{name[1]}.yaml'"
    if match := re.search(r"No module named '([^']+)'", fault):
        return f"no module '{match[1]}' is installed or in {os.getcwd()}, the working folder"
    if match := re.match(r"Not of type (\w+)Int: (?:.* base 10: )?(\S+)", fault):
        return f"expected a whole number, {int(match[1] == 'Positive')} or more, got {match[2]}"
    if match := re.match(r"Not a valid subclass of (\w+)", fault):
        return f"expected a {match[1]}: a class's name, or class_path and init_args alone"
    return fault.replace(". Got value: ", ", got ")


def _lack(match: re.Match[str], value: str) -> str | None:
    kind = locate((match["path"] or match["abstract"] or value).strip())
    # Without a name in the message, the base that the class derives from was meant.
    mro = [] if match["base"] else getattr(kind, "__mro__", [])
    known = Component.__subclasses__()
    bases = [one for one in known if one.__name__ == match["base"] or one in mro]
    if kind in bases:  # taken where a part that has no class yet is given an option
        option = re.sub(r"NestedArg\(key='(.*)', val='(.*)'\)", r"\1 \2", value)
        return f"expected a class's name before its options, got {option}"
    return difference(kind, bases[0]) if bases and isinstance(kind, type) else None


def _without_option(path: Sequence[str], owners: Sequence[str], parser: Parser | None) -> str:
    """Says that the last of nested classes, or the command, has no such option, and what has."""
    name, parsers = path[-1], parser._all() if parser else []
    known = {action.dest for one in parsers for action in one._actions if action.dest}
    message, meant, head = f"unknown option '{name}'", name, name.partition(".")[0]
    if owners:
        kind: Any = locate(owners[-1])
        known = set(inspect.signature(kind).parameters if callable(kind) else ())
        message, meant = f"{owners[-1].rpartition('.')[2]} has no option '{name}'", head
    elif head not in (heads := {one.split(".")[0] for one in known}):
        if head in ("model", "data"):
            return "--config: expected a decode file (configs/decode), got an experiment"
        known, meant = heads, head
    # The same name elsewhere in the configuration: likely it was put one level too high or too low.
    # It is where the path leads, too; that lacks the names of decoders.
    own = re.sub(r"(decoders|sweep)\\\.", r"\g<0>\\w+\\.", re.escape(".".join(path)))
    at = re.compile(rf"(?!{own}(\.|$)).+\.{re.escape(name)}(\.\w+)?")
    settings = _settings(parser.values if parser else {})
    if others := [one for one in settings if at.fullmatch(one)][:4]:
        return f"{message}; did you mean {' or '.join(map(repr, others))}?"
    return message + nearest(meant, known - {"args", "kwargs", name})


def _settings(value: Any, at: str = "") -> Iterator[str]:
    """Yields the place of every setting in a configuration, as flags name it."""
    for key, item in value.items() if isinstance(value, Mapping) else ():
        place = f"{at}.{key}".lstrip(".").removesuffix(".init_args")
        if key not in ("class_path", "init_args"):
            yield place
        yield from _settings(item, place)


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

    values: Mapping[str, Any] = {}

    def parse_composed(self, composed: Composed, *before: str) -> Namespace:
        """Parses a command line, behind words such as the name of a subcommand."""
        for one in self._all():
            # Errors are raised by the parser of the subcommand, which tells where an option was.
            one.values = composed.values
        text = json.dumps(composed.values)
        # jsonargparse finds the short names of classes that are loaded.
        for name in NAMES.keys() & re.findall(r"\w+", " ".join([text, *composed.left])):
            import_module(NAMES[name].rpartition(".")[0])
        return self.parse_args([*before, f"--config={text}", *composed.left])

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *rest: Any, **options: Any
    ) -> Namespace:
        """Parses words; inside a class, values come as Python text."""
        # A nested class is parsed from words again, for which jsonargparse writes lists and
        # mappings as Python does.
        if not self.exit_on_error and args is not None:
            args = [_as_yaml(argument) for argument in args]
        return super().parse_args(args, *rest, **options)

    def _check_value_key(self, action: Any, value: Any, *rest: Any, **options: Any) -> Any:
        # Takes dataclasses within apart; settings that two classes share are parsed again.
        return super()._check_value_key(action, deepcopy(value), *rest, **options)

    def _all(self) -> list[Parser]:
        commands = self._subcommands_action
        return [self, *(commands._name_parser_map.values() if commands else ())]

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
