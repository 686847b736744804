"""``lit-dlm download``: fetches what a configuration names on the hub, after showing sizes."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc import locate as locate_class
from typing import Any

from huggingface_hub import constants

from lit_dlm.backbones.location import hub_files, in_hub_cache, is_hub_id, is_local, locate
from lit_dlm.commands.run import parsed
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.system.terminal import PlainConsole
from lit_dlm.tasks.sources import on_hub, read_rows

_WANTED = {
    "model": "a folder with config.json, the tokenizer's files and *.safetensors",
    "tokenizer": "a folder with config.json and the tokenizer's files",
    "policy": "a folder with config.json and model.safetensors",
    "data": "a .jsonl, .json, .csv or .parquet file",
}


@dataclass(frozen=True, order=True)
class Source:
    """Something that a configuration reads: a model, a tokenizer, a policy or a task's data."""

    kind: str  # model, tokenizer, policy or data
    name: str
    option: str  # where the configuration names it first
    task: str = ""
    split: str | None = None

    @property
    def is_on_hub(self) -> bool:
        return on_hub(self.name) if self.kind == "data" else not is_local(self.name)

    def is_here(self) -> bool:
        """Whether it is on this machine; reading a data set contacts the hub unless offline."""
        if not self.is_on_hub:
            return self.kind != "data" or Path(self.name).expanduser().exists()
        if self.kind != "data":
            return in_hub_cache(self.name, weights=self.kind != "tokenizer")
        try:
            self.fetch()
        except ValueError:
            return False
        return True

    def fetch(self) -> None:
        # By the code that will read it later.
        if self.kind != "data":
            locate(self.name, weights=self.kind != "tokenizer")
        elif not self.task:
            read_rows(self.name, split=self.split or "train", required=())
        else:
            task: Any = locate_class(self.task)
            task(path=self.name, **({} if self.split is None else {"split": self.split}))


def sources(config: Any) -> list[Source]:
    """Returns what a parsed configuration reads, models first; not what the run itself makes."""
    unique: dict[tuple[str, str, str | None], Source] = {}
    # A policy or projector below the run folder is made by an earlier step of the same run.
    own = f"{config.get('run_dir')}/"
    for source in (one for one in _walk(config, "") if not one.name.startswith(own)):
        unique.setdefault((source.kind, source.name, source.split), source)
    models = {source.name for source in unique.values() if source.kind == "model"}
    kinds = list(_WANTED)
    return sorted(
        # A model's files include its tokenizer, which must not be fetched, or counted, twice.
        (s for s in unique.values() if not (s.kind == "tokenizer" and s.name in models)),
        key=lambda source: kinds.index(source.kind),
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
    kind: Any = locate_class(class_path)
    module = getattr(kind, "__module__", "")
    # By module and not by base, since options of outside classes with such names may mean anything.
    if module.startswith(("lit_dlm.tasks.", "lit_dlm.toy.")):
        if source := options.get("path") or getattr(kind, "hub_id", None):
            option = f"{at}.init_args.path"
            yield Source("data", str(source), option, class_path, options.get("split"))
            if options.get("num_shots"):
                shots = options.get("shots_path")
                option = f"{at}.init_args.shots_path" if shots else option
                yield Source("data", str(shots or source), option, class_path, "train")
    elif module.startswith("lit_dlm.datamodules.") and isinstance(options.get("path"), str):
        yield Source("data", options["path"], f"{at}.init_args.path", split=options.get("split"))
    elif module.startswith(("lit_dlm.backbones.", "lit_dlm.rewards.")):
        named = {**options, "vision.path": (options.get("vision") or {}).get("path")}
        for key in ("path", "adapter", "vision.path"):
            if isinstance(named.get(key), str):
                yield Source("model", named[key], f"{at}.init_args.{key}")
    elif CommitPolicy in getattr(kind, "__mro__", ()) and is_hub_id(str(options.get("path"))):
        yield Source("policy", options["path"], f"{at}.init_args.path")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 1 if something is missing that was not fetched."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm download",
        description="Fetches the models, tokenizers and data sets that a configuration names on "
        "the hub. Without --yes it tells their sizes only; with HF_HUB_OFFLINE=1, what is missing "
        "and where it goes. Further options are those of 'lit-dlm predict'.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", required=True, help="may be repeated")
    parser.add_argument("--yes", action="store_true", help="fetch; otherwise only print sizes")
    options, rest = parser.parse_known_args(list(arguments))
    # Parsed as a run would be, so that overlays and flags count.
    configs = [f"--config={config}" for config in options.config]
    return _fetch(sources(parsed(["predict", *configs, *rest])), is_wanted=options.yes)


def _fetch(named: Sequence[Source], *, is_wanted: bool) -> int:
    """Prints what is here, what is missing and where it belongs, then fetches if ``is_wanted``."""
    if constants.HF_HUB_OFFLINE:
        os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when ``datasets`` is imported
    console = PlainConsole(soft_wrap=True, highlight=False)
    left: dict[Source, int] = {}
    absent = False
    for source in named:
        mark, message = "here", ""
        # Asked for even where all is cached: a newer revision may add files.
        if source.is_on_hub and not constants.HF_HUB_OFFLINE:
            left[source], size = _sizes(source)
            mark, message = "on hub", f": {_bytes(size)}, {_bytes(left[source])} of them to fetch"
        elif not source.is_here():
            mark, absent = "missing", True
            message = f": put {_WANTED[source.kind]} on this machine and name it in {source.option}"
        console.print(f"{mark:8} {source.kind:9} {source.name}{message}")
    total, cache = sum(left.values()), Path(constants.HF_HUB_CACHE)
    if total:
        existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if total > free:
            raise ValueError(
                f"download: {_bytes(total)} do not fit into {cache} ({_bytes(free)} free); set "
                "HF_HUB_CACHE to a folder on a larger disk"
            )
        console.print(f"{_bytes(total)} to fetch at most; {_bytes(free)} free in {cache}")
        if not is_wanted:
            console.print("Nothing was fetched: add --yes.")
            return 1
    if is_wanted:
        # After all sizes have been added up, so that a disk that is too small is not filled first.
        for source in left:
            source.fetch()
            console.print(f"fetched  {source.kind:9} {source.name}")
    return int(absent)


def _sizes(source: Source) -> tuple[int, int]:
    files = hub_files(
        source.name,
        weights=source.kind != "tokenizer",
        repo_type="dataset" if source.kind == "data" else "model",
    )
    left = sum(file.file_size or 0 for file in files if file.will_download)
    return left, sum(file.file_size or 0 for file in files)


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
