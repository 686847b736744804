"""``lit-dlm download``: what a configuration names on the Hugging Face hub, sizes told first."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc import locate as locate_class
from typing import Any

import yaml
from huggingface_hub import constants
from rich.console import Console
from rich.table import Table

from lit_dlm.backbones.location import hub_files, in_hub_cache, is_local, locate
from lit_dlm.tasks.sources import on_hub


@dataclass(frozen=True, order=True)
class Source:
    """Something that a configuration reads: a model, a tokenizer or the data of a task."""

    kind: str
    """``model``, ``tokenizer`` or ``data``."""
    name: str
    option: str
    """Where the configuration names it first."""
    task: str = ""
    split: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it lies on this machine; reading a data set asks the hub unless it is offline."""
        if self.kind != "data":
            return is_local(self.name) or in_hub_cache(self.name, weights=self.kind == "model")
        if not on_hub(self.name):
            return Path(self.name).expanduser().exists()
        try:
            self.fetch()
        except ValueError:
            return False
        return True

    def fetch(self) -> None:
        # Through the code that will read it.
        if self.kind != "data":
            locate(self.name, weights=self.kind == "model")
            return
        task: Any = locate_class(self.task)
        task(path=self.name, **({} if self.split is None else {"split": self.split}))


def sources(config: Any) -> list[Source]:
    """What a parsed configuration reads from the hub or from files of the user's, models first.

    Each is there once, and a tokenizer only where its model is not among them.
    """
    found: dict[tuple[str, str, str | None], Source] = {}
    for source in _walk(config, ""):
        found.setdefault((source.kind, source.name, source.split), source)
    models = {source.name for source in found.values() if source.kind == "model"}
    order = {"model": 0, "tokenizer": 1, "data": 2}
    return sorted(
        (s for s in found.values() if not (s.kind == "tokenizer" and s.name in models)),
        key=lambda source: order[source.kind],
    )


def _walk(value: Any, at: str) -> Iterator[Source]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _walk(item, f"{at}[{number}]")
    if not isinstance(value, dict):
        return
    if isinstance(value.get("class_path"), str):
        yield from _of_class(value["class_path"], value.get("init_args") or {}, at)
    for key, item in value.items():
        yield from _walk(item, f"{at}.{key}" if at else str(key))


def _of_class(class_path: str, options: dict[str, Any], at: str) -> Iterator[Source]:
    if isinstance(options.get("tokenizer"), str):
        yield Source("tokenizer", options["tokenizer"], f"{at}.init_args.tokenizer")
    found: Any = locate_class(class_path)
    module = getattr(found, "__module__", "")
    path = options.get("path")
    option = f"{at}.init_args.path"
    if module.startswith(("lit_dlm.tasks.", "lit_dlm.toy.")):
        if source := path or getattr(found, "hub_id", None):
            yield Source("data", str(source), option, class_path, options.get("split"))
    elif module.startswith(("lit_dlm.backbones.", "lit_dlm.rewards.")):
        for key in ("path", "adapter"):
            if isinstance(options.get(key), str):
                yield Source("model", options[key], f"{at}.init_args.{key}")


def main(arguments: Sequence[str]) -> int:
    """Runs the command on what follows its name; other options are those of configurations.

    The exit status is 1 if something is missing that was not fetched.
    """
    options, rest = _parser().parse_known_args(list(arguments))
    # Here: Lightning takes seconds to import.
    from lit_dlm.commands.trainer import main as run_trainer

    command = ["predict"]
    for config in options.config:
        command += ["--config", config]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run_trainer([*command, *rest, "--print_config"])
    if not text.getvalue():
        return 2  # the parser has said why
    named = sources(yaml.safe_load(text.getvalue()))
    console = Console(soft_wrap=True)
    if constants.HF_HUB_OFFLINE:
        return _tell_offline(named, console)
    return _fetch(named, console, yes=options.yes)


def _tell_offline(named: Sequence[Source], console: Console) -> int:
    """Says what is here and what to put where; asks no network."""
    os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when ``datasets`` is imported, at the first use
    status = 0
    for source in named:
        if source.is_here:
            console.print(f"here     {source.kind:9} {source.name}", markup=False)
            continue
        if source.kind == "data":
            wanted = "a .jsonl, .json, .csv or .parquet file"
        else:
            wanted = "a folder with config.json and the tokenizer's files"
            wanted += " and *.safetensors" if source.kind == "model" else ""
            wanted += f" (or a copy of the hub's cache in {constants.HF_HUB_CACHE})"
        console.print(
            f"missing  {source.kind:9} {source.name}: put {wanted} on this machine and name it in "
            f"{source.option}",
            markup=False,
        )
        status = 1
    return status


def _fetch(named: Sequence[Source], console: Console, *, yes: bool) -> int:
    """Lists sizes, then fetches with ``yes``."""
    table = Table("kind", "name", "size", "to fetch", title="What the configuration names")
    wanted, absent, total = [], [], 0
    for source in named:
        if source.kind == "data" and not on_hub(source.name):
            if not source.is_here:
                absent.append(source)
            size, left = "a local file" if source.is_here else "no such file", 0
        elif source.kind != "data" and is_local(source.name):
            size, left = "a local folder", 0
        else:
            files = hub_files(
                source.name,
                weights=source.kind == "model",
                repo_type="dataset" if source.kind == "data" else "model",
            )
            left = sum(file.file_size or 0 for file in files if file.will_download)
            size = _bytes(sum(file.file_size or 0 for file in files))
            wanted.append(source)
        total += left
        table.add_row(source.kind, source.name, size, _bytes(left) if left else "-")
    console.print(table)
    cache = Path(constants.HF_HOME)
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    console.print(f"{_bytes(total)} to fetch at most; {_bytes(free)} free in {cache}", markup=False)
    for source in absent:
        console.print(
            f"{source.name}: not on the hub; put the file there, or name it in {source.option}",
            markup=False,
        )
    if total > free:
        raise ValueError(
            f"download: {_bytes(total)} do not fit into {cache} ({_bytes(free)} free); set HF_HOME "
            "to a folder on a larger disk"
        )
    if not yes:
        console.print("Nothing was fetched: add --yes.")
        return 1 if absent or total else 0
    for source in wanted:
        source.fetch()
        console.print(f"fetched  {source.kind:9} {source.name}", markup=False)
    return 1 if absent else 0


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lit-dlm download",
        description="Fetches the models, tokenizers and data sets that a configuration names on "
        "the hub. Without --yes it tells their sizes only; with HF_HUB_OFFLINE=1, what is missing "
        "and where it goes. Further options are those of 'lit-dlm predict'.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", required=True, help="may be repeated")
    parser.add_argument("--yes", action="store_true", help="fetch; else sizes are told only")
    return parser
