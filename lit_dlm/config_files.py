"""Configuration files: parts, overlays on parts, and where they are found.

A file is a mapping; what it takes from other files it names in one of two ways::

    defaults: [../method/tracerl.yaml, ../data/rollouts_math.yaml]   # start from these, in order
    model:
      init_args:
        backbone: ../backbone/dream.yaml       # a value: the contents of that file

``defaults`` may stand in any mapping. Names are relative to the file, then to the packaged
``configs`` folder, with or without ``.yaml``. Files are merged before anything is parsed: mappings
key by key, lists as wholes (``key+`` appends), null takes a mapping away, and settings of a class
are dropped where another class takes its place, unless it is a subclass. So ``${run_dir}`` and the
like may stand in any part, and a second file can add one decoder to those of the first.
"""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

FOLDER = (Path(__file__).parent / "configs").resolve()
"""The configurations of this package; in a checkout a link to the folder at its top."""
_MOST_LISTED = 20
_DEEPEST = 50
_UNREADABLE = (
    yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError, RecursionError
)  # fmt: skip
_SHORT_NAMES = ("lit_dlm.", "lightning.pytorch.", "torch.optim")
"""Where classes are that configurations may give by their names alone."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'threshold'?``, else all known names if they are few."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= _MOST_LISTED else ""


def find(name: str, beside: Path | None = None) -> Path:
    """The path of a file, or of a packaged one such as ``exp/tracelock_tiny``, without ``.yaml``.

    Relative paths start from the folder ``beside``, by default the working directory.
    """
    if found := _found(name, beside):
        return found
    searched = f"{(beside or Path()).resolve()} and {FOLDER}"
    hint = nearest(name.removesuffix(".yaml"), packaged())
    raise ValueError(f"configuration '{name}': expected a file, got none in {searched}{hint}")


def packaged(folder: str = "") -> list[str]:
    """Names of the packaged files below a folder, such as ``exp/tracelock_tiny``."""
    paths = sorted((FOLDER / folder).rglob("*.yaml"))
    return [path.relative_to(FOLDER).with_suffix("").as_posix() for path in paths]


def _found(name: str, beside: Path | None) -> Path | None:
    folders = (beside or Path(), FOLDER)
    paths = (folder / file for folder in folders for file in (name, f"{name}.yaml"))
    return next((path.resolve() for path in paths if path.is_file()), None)


def load(name: str) -> dict[str, Any]:
    """Reads a configuration file with all that it names; ``${run_dir}`` and the like stay."""
    return _read(find(name))


def decoder_options(content: dict[str, Any]) -> dict[str, Any]:
    """What a decode file sets, also one that names its class; all of any other file."""
    is_in_full = str(content.get("class_path")).endswith("Decoder")
    return content.get("init_args", content) if is_in_full else content


def _read(path: Path, within: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path in within:
        raise ValueError(f"{path}: names itself, by way of {within[-1]}")
    try:
        _require_shallow(str(path), path.read_text(encoding="utf-8"))
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except _UNREADABLE as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping, got {type(content).__name__}")
    return _included(content, path.parent, (*within, path))


def _require_shallow(where: str, text: str) -> None:
    """Refuses YAML in which parsers, which are recursive, would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"{where}: expected at most {_DEEPEST} levels, got more")


def _included(value: Any, folder: Path, within: tuple[Path, ...] = ()) -> Any:
    """The value with the contents of every file that it names."""
    if isinstance(value, str) and value.endswith(".yaml"):
        found = _found(value, folder)
        return _read(found, within) if found else value
    if isinstance(value, list):
        return [_included(item, folder, within) for item in value]
    if not isinstance(value, dict):
        return value
    own = {key: _included(item, folder, within) for key, item in value.items() if key != "defaults"}
    if "defaults" not in value:
        return own
    bases, merged = value["defaults"], dict[str, Any]()
    for name in bases if isinstance(bases, list) else [bases]:
        merged = merge(merged, _read(find(str(name), folder), within))
    return merge(merged, own)


