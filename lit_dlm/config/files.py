"""Configuration files: what they include, where they are found, how a command line joins them.

A file is a mapping; it includes other files in one of two ways::

    defaults: [../method/tracerl.yaml, ../data/rl_math.yaml]   # start from these, in order
    model:
      init_args:
        backbone: ../backbone/dream.yaml       # a value: the contents of that file

``defaults`` may be in any mapping. Names are relative to the file, then to the packaged ``configs``
folder, with or without ``.yaml``; experiments lie in a folder for each method, and are found
without its name too. Files are joined before anything is parsed: mappings key by key, lists as a
whole (``key+`` appends); null removes a mapping, and another class, but for a subclass of the
user's, starts anew. So ``${run_dir}`` and the like may be in any part, and a second file can add
one decoder to those of the first. Nothing here imports torch: a mistake in a name costs no more
than Python's own start.
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
from typing import Any, NamedTuple, NoReturn

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_dlm.config.names import NAMES
from lit_dlm.system.options import nearest

FOLDER = (Path(__file__).parents[1] / "configs").resolve()
"""The configurations of this package; in a checkout, a link to the folder at its top."""
_DEEPEST = 50
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError)


def _refuse(place: str, message: str) -> NoReturn:
    raise ValueError(f"{place}: {message}")


def find(name: str, beside: Path | None = None) -> Path:
    """Returns the path of a file, or of a packaged one such as ``exp/tracelock_tiny``."""
    if found := _found(name, beside):
        return found
    hint = nearest(name.removesuffix(".yaml"), packaged())
    if Path(name).parent.name == "exp":
        # Many a variant is an experiment and an overlay, whose names resemble no single file.
        hint += " ('lit-dlm recipes' lists experiments and what may follow them)"
    searched = f"{(beside or Path()).resolve()} and {FOLDER}"
    _refuse(f"configuration '{name}'", f"expected a file, got none in {searched}{hint}")


def _found(name: str, beside: Path | None) -> Path | None:
    for folder in ((one / name).parent for one in (beside or Path(), FOLDER)):
        # An experiment is in the folder of some method; a test keeps their names unique.
        folders = [folder, *(folder.glob("*/") if folder.name == "exp" else ())]
        for file in (Path(name).name, f"{Path(name).name}.yaml"):
            if paths := [one / file for one in folders if (one / file).is_file()]:
                return paths[0].resolve()
    return None


def packaged(folder: str = "") -> list[str]:
    """Returns the packaged files below a folder by the names that find them: ``exp/sft_dream``."""
    paths = sorted((FOLDER / folder).rglob("*.yaml"))
    names = (path.relative_to(FOLDER).with_suffix("").as_posix() for path in paths)
    return [re.sub(r"^exp/\w+/", "exp/", name) for name in names]


def variants(name: str) -> list[list[str]]:
    """Returns words that may follow an experiment on a command line: ``# Also:`` of its head."""
    lines = re.findall(r"^# Also: (.*)$", find(name).read_text(encoding="utf-8"), re.MULTILINE)
    return [line.split() for line in lines]


def experiments() -> list[list[str]]:
    """Returns the packaged experiments, each alone and before every variant, as ``--config``."""
    return [["--config", one, *more] for one in packaged("exp") for more in ([], *variants(one))]


def maker(folder: Path) -> str:
    """Says what makes missing traces or their projector: the experiment whose run folder it is."""
    for words in experiments():
        # What decodes for training is called so; to compose all others would take seconds.
        if words[1].startswith(("exp/generate_", "exp/distill_")):
            document = compose(words).document
            is_written = f"'${{run_dir}}/{folder.name}'" in str(document)
            if is_written and document["run_dir"] == str(folder.parent):
                return f"'lit-dlm predict {' '.join(words)}' makes it"
    return "'lit-dlm recipes' tells what makes it, with the same --run_dir"


def load(name: str) -> dict[str, Any]:
    """Reads a configuration file and all that it includes; ``${run_dir}`` etc. stay unresolved."""
    return _read(find(name))


