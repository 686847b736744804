"""``lit-dlm traj``: look at stored trajectories, verify them, convert them, and keep them.

A command returns the exit status: 0, 1 for a failed verification, 2 for bad usage or unreadable
input. Slow imports (torch, transformers) are left to the commands that need them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from lit_dlm.reports.pieces import tokenizer_of
from lit_dlm.system.options import at_least, refuse
from lit_dlm.system.terminal import PlainConsole, printable
from lit_dlm.trajectories.record import Trajectory, TrajectoryFormatError, expect
from lit_dlm.trajectories.store.files import shard_paths, side_files
from lit_dlm.trajectories.store.provenance import RunRecord, run_of_shard
from lit_dlm.trajectories.store.reader import TrajectoryShardReader
from lit_dlm.trajectories.store.recovery import merge_manifest, recover
from lit_dlm.trajectories.store.writer import TrajectoryShardWriter
from lit_dlm.trajectories.tools.show import show_record, show_set, show_verification, table, tracked

if TYPE_CHECKING:
    from lit_dlm.trajectories.tools.verify import Execution

_FORMATS = (".parquet", ".jsonl", ".json")
_ENDINGS = ".parquet: all but features; .jsonl: TABOM's rows; .json: dLLM-RL's step maps"


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="lit-dlm traj",
        description="Look at stored trajectories, verify them, convert them, and keep them.",
        epilog="SHARDS is a folder of a set, or paths of its .tar files.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, **flags: Any) -> None:
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        one.set_defaults(run=run)
        for flag, settings in flags.items():
            shown = settings if isinstance(settings, dict) else {"help": settings}
            positional = flag in ("shards", "folder", "files")
            one.add_argument(flag if positional else f"--{flag}", **shown)

    shards = {"type": Path, "nargs": "+", "metavar": "SHARDS"}
    repeated: dict[str, Any] = {"action": "append", "default": []}
    command(
        "inspect", _inspect, "the run, counts, lengths, steps and sizes of a set", shards=shards
    )
    command(
        "replay",
        _replay,
        "what a record says, step by step, which proves nothing about the model",
        shards=shards,
        uid="record to replay (default: the first)",
        tokenizer="prints text: name, folder or none (default: the run's; ids if it has none)",
    )
    command(
        "verify",
        _verify,
        "levels 0 integrity, 1 structure, 2 authenticity, 3 each recorded canvas is decided again, "
        "4 prompts are decoded again; exit status 1 when something fails or is not as in the run",
        shards=shards,
        level={"type": int, "default": 2, "choices": range(5), "help": "default: 2"},
        backbone="levels 3, 4: embedded name, folder or hub id",
        adapter="levels 3, 4: low-rank adapter of the run, folder or hub id",
        policy=repeated
        | {"type": Path, "metavar": "FOLDER", "help": "exported policy; found by its digest"},
        components=repeated
        | {"metavar": "MODULE", "help": "components of your own that the run names; runs its code"},
        sample={"type": int, "metavar": "N", "help": "execute only N records"},
        device={"default": "cpu", "help": "default: cpu"},
    )
    command(
        "recover",
        _recover,
        "save what a killed process left in a folder, and rebuild the manifest",
        folder={"type": Path, "metavar": "FOLDER"},
    )
    out = {"type": Path, "required": True}
    command(
        "export",
        _export,
        "write the records of a set to Parquet, TABOM's JSONL or dLLM-RL's JSON",
        shards=shards,
        out=out | {"help": _ENDINGS},
        tokenizer="gives .jsonl and .json their texts (default: the run's)",
    )
    number = {"type": int, "help": "for rows that do not say it"}
    command(
        "import",
        _import,
        "write rows of others into a new set; token ids in a row win over its texts",
        files={"type": Path, "nargs": "+", "metavar": "FILE", "help": _ENDINGS},
        out=out | {"help": "folder of the new set"},
        mask_id=number,
        vocab_size=number,
        pad_id={"type": int, "help": "behind token ids that end before their steps"},
        tokenizer="for rows that have texts and no token ids",
    )
    return top


def main(arguments: Sequence[str]) -> int:
    """Runs one command on what follows ``lit-dlm traj``; returns the exit status."""
    try:
        options = parser().parse_args(list(arguments))
    except SystemExit as stop:  # --help, or bad usage that argparse has explained
        return int(stop.code or 0)
    try:
        return int(options.run(options) or 0)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("LIT_DLM_TRACEBACK"):
            raise
        sys.stderr.write(f"lit-dlm traj {options.command}: error: {printable(str(error))}\n")
        return 2


# -- look at ---------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> None:
    show_set(shard_paths(options.shards))


def _replay(options: argparse.Namespace) -> None:
    shards = shard_paths(options.shards)
    record = _find_record(shards, options.uid)
    show_record(record, tokenizer_of(shards, options.tokenizer))


def _find_record(shards: Sequence[Path], uid: str | None) -> Trajectory:
    reader = TrajectoryShardReader(list(shards))
    record = next(iter(reader) if uid is None else reader.find({uid}), None)
    if record is None:
        near = [known for known in reader.uids if str(uid) in known][:3] or reader.uids[:1]
        raise ValueError(
            f"--uid: none of {reader.num_records} records is {uid!r}; did you mean "
            f"{', '.join(near)}?"
        )
    return record


# -- verify ----------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    from lit_dlm.trajectories.tools.verify import verify

    shards = shard_paths(options.shards)
    at_least(1, of="--", sample=options.sample)
    executes = options.level >= 3
    rule = f"--backbone: level {options.level} executes the records, so it needs one"
    expect(not executes or options.backbone is not None, rule)
    result = verify(
        shards,
        level=options.level,
        execution=_execution(shards, options) if executes else None,
        sample=options.sample,
        track=lambda items, name: tracked(items, len(items), name),
    )
    show_verification(result)
    return 1 if result.failed else 0


def _execution(shards: Sequence[Path], options: argparse.Namespace) -> Execution:
    """Loads what levels 3 and 4 need, with dtype, quantisation and attention as in the run."""
    import torch

    from lit_dlm.backbones import load_backbone, load_tokenizer
    from lit_dlm.trajectories.tools.verify import Execution
    from lit_dlm.vision.base import VisionSettings, add_picture_folders

    is_here = torch.cuda.is_available() or not options.device.startswith("cuda")
    expect(is_here, f"--device: expected a device of this machine, got {options.device!r}")
    recorded: dict[str, Any] = {}  # of the first shard that can be read
    for shard in reversed(shards):
        try:
            recorded = dict(run_of_shard(shard)[0].model)
        except TrajectoryFormatError:
            continue  # level 0 reports it
    backbone = load_backbone(
        options.backbone,
        adapter=options.adapter,
        dtype=recorded.get("dtype") or "float32",
        device=options.device,
        attn_implementation=recorded.get("attn_implementation") or "sdpa",
        load_in_4bit=recorded.get("load_in_4bit", False),
        vision=VisionSettings(**recorded["vision"]) if "vision" in recorded else None,
        spec_overrides=recorded.get("spec_overrides"),
    )
    folders = sorted({shard.resolve().parent for shard in shards})
    add_picture_folders(backbone, *folders)
    # Training exports a run's policy beside its shards; policies are matched by digest.
    beside = [folder.parent / "policy" for folder in folders]
    exported = [folder for folder in beside if (folder / "config.json").is_file()]
    return Execution(
        backbone=backbone,
        tokenizer=load_tokenizer(options.backbone),
        policy_folders=[*options.policy, *exported],
        component_modules=options.components,
        device=options.device,
    )


# -- recover ---------------------------------------------------------------------------------------


def _recover(options: argparse.Namespace) -> None:
    console = PlainConsole()
    expect(options.folder.is_dir(), f"{options.folder}: there is no such folder")
    rows = [
        (
            entry.path.name,
            str(entry.num_records),
            str(entry.num_dropped_blocks),
            "-" if entry.shard is None else entry.shard.name,
        )
        for entry in recover(options.folder)[0]
    ]
    columns = ("file", ">records saved", ">blocks dropped", "now in")
    if rows:
        console.print(table("Recovered", columns, rows))
    if side_files(options.folder):
        manifest = merge_manifest(options.folder)
        shards, size = len(manifest["shards"]), decimal(manifest["bytes"], precision=2)
        text = f"{options.folder}: {manifest['num_records']:,} records in {shards} shards, {size}"
        console.print(text, soft_wrap=True)
    if not rows:
        console.print("nothing to recover")


# -- export and import -----------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> None:
    from lit_dlm.trajectories.tools import exchange

    shards = shard_paths(options.shards)
    kind = _format([options.out], "--out")
    reader = TrajectoryShardReader(shards, features=False)
    records = tracked(reader, reader.num_records)
    if kind == ".parquet":
        texts = {run_of_shard(shard)[0].text() for shard in shards}
        run_text = texts.pop() if len(texts) == 1 else None
        if texts:
            text = f"{options.out}: has no run record, since the shards are of {len(texts)} runs"
            PlainConsole(stderr=True).print(text, soft_wrap=True)
        count = exchange.write_parquet(records, options.out, run_text=run_text)
    else:
        tokenizer = tokenizer_of(shards, options.tokenizer)
        rule = f"--tokenizer: {kind} holds texts; name one, as the run has none"
        expect(tokenizer is not None, rule)
        make_row = exchange.tabom_row if kind == ".jsonl" else exchange.step_map_row
        rows = (make_row(record, tokenizer) for record in records)
        count = exchange.write_json_rows(rows, options.out, as_list=kind == ".json")
    PlainConsole().print(f"{options.out}: {count:,} records", soft_wrap=True)


def _import(options: argparse.Namespace) -> None:
    records, run = _foreign_records(options)
    former = _set_files(options.out)
    count = 0
    try:
        with TrajectoryShardWriter(
            options.out, name="imported", split="train", rank=0, run=run
        ) as writer:
            for record in tracked(records, None):
                writer.put(record)
                count += 1
    except (ValueError, OSError, KeyboardInterrupt):
        for path in _set_files(options.out) - former:  # so that the call can be repeated
            path.unlink()
        raise
    if count:
        merge_manifest(options.out)
    PlainConsole().print(f"{options.out}: {count:,} records", soft_wrap=True)


def _foreign_records(options: argparse.Namespace) -> tuple[Iterator[Trajectory], RunRecord]:
    """The records of files to import, which are read as they are taken, and a run for them."""
    from lit_dlm.trajectories import rows
    from lit_dlm.trajectories.tools import exchange

    unpacked = [p.with_suffix("") if p.name.endswith(".jsonl.gz") else p for p in options.files]
    kind = _format(unpacked, "FILE")
    sources = [
        {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in options.files
    ]
    data = {"imported_from": kind.removeprefix("."), "sources": sources}
    run = RunRecord(model={}, tokenizer={}, decode={}, randomness={}, data=data)
    if kind == ".parquet":
        parts = [exchange.read_parquet(path) for path in options.files]
        texts = {text for _, text in parts}
        if len(texts) == 1 and (text := texts.pop()):  # all rows are of one run
            run = RunRecord.parse(text)
        return chain.from_iterable(records for records, _ in parts), run
    settings = rows.ImportSettings(
        mask_id=options.mask_id,
        vocab_size=options.vocab_size,
        tokenizer=None if options.tokenizer is None else tokenizer_of([], options.tokenizer),
        pad_id=options.pad_id,
    )
    read = rows.read_tabom if kind == ".jsonl" else rows.read_step_map
    return chain.from_iterable(read(path, settings) for path in options.files), run


def _set_files(folder: Path) -> set[Path]:
    return {*folder.glob("imported-*"), *folder.glob("run*.json")}


def _format(paths: Sequence[Path], option: str) -> str:
    endings = {path.suffix for path in paths}
    if len(endings) != 1 or not endings <= set(_FORMATS):
        wanted = f"one of the endings {', '.join(_FORMATS)}"
        refuse(option, wanted, ", ".join(map(str, paths)))
    return endings.pop()