def merge(old: Any, new: Any) -> Any:
    """Lays one configuration over another, as the head of this module says; both stay."""
    if isinstance(old, str) and isinstance(new, dict) and "init_args" in new:
        old = {"class_path": old}  # a class that was given by its name alone
    if not isinstance(old, dict) or not isinstance(new, dict) or _starts_anew(old, new):
        old = {}
    if not isinstance(new, dict):
        return new
    merged = dict(old)
    for key, value in new.items():
        if value is None and isinstance(merged.get(key), dict):
            del merged[key]
        elif key.endswith("+"):
            before = merged.get(key[:-1]) or []
            if not isinstance(before, list) or not isinstance(value, list):
                raise ValueError(f"configuration: {key} appends {value!r} to {before!r}: no lists")
            merged[key[:-1]] = [*before, *value]
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def _starts_anew(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether another class takes the place of one, unless it is a subclass."""
    before, now = old.get("class_path"), new.get("class_path")
    if before is None or now is None or before == now:
        return False
    one, two = _class(now), _class(before)
    return one is None or two is None or not issubclass(one, two)


def _class(name: str) -> type | None:
    """The class that a configuration means; short names are those of modules that are loaded."""
    if "." in name:
        module, _, kind = name.rpartition(".")
        try:
            found = getattr(import_module(module), kind, None)
        except ImportError:
            return None  # the parser says so
        return found if isinstance(found, type) else None
    for _ in range(2):
        # A copy: looking at lazy modules imports others.
        for module, content in list(sys.modules.items()):
            found = getattr(content, name, None) if module.startswith(_SHORT_NAMES) else None
            if isinstance(found, type):
                return found
        import_module("lit_dlm.commands.trainer")  # loads all of them
    return None


def with_files(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with the contents of the files that they name.

    All ``--config`` files become one document, which stands where the first of them stood: flags
    behind it win over all files, later ones too.
    """
    before: list[str] = []
    files: list[tuple[str, str]] = []
    flags: list[tuple[str, str, str]] = []  # behind the first file
    given = list(arguments)
    while given:
        argument = given.pop(0)
        option, equals, value = argument.partition("=")
        if option.startswith("-") and not equals and given and not given[0].startswith("-"):
            value = given.pop(0)
        if option in ("--config", "-c"):
            files.append((option, value))
        elif files:
            flags.append((option, equals, value))
        else:
            before += _words(option, equals, value)
    if not files:
        return before
    merged: Any = {}
    for option, value in files:
        if is_inline := value.lstrip().startswith("{"):
            _require_shallow(option, value)
        merged = merge(merged, decoder_options(yaml.safe_load(value) if is_inline else load(value)))
    behind: list[str] = []
    for option, equals, value in flags:
        if not (equals or value) or not _set(merged, option.removeprefix("--").split("."), value):
            behind += _words(option, equals, value)
    # One document, as jsonargparse would merge lists and classes of two by rules of its own.
    return [*before, f"--config={json.dumps(merged)}", *behind]


def _words(option: str, equals: str, value: str) -> list[str]:
    """A flag as it was given, with the contents of a file that it includes."""
    value = _with_contents(value)
    return [f"{option}={value}"] if equals else [option, value] if value else [option]


def _set(document: dict[str, Any], keys: list[str], text: str) -> bool:
    """Sets in the document of all files what the parser would set otherwise than a file does.

    That is a class, a list or a mapping, to which jsonargparse hands settings of the class that was
    there before, and anything about decoders, which lie in mappings. The flag may leave
    ``init_args`` out, or give it where the file left it out. A class given by its name alone takes
    over the settings that it has as well. Returns whether the document has the place.
    """
    if keys[0] not in document or keys[-1].endswith("+"):
        return False
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException):
        return False
    place = _place(document, keys)
    if place is None:
        return False
    name = keys[-1]
    value, old = _included(parsed["value"], Path()), place.get(name)
    kind = _class(value) if isinstance(value, str) and isinstance(old, dict) else None
    if kind is not None:
        place[name] = {"class_path": value, "init_args": _shared_settings(kind, old)}
    elif not (isinstance(value, dict | list) or {"decoders", "sweep"} & set(keys)):
        return False
    elif value is None and isinstance(old, dict):
        del place[name]
    else:
        is_class = isinstance(value, dict) and "class_path" in value
        place[name] = merge(old, value) if is_class else value
    return True


def _shared_settings(kind: type, old: Any) -> dict[str, Any]:
    """Of the settings of another class those that this one has as well."""
    initialisers = (vars(one).get("__init__") for one in kind.__mro__)
    known = {name for one in initialisers if one for name in inspect.signature(one).parameters}
    return {key: value for key, value in (old.get("init_args") or {}).items() if key in known}


def _place(document: dict[str, Any], keys: list[str]) -> dict[str, Any] | None:
    """The mapping that the last key is set in."""
    place = document
    for key in keys[:-1]:
        if key not in place and key != "init_args" and {"class_path", "init_args"} & set(place):
            place = place.setdefault("init_args", {})
        elif key == "init_args" and "class_path" not in place and key not in place:
            continue  # a decoder in short form
        if isinstance(place.get(key), str):
            place[key] = {"class_path": place[key]}
        inner = place.setdefault(key, {}) if key == "init_args" else place.get(key)
        if not isinstance(inner, dict):
            return None
        place = inner
    if "class_path" in place and keys[-1] not in ("class_path", "init_args"):
        place = place.setdefault("init_args", {})
    return place


def _with_contents(text: str) -> str:
    if ".yaml" not in text:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # of another kind, such as a pattern
    found = _included(value, Path())
    return text if found == value else json.dumps(found)
