"""Configuration files: parts, overlays on parts, and where they are found.

A file is a mapping; it includes other files in one of two ways::

    defaults: [../method/tracerl.yaml, ../data/rollouts_math.yaml]   # start from these, in order
    model:
      init_args:
        backbone: ../backbone/dream.yaml       # a value: the contents of that file

``defaults`` may be in any mapping. Names are relative to the file, then to the packaged ``configs``
folder, with or without ``.yaml``. Files are merged before anything is parsed: mappings key by key,
lists as a whole (``key+`` appends); null removes a mapping, and settings of a class are dropped if
another class, other than a subclass, replaces it. So ``${run_dir}`` and the like may be in any
part, and a second file can add one decoder to those of the first.
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
"""The configurations of this package; in a checkout, a link to the folder at its top."""
_MOST_LISTED = 20
_DEEPEST = 50
_UNREADABLE = (
    yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError, RecursionError
)  # fmt: skip
_SHORT_NAMES = ("lit_dlm.", "lightning.pytorch.", "torch.optim")
"""Modules whose classes configurations may give by name alone."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint such as ``; did you mean 'threshold'?``, else all known names if few."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= _MOST_LISTED else ""


def find(name: str, beside: Path | None = None) -> Path:
    """Returns the path of a file, or of a packaged one such as ``exp/tracelock_tiny``."""
    if found := _found(name, beside):
        return found
    searched = f"{(beside or Path()).resolve()} and {FOLDER}"
    hint = nearest(name.removesuffix(".yaml"), packaged())
    raise ValueError(f"configuration '{name}': expected a file, got none in {searched}{hint}")


def packaged(folder: str = "") -> list[str]:
    """Returns the names of the packaged files below a folder, such as ``exp/tracelock_tiny``."""
    paths = sorted((FOLDER / folder).rglob("*.yaml"))
    return [path.relative_to(FOLDER).with_suffix("").as_posix() for path in paths]


def _found(name: str, beside: Path | None) -> Path | None:
    folders = (beside or Path(), FOLDER)
    paths = (folder / file for folder in folders for file in (name, f"{name}.yaml"))
    return next((path.resolve() for path in paths if path.is_file()), None)


def load(name: str) -> dict[str, Any]:
    """Reads a configuration file and all that it includes; ``${run_dir}`` etc. stay unresolved."""
    return _read(find(name))


def decoder_options(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a decode file, even if it names its class; any other file as is."""
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
    if not isinstance(content, dict) or not content:
        got = "none" if not content else type(content).__name__
        raise ValueError(f"{path}: expected a mapping, got {got}")
    return _included(content, path.parent, (*within, path))


def _require_shallow(where: str, text: str) -> None:
    """Refuses YAML so deep that parsers, which are recursive, would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"{where}: expected at most {_DEEPEST} levels, got more")


def _included(value: Any, folder: Path, within: tuple[Path, ...] = ()) -> Any:
    """Returns the value with every file name in it replaced by the file's contents."""
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
    """Merges one configuration over another, as the module's docstring says; changes neither."""
    if isinstance(old, str) and isinstance(new, dict) and "init_args" in new:
        old = {"class_path": old}  # a class given by its name alone
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
    before, now = old.get("class_path"), new.get("class_path")
    if before is None or now is None or before == now:
        return False
    one, two = _class(now), _class(before)
    return one is None or two is None or not issubclass(one, two)


def _class(name: str) -> type | None:
    """Returns the class that a name means; short names are looked up in loaded modules."""
    if "." in name:
        module, _, kind = name.rpartition(".")
        try:
            found = getattr(import_module(module), kind, None)
        except ImportError:
            return None  # the parser will report it
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
    """Returns command-line arguments with the contents of the files that they name.

    All ``--config`` files become one document in the place of the first one: flags after it win
    over all files, even later ones.
    """
    before: list[str] = []
    files: list[tuple[str, str]] = []
    flags: list[tuple[str, str, str]] = []  # after the first file
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
    # One document, since jsonargparse would merge lists and classes of two by its own rules.
    return [*before, f"--config={json.dumps(merged)}", *behind]


def _words(option: str, equals: str, value: str) -> list[str]:
    """Returns a flag as given, with the contents of any file that its value names."""
    value = _with_contents(value)
    return [f"{option}={value}"] if equals else [option, value] if value else [option]


def _set(document: dict[str, Any], keys: list[str], text: str) -> bool:
    """Sets a flag in the document of all files if the parser would not treat it like a file's.

    That is a class, a list or a mapping, to which jsonargparse would pass settings of the class
    that was there before, and anything about decoders, which are in mappings. The flag may leave
    ``init_args`` out, or give it where the file left it out. A class given by its name alone keeps
    the old settings that it shares. Returns whether the flag was set.
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
    initialisers = (vars(one).get("__init__") for one in kind.__mro__)
    known = {name for one in initialisers if one for name in inspect.signature(one).parameters}
    return {key: value for key, value in (old.get("init_args") or {}).items() if key in known}


def _place(document: dict[str, Any], keys: list[str]) -> dict[str, Any] | None:
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
        return text  # text of another kind, such as a pattern
    found = _included(value, Path())
    return text if found == value else json.dumps(found)
