"""Configuration files: what they include, where they are found, how a command line joins them.

A file is a mapping; it includes other files in one of two ways::

    defaults: [../method/tracerl.yaml, ../data/rollouts_math.yaml]   # start from these, in order
    model:
      init_args:
        backbone: ../backbone/dream.yaml       # a value: the contents of that file

``defaults`` may be in any mapping. Names are relative to the file, then to the packaged ``configs``
folder, with or without ``.yaml``. Files are joined before anything is parsed: mappings key by key,
lists as a whole (``key+`` appends); null removes a mapping, and another class, but for a subclass
of the user's, starts anew. So
``${run_dir}`` and the like may be in any part, and a second file can add one decoder to those of
the first. Nothing here imports torch: a mistake in a name costs no more than Python's own start.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_dlm.config.names import NAMES
from lit_dlm.system.options import nearest

FOLDER = (Path(__file__).parents[1] / "configs").resolve()
"""The configurations of this package; in a checkout, a link to the folder at its top."""
_DEEPEST = 50
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError)


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


def maker(folder: Path) -> str:
    """Says what makes missing traces or their projector: the experiment whose run folder it is."""
    options = ("trajectories_dir", "projector_dir")
    written = [f"'{option}': '${{run_dir}}/{folder.name}'" for option in options]
    for name in packaged("exp"):
        lines = find(name).read_text(encoding="utf-8").splitlines()
        if f"run_dir: {folder.parent}" in lines and any(one in str(load(name)) for one in written):
            return f"'lit-dlm predict --config {name}' makes it"
    return "'lit-dlm recipes' tells what makes it, with the same --run_dir"


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
    return _included(mapping(str(path), path.read_bytes()), path.parent, (*within, path))


def mapping(where: str, text: bytes) -> dict[str, Any]:
    """Parses a file without what it includes; errors name ``where``."""
    try:
        _require_shallow(where, text)
        content: Any = OmegaConf.to_container(OmegaConf.load(BytesIO(text)), resolve=False)
    except _UNREADABLE as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        got = "none" if not content else type(content).__name__
        raise ValueError(f"{where}: expected a mapping, got {got}")
    return content


def _require_shallow(where: str, text: bytes) -> None:
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
    bases = value["defaults"] if isinstance(value["defaults"], list) else [value["defaults"]]
    return reduce(merge, (*(_read(find(str(one), folder), within) for one in bases), own), {})


def merge(old: Any, new: Any) -> Any:
    """Merges one configuration over another, as the module's docstring says; changes neither."""
    if not isinstance(new, dict):
        return new
    if isinstance(old, str) and "init_args" in new:
        old = {"class_path": old}  # a class given by its name alone
    merged = dict(old) if isinstance(old, dict) and _of_one_class(old, new) else {}
    for key, value in new.items():
        if value is None and isinstance(merged.get(key), dict):
            del merged[key]
        elif str(key).endswith("+"):
            before = merged.get(key[:-1]) or []
            if not isinstance(before, list) or not isinstance(value, list):
                raise ValueError(f"configuration: {key} appends {value!r} to {before!r}: no lists")
            merged[key[:-1]] = [*before, *value]
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def _of_one_class(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two settings are of one class, given by its short name or its import path.

    So is a subclass from outside of the package, which is imported to know it.
    """
    if "class_path" not in old or "class_path" not in new:
        return True
    before, now = (str(one["class_path"]) for one in (old, new))
    if _short(before) == _short(now) or "." not in _short(now):
        return _short(before) == _short(now)
    try:
        kinds = [locate(NAMES.get(name, name)) for name in (now, before)]
    except (ErrorDuringImport, AttributeError):  # the latter for a module that may not be imported
        return False  # the parser will report it
    one, other = kinds
    return isinstance(one, type) and isinstance(other, type) and issubclass(one, other)


def _short(class_path: str) -> str:
    has_short_name = class_path.startswith(("lit_dlm.", "lightning.pytorch.", "torch.optim."))
    return class_path.rpartition(".")[2] if has_short_name else class_path


class Composed(NamedTuple):
    """What a command line asks for, before its types are parsed."""

    document: dict[str, Any]
    """Files and flags; ``${run_dir}`` and the like are as they were given."""
    values: dict[str, Any]
    """The same, for a run with its references replaced by :func:`resolved`."""
    left: list[str]
    """For the parser: words that are no flags, flags without a value, ``key+=``, settings whose
    mapping no file has, and a class in place of another, which keeps the settings of both."""


def compose(arguments: Sequence[str], *first: str) -> Composed:
    """Joins the files of a command line, then its flags, wherever they stand.

    Args:
        arguments: those behind the name of the command.
        first: files that come before those of ``--config``.

    Raises:
        ValueError: a file that is missing, is no mapping, or should come first; a place inside of a
            list; a class that is not known.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", action="append", nargs="?", const="", default=[])
    named, words = parser.parse_known_args(list(arguments))
    document = reduce(merge, map(load, first), dict[str, Any]())
    for number, name in enumerate(named.config):
        is_inline = name.lstrip().startswith("{")
        content = mapping("--config", name.encode()) if is_inline else load(name)
        content = decoder_options(content)
        if number and all(_names_class(content.get(part)) for part in ("model", "data")):
            raise ValueError(
                f"--config {name}: names the classes of model and data, and so would undo what "
                f"--config {named.config[0]} sets; give it first"
            )
        document = merge(document, content)
    left: list[str] = []
    changed: list[str] = []  # places of classes that the parser will replace
    for flag in _joined(words):
        option, equals, text = flag.partition("=")
        key, value = option.removeprefix("--").replace(".init_args.", "."), _value(text)
        is_behind = any(f"{key}.".startswith(f"{place}.") for place in changed)
        if not (equals and option.startswith("--")):
            left.append(flag)
        elif is_behind or not _set(document, key, value):
            if "${" in text:
                raise ValueError(f"{option}: expected a value without references, got {text}")
            _require_known(value, key)
            changed.append(key)
            left.append(f"{option}={value if isinstance(value, str) else json.dumps(value)}")
    _require_known(document, "")
    left.sort(key=lambda flag: flag.startswith("--print_config"))  # what follows would not be seen
    return Composed(document, document, left)


def _names_class(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "class_path" in value)


def _joined(words: Iterable[str]) -> list[str]:
    """Returns each flag and its value as one word."""
    joined: list[str] = []
    for word in words:
        is_value = joined and joined[-1].startswith("--") and "=" not in joined[-1]
        if is_value and not word.startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _value(text: str) -> Any:
    """Returns a list or mapping, with the contents of files that it names, null, or the text.

    Of other texts the parser knows whether they are numbers: ``--run_dir 7`` is a folder.
    """
    if text.strip()[:1] not in ("[", "{") and text != "null" and not text.endswith(".yaml"):
        return text
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException):
        return text
    return _included(parsed["value"], Path())