def decoder_options(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a decode file, even if it names its class; any other file as is."""
    is_in_full = str(content.get("class_path")).endswith("Decoder")
    return content.get("init_args", content) if is_in_full else content


def _read(path: Path, within: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path in within:
        _refuse(str(path), f"names itself, by way of {within[-1]}")
    return _included(mapping(str(path), path.read_bytes()), path.parent, (*within, path))


def mapping(where: str, text: bytes) -> dict[str, Any]:
    """Parses a file without what it includes; errors name ``where``."""
    try:
        _require_shallow(where, text)
        # OmegaConf's reader and not yaml's: 1e-3 is a number, and a key given twice is refused.
        # References are kept: what they mean depends on files and flags that come later.
        content: Any = OmegaConf.to_container(OmegaConf.load(BytesIO(text)), resolve=False)
    except _UNREADABLE as error:
        _refuse(where, " ".join(str(error).split()))
    if not isinstance(content, dict) or not content:
        _refuse(where, f"expected a mapping, got {type(content).__name__ if content else 'none'}")
    return content


def _require_shallow(where: str, text: bytes) -> None:
    """Refuses YAML so deep that parsers, which are recursive, would end the process."""
    depth = 0
    # Events come one by one, so that this ends where a parser of the whole would have overflowed.
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            _refuse(where, f"expected at most {_DEEPEST} levels, got more")


def _included(value: Any, folder: Path, within: tuple[Path, ...] = ()) -> Any:
    """Returns the value with every file name in it replaced by the file's contents."""
    if isinstance(value, str) and value.endswith(".yaml"):
        # What is not there stays a text: some options take the name of a YAML file.
        found = _found(value, folder)
        return _read(found, within) if found else value
    if isinstance(value, list):
        return [_included(item, folder, within) for item in value]
    if not isinstance(value, dict):
        return value
    # What a mapping says itself comes last, wherever ``defaults`` stands in it.
    own = {key: _included(item, folder, within) for key, item in value.items() if key != "defaults"}
    if "defaults" not in value:
        return own
    bases = value["defaults"] if isinstance(value["defaults"], list) else [value["defaults"]]
    return reduce(merge, (*(_read(find(str(one), folder), within) for one in bases), own), {})


def merge(old: Any, new: Any) -> Any:
    """Merges one configuration over another, as the module's docstring says; changes neither.

    Lists are whole: item by item, a shorter list would keep the end of the longer one, and settings
    of one class would go to the class that stands in its place. :func:`_set` does the same for
    flags, which jsonargparse would merge into the items of an old list of equal length.
    """
    if not isinstance(new, dict):
        return new
    if isinstance(old, str) and "init_args" in new:
        old = {"class_path": old}  # a class given by its name alone
    merged = dict(old) if isinstance(old, dict) and _of_one_class(old, new) else {}
    for key, value in new.items():
        if value is None and isinstance(merged.get(key), dict):
            del merged[key]
        elif str(key).endswith("+") and isinstance(value, list):
            name = key[:-1] if key[:-1] in merged else key  # left for what this is merged over
            before = merged.get(name) or []
            if not isinstance(before, list):
                _refuse("configuration", f"{key} appends {value!r} to {before!r}: no list")
            merged[name] = [*before, *value]
        else:
            if isinstance(value, list):  # whole, so nothing waits for it any more
                merged.pop(f"{key}+", None)
            merged[key] = merge(merged.get(key), value)
    return merged


def _of_one_class(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two settings are of one class, given by its short name or its import path.

    So is a subclass from outside of the package: what an experiment sets for the class that it
    derives from stays, as users expect of one that adds a loss. Only such a class is imported.
    """
    if "class_path" not in old or "class_path" not in new:
        return True
    before, now = (str(one["class_path"]) for one in (old, new))
    if _short(before) == _short(now) or "." not in _short(now):
        return _short(before) == _short(now)
    try:
        kind, base = (locate(NAMES.get(name, name)) for name in (now, before))
    except (ErrorDuringImport, AttributeError):  # the latter for a module that may not be imported
        return False  # the parser will report it
    return isinstance(kind, type) and isinstance(base, type) and issubclass(kind, base)


def _short(class_path: str) -> str:
    # A user's class may have the name of one of ours, and is another one.
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
    """
    # Without abbreviations: ``--conf`` is for the parser to refuse, with what it is meant for.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", action="append", nargs="?", const="", default=[])
    named, words = parser.parse_known_args(list(arguments))
    document = reduce(merge, map(load, first), dict[str, Any]())
    for number, name in enumerate(named.config):
        # A configuration may be given in line, in braces; so is one that another process hands on.
        is_inline = name.lstrip().startswith("{")
        content = mapping("--config", name.encode()) if is_inline else load(name)
        content = decoder_options(content)
        # An overlay changes settings; an experiment behind it would start both classes anew.
        if number and all(_names_class(content.get(part)) for part in ("model", "data")):
            message = "names the classes of model and data, and so would undo what --config "
            _refuse(f"--config {name}", f"{message}{named.config[0]} sets; give it first")
        document = merge(document, content)
    left = _apply(document, _joined(words))
    _require_known(document, "")
    return Composed(document, document, left)


def _names_class(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "class_path" in value)


def _joined(words: Iterable[str]) -> list[str]:
    """Returns each flag and its value as one word."""
    joined: list[str] = []
    for word in words:
        # A single dash may begin a value: a negative number.
        is_value = joined and joined[-1].startswith("--") and "=" not in joined[-1]
        if is_value and not word.startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _apply(document: dict[str, Any], words: Iterable[str]) -> list[str]:
    """Sets flags in the document; returns the words that are left to the parser."""
    left: list[str] = []
    changed: list[str] = []  # places of classes that the parser will replace
    for word in words:
        option, equals, text = word.partition("=")
        if not equals or not option.startswith("--"):
            left.append(word)
            continue
        key, value = option.removeprefix("--").replace(".init_args.", "."), _value(text)
        # Behind a class that the parser is to change, a setting is one of the new class.
        is_behind = any(f"{key}.".startswith(f"{place}.") for place in changed)
        if not is_behind and _set(document, key, value):
            continue
        if "${" in text:  # references are resolved in the document, before the parser sees it
            _refuse(option, f"expected a value without references, got {text}")
        _require_known(value, key)
        changed.append(key)
        left.append(f"{option}={value if isinstance(value, str) else json.dumps(value)}")
    # The parser prints and ends at this flag: what follows would not be seen.
    return sorted(left, key=lambda word: word.startswith("--print_config"))


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
    name = key.rpartition(".")[2]
    if name in ("help", "class_path", "init_args") or key.endswith("+"):
        return False
    if (place := _parent(document, key)) is None:
        return False
    options = _options(place)
    old = options.get(name)
    if isinstance(old, list) and any(isinstance(one, dict) for one in old):
        _require_classes(key, value)
    if isinstance(old, dict) and _names_class(old) and _names_class(value):
        return False  # the parser knows which settings both classes have, and keeps these
    if value is None and isinstance(old, dict) and options is place:
        del options[name]  # an entry, such as a decoder; to an option of a class, None is a value
    else:
        options[name] = value
    return True


def _parent(document: dict[str, Any], key: str) -> dict[str, Any] | None:
    """Returns the mapping that a flag's last name is in, if files have it."""
    place, keys = document, key.split(".")
    for name, after in pairwise(keys):
        options = _options(place)
        inner = options.get(name)
        if isinstance(inner, list) and after.isdecimal():
            whole = ".".join(keys[: keys.index(after)])
            _refuse(f"--{key}", f"lists are given as a whole, by --{whole}")
        if isinstance(inner, str) and inner.replace(".", "").isidentifier():
            inner = options[name] = {"class_path": inner}  # a class given by its name alone
        if not isinstance(inner, dict):
            return None
        place = inner
    return place


def _options(place: dict[str, Any]) -> dict[str, Any]:
    """Returns the ``init_args`` of a class, any other mapping as it is."""
    is_class = bool({"class_path", "init_args"} & place.keys())
    return place.setdefault("init_args", {}) if is_class else place


def _require_classes(key: str, value: Any) -> None:
    """Refuses a user's data file among classes: the parser would read the file itself as YAML."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str) and os.path.isfile(one):
            kind = "PromptsFile" if key.endswith("tasks") else "ResponsesFile"
            wanted = f"[{{class_path: {kind}, init_args: {{path: {one}}}}}]"
            _refuse(f"--{key}", f"expected classes, such as {wanted}, got a file")


def _require_known(value: Any, at: str) -> None:
    """Refuses a class path that is neither an import path nor a short name."""
    if isinstance(value, dict):
        name = str(value.get("class_path", "."))
        if "." not in name and name not in NAMES:
            _refuse(at, f"unknown class '{name}'{nearest(name, NAMES)}")
        parts = {"class_path", "init_args", "dict_kwargs"}
        if parts & value.keys() and (beside := ", ".join(map(str, value.keys() - parts))):
            _refuse(at, f"expected class_path and init_args alone; put {beside} below init_args")
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
        # OmegaConf's text spans lines and names neither the flag nor what would be right.
        place = str(error.full_key).replace("init_args.", "")
        wanted = f"references like ${{run_dir}}, got {str(error).splitlines()[0]}"
        if absent := re.search(r"Environment variable '(\w+)' not found", str(error)):
            wanted = f"the environment variable {absent[1]}, which is not set"
        _refuse(place, f"expected {wanted}")


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