def _set(document: dict[str, Any], key: str, value: Any) -> bool:
    """Sets a flag in the document, if its mapping is there; returns whether it is."""
    place, keys = document, key.split(".")
    if keys[-1] in ("help", "class_path", "init_args") or key.endswith("+"):
        return False
    for name, after in pairwise(keys):
        options = _options(place)
        inner = options.get(name)
        if isinstance(inner, list) and after.isdecimal():
            whole = ".".join(keys[: keys.index(after)])
            raise ValueError(f"--{key}: lists are given as a whole, by --{whole}")
        if isinstance(inner, str) and inner.replace(".", "").isidentifier():
            inner = options[name] = {"class_path": inner}  # a class given by its name alone
        if not isinstance(inner, dict):
            return False
        place = inner
    options, name = _options(place), keys[-1]
    old = options.get(name)
    if isinstance(old, list) and any(isinstance(one, dict) for one in old):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and os.path.isfile(one):  # the parser would read it as YAML
                kind = "PromptsFile" if name.endswith("tasks") else "ResponsesFile"
                wanted = f"[{{class_path: {kind}, init_args: {{path: {one}}}}}]"
                raise ValueError(f"--{key}: expected classes, such as {wanted}, got a file")
    if isinstance(old, dict) and _names_class(old) and _names_class(value):
        return False
    if value is None and isinstance(old, dict) and options is place:
        del options[name]
    else:
        options[name] = value
    return True


def _options(place: dict[str, Any]) -> dict[str, Any]:
    """Returns the ``init_args`` of a class, any other mapping as it is."""
    is_class = bool({"class_path", "init_args"} & place.keys())
    return place.setdefault("init_args", {}) if is_class else place


def _require_known(value: Any, at: str) -> None:
    """Refuses a class path that is neither an import path nor a short name."""
    if isinstance(value, dict):
        name = str(value.get("class_path", "."))
        if "." not in name and name not in NAMES:
            raise ValueError(f"{at}: unknown class '{name}'{nearest(name, NAMES)}")
        for key, item in value.items():
            _require_known(item, at if key == "init_args" else f"{at}.{key}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            _require_known(item, at)


def resolved(document: dict[str, Any]) -> dict[str, Any]:
    """Returns a document with the values that its references, such as ``${run_dir}``, have."""
    try:
        return dict(OmegaConf.to_container(OmegaConf.create(document), resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        place = str(error.full_key).replace("init_args.", "")
        told = f"references like ${{run_dir}}, got {str(error).splitlines()[0]}"
        if absent := re.search(r"Environment variable '(\w+)' not found", str(error)):
            told = f"the environment variable {absent[1]}, which is not set"
        raise ValueError(f"{place}: expected {told}") from error


def setting_differences(found: Any, wanted: Any, key: str = "") -> Iterator[str]:
    """Yields the values that differ, in lines such as ``decoder.threshold: 0.9, now 0.8``."""
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        found, wanted = dict(enumerate(found)), dict(enumerate(wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() | wanted.keys()):
            inner = f"{key}.{name}" if key else name
            yield from setting_differences(found.get(name), wanted.get(name), inner)
    elif found != wanted:
        yield f"{key}: {found!r}, now {wanted!r}"
