"""``lit-dlm traj``: look at stored trajectories, verify them, convert them, and keep them.

A command returns the exit status: 0, 1 for a failed verification, 2 for bad usage or unreadable
input. What takes seconds to import (torch, transformers) is imported by the commands that need it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.progress import track
from rich.table import Table
from rich.text import Text

from lit_dlm.ops.options import at_least
from lit_dlm.trajectories.errors import TrajectoryFormatError
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.files import shard_paths, side_files
from lit_dlm.trajectories.store.provenance import RunRecord, run_of_shard
from lit_dlm.trajectories.store.reader import TrajectoryShardReader
from lit_dlm.trajectories.store.recovery import merge_manifest, recover
from lit_dlm.trajectories.store.writer import TrajectoryShardWriter

if TYPE_CHECKING:
    from lit_dlm.trajectories.verify import Execution, Verification

_SHOWN = 20
_LEVELS = ("integrity", "structure", "authenticity", "teacher-forced", "free-running")
_FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "step_map"}

_MODEL = "embedded name, folder or hub id"
_Option = tuple[str, dict[str, Any]]


def _option(flag: str, text: str, **settings: Any) -> _Option:
    return flag, {"help": text, **settings}


_SHARDS = _option(
    "shards", "folder of a set, or paths of its .tar files", type=Path, nargs="+", metavar="SHARDS"
)
_FORMAT = _option(
    "--format",
    "parquet: everything but features; jsonl: TABOM's rows with decoding_order; step_map: "
    "dLLM-RL's JSON list (default: by the ending of the file)",
    choices=sorted(_FORMATS.values()),
)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="lit-dlm traj",
        description="Look at stored trajectories, verify them, convert them, and keep them.",
        epilog="SHARDS is a folder of a set, or paths of its .tar files.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, text, description, options) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=description)
        command.set_defaults(run=run)
        for flag, settings in options:
            command.add_argument(flag, **settings)
    return top


def main(arguments: Sequence[str]) -> int:
    """Runs one command on what follows ``lit-dlm traj``; returns the exit status."""
    try:
        options = parser().parse_args(list(arguments))
    except SystemExit as stop:  # --help, or bad usage that argparse has explained
        return int(stop.code or 0)
    try:
        return int(options.run(options))
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("LIT_DLM_TRACEBACK"):
            raise
        sys.stderr.write(f"lit-dlm traj {options.command}: error: {error}\n")
        return 2


# -- inspect ---------------------------------------------------------------------------------------


def _run_inspect(options: argparse.Namespace) -> int:
    facts = inspect(shard_paths(options.shards))
    console = Console()
    count = max(facts["num_records"], 1)
    for digest, record in facts["runs"].items():
        console.print(_facts_table(f"Run {digest}", _run_rows(record)))
    console.print(_facts_table("Set", _set_rows(facts)))
    columns = ("method", ">records", ">steps", ">tokens per step", ">correct")
    rows = [
        (
            name,
            f"{method['num_records']:,}",
            f"{method['mean_steps']:.1f}",
            f"{method['tokens_per_step']:.2f}",
            "-" if method["correct"] is None else f"{method['correct']:.3f}",
        )
        for name, method in facts["methods"].items()
    ]
    console.print(_table("Methods", columns, rows))
    sizes = [(name, f"{size / count:.1f}") for name, size in facts["columns"].items()]
    console.print(_table("Columns, unpacked bytes per record", ("column", ">bytes"), sizes))
    return 0


def inspect(shards: Sequence[Path]) -> dict[str, Any]:
    """Facts about shards, as JSON types; reads every record once."""
    reader = TrajectoryShardReader(list(shards), features=False)
    sides = [reader.side_file(shard) for shard in shards]
    columns: Counter[str] = Counter()
    lengths: dict[str, list[int]] = {"prompt": [], "response": [], "steps": []}
    statuses: Counter[str] = Counter()
    methods: dict[str, Counter[str]] = defaultdict(Counter)
    num_overwritten = 0
    for place in _tracked(reader.blocks, len(reader.blocks), "Blocks"):
        block, records = reader.outline(*place)
        names = block.batch.schema.names
        columns.update({name: block.batch.column(name).nbytes for name in names})
        for record in records:
            lengths["prompt"].append(record.num_prompt)
            lengths["response"].append(record.num_generated)
            lengths["steps"].append(record.num_steps)
            statuses[record.status] += 1
            counts = methods[str(record.meta.get("method", "-"))]
            counts["records"] += 1
            counts["steps"] += record.num_steps
            counts["committed"] += record.num_committed
            counts["graded"] += "correct" in record.meta
            counts["correct"] += bool(record.meta.get("correct"))
            num_overwritten += record.superseded is not None
    entries = [entry for side in sides for entry in side.blocks]
    return {
        "runs": {digest: run.as_dict() for run, digest in map(run_of_shard, shards)},
        "num_shards": len(shards),
        "num_blocks": len(entries),
        "num_records": reader.num_records,
        "bytes": sum(side.bytes for side in sides),
        "feature_bytes": sum(entry.feature_size or 0 for entry in entries),
        "num_overwritten": num_overwritten,
        "statuses": dict(statuses),
        "lengths": {
            name: {"min": min(values), "mean": float(np.mean(values)), "max": max(values)}
            for name, values in lengths.items()
        },
        "methods": {name: _method_facts(counts) for name, counts in sorted(methods.items())},
        "columns": dict(columns),
    }


def _method_facts(counts: Counter[str]) -> dict[str, Any]:
    return {
        "num_records": counts["records"],
        "mean_steps": counts["steps"] / counts["records"],
        "tokens_per_step": counts["committed"] / max(counts["steps"], 1),
        "correct": counts["correct"] / counts["graded"] if counts["graded"] else None,
    }


def _run_rows(run: dict[str, Any]) -> list[tuple[str, Any]]:
    """The facts of a run that people look for first."""
    model, decode, tokenizer = run["model"], run["decode"], run["tokenizer"]
    rows: list[tuple[str, Any]] = [
        ("model", _short(model, "id", "path", "family", "decoder", "num_parameters", "dtype")),
        ("weights", model.get("weights_sha256")),
        ("tokenizer", _short(tokenizer, "path", "digest")),
        ("seed", run["randomness"].get("seed")),
        ("capture", _short(dict(decode.get("capture") or {}))),
    ]
    for name, method in (decode.get("methods") or {}).items():
        text = method.get("undescribed") or ", ".join(
            _plug(part, settings) for part, settings in method.items() if part != "settings"
        )
        rows.append((f"method {name}", text))
    rows.append(("software", _short(run["software"], "lit_dlm", "commit", "torch", "transformers")))
    rows.append(("hardware", _short(run["hardware"])))
    return [(name, value) for name, value in rows if value not in (None, "")]


def _plug(part: str, settings: dict[str, Any]) -> str:
    values = ", ".join(f"{k}={v}" for k, v in settings.items() if k != "name" and v is not None)
    return f"{part} {settings['name']}({values})"


def _short(values: Any, *keys: str) -> str:
    chosen = keys or tuple(values)
    return ", ".join(f"{key} {values[key]}" for key in chosen if values.get(key) not in (None, []))


def _set_rows(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    count = max(facts["num_records"], 1)
    rows: list[tuple[str, Any]] = [
        ("records", f"{facts['num_records']:,}"),
        ("shards, blocks", f"{facts['num_shards']:,}, {facts['num_blocks']:,}"),
        ("size", decimal(facts["bytes"], precision=2)),
        ("bytes per record", f"{facts['bytes'] / count:,.0f}"),
    ]
    if facts["feature_bytes"]:
        rows.append(("of these, features", f"{facts['feature_bytes'] / count:,.0f}"))
    for name, values in facts["lengths"].items():
        text = f"{values['min']} to {values['max']}, mean {values['mean']:.1f}"
        rows.append((name if name == "steps" else f"{name} tokens", text))
    rows.append(("ended", ", ".join(f"{n} {name}" for name, n in facts["statuses"].items())))
    if facts["num_overwritten"]:
        rows.append(("with overwritten writes", facts["num_overwritten"]))
    return rows


# -- replay ----------------------------------------------------------------------------------------


def _run_replay(options: argparse.Namespace) -> int:
    shards = shard_paths(options.shards)
    console = Console()
    record = _find_record(shards, options.uid)
    if options.step is not None and not 0 <= options.step < record.num_steps:
        raise ValueError(f"--step: expected 0 to {record.num_steps - 1}, got {options.step}")
    tokenizer = None
    if options.tokenizer != "none":
        tokenizer = tokenizer_of(shards, options.tokenizer)
    prompt = record.prompt_ids.tolist()
    console.print(f"{record.uid}: {record.num_steps} steps, {record.status}", style="bold")
    console.print(Text(str(tokenizer.decode(prompt) if tokenizer else prompt), style="dim"))
    width = len(str(record.num_steps - 1))
    for number in range(record.num_steps) if options.step is None else (options.step,):
        line = Text(f"{number:>{width}}  ", style="dim")
        written = set(record.committed_at(number).tolist())
        cells = [
            (position in written, _piece(token, record.mask_id, tokenizer))
            for position, token in enumerate(record.state_at(number + 1).tolist())
        ]
        for (is_new, piece), run in groupby(cells):
            count = len(list(run))
            # A response usually ends in a long fill of end-of-text tokens.
            fold = tokenizer is not None and piece.startswith("<|") and count > 1
            line.append(f"{piece}*{count} " if fold else piece * count, "bold green" * is_new)
        console.print(line, soft_wrap=True)
    return 0


def _piece(token: int, mask_id: int, tokenizer: Any) -> str:
    """Text of one cell; line breaks would tear the line apart."""
    if token == mask_id:
        return "·" if tokenizer else "· "
    if tokenizer is None:
        return f"{token} "
    return str(tokenizer.decode([token])).replace("\n", "⏎")


# -- verify ----------------------------------------------------------------------------------------


def _run_verify(options: argparse.Namespace) -> int:
    from lit_dlm.trajectories.verify import verify

    shards = shard_paths(options.shards)
    at_least(1, of="--", sample=options.sample, steps=options.steps)
    if options.level >= 3 and options.backbone is None:
        raise ValueError(f"--backbone: level {options.level} executes the records, so it needs one")
    result = verify(
        shards,
        level=options.level,
        execution=_execution(shards, options) if options.level >= 3 else None,
        sample=options.sample,
        track=lambda items, name: _tracked(items, len(items), name),
    )
    _print_verification(result)
    return 1 if result.failed else 0


def _execution(shards: Sequence[Path], options: argparse.Namespace) -> Execution:
    """Loads what levels 3 and 4 need, with the dtype and attention route of the run."""
    import torch

    from lit_dlm.backbones import load_backbone, load_tokenizer
    from lit_dlm.trajectories.verify import Execution
    from lit_dlm.vision.base import VisionSettings
    from lit_dlm.vision.prompts import add_picture_folders

    kind = options.device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a device of this machine, got {options.device!r}")
    run = _first_run(shards)
    recorded = run.model if run is not None else {}
    backbone = load_backbone(
        options.backbone,
        dtype=recorded.get("dtype") or "float32",
        device=options.device,
        attn_implementation=recorded.get("attn_implementation") or "sdpa",
        vision=VisionSettings(**recorded["vision"]) if "vision" in recorded else None,
    )
    folders = sorted({shard.resolve().parent for shard in shards})
    add_picture_folders(backbone, *folders)
    # Training leaves the policy of the same run beside its shards; it counts by its digest.
    beside = [folder.parent / "policy" for folder in folders]
    return Execution(
        backbone=backbone,
        tokenizer=load_tokenizer(options.tokenizer or options.backbone),
        seed=options.seed,
        temperature=options.temperature,
        policy_folders=[
            *options.policy,
            *(folder for folder in beside if (folder / "config.json").is_file()),
        ],
        plug_modules=options.plugs,
        num_steps=options.steps,
        device=options.device,
    )


def _first_run(shards: Sequence[Path]) -> RunRecord | None:
    for shard in shards:
        try:
            return run_of_shard(shard)[0]
        except TrajectoryFormatError:
            continue  # level 0 names it
    return None


def _print_verification(result: Verification) -> None:
    console = Console()
    for title, lines in (
        ("Problems", result.problems),
        ("Not as in the run", result.differences),
    ):
        for number, line in enumerate(lines[:_SHOWN]):
            console.print(f"{title}: {line}" if number == 0 else f"  {line}", soft_wrap=True)
        if len(lines) > _SHOWN:
            console.print(f"  ... and {len(lines) - _SHOWN} more")
    name = _LEVELS[result.level]
    if result.level >= 3:
        console.print(_facts_table(f"Level {result.level}, {name}", _agreement_rows(result)))
        failing = [v for v in result.verdicts if v.outcome != "exact"]
        if failing:
            console.print(_failures(failing))
    verdict = "FAILED" if result.failed else "passed"
    style = "bold red" if result.failed else "bold green"
    text = f"{verdict}: level {result.level} ({name}), {result.num_records} records"
    console.print(text, style=style, highlight=False)


def _agreement_rows(result: Verification) -> list[tuple[str, Any]]:
    checked = sum(v.num_checked for v in result.verdicts)
    agreeing = sum(v.num_agreeing for v in result.verdicts)
    count = len(result.verdicts)
    executed = ("records executed", f"{count:,} of {result.num_records:,}")
    if not count:
        return [executed]
    tokens = sum(v.token_agreement for v in result.verdicts) / count
    return [
        executed,
        *[(name, f"{number:,}") for name, number in result.counts.items()],
        ("steps that agree", f"{agreeing:,} of {checked:,} ({agreeing / max(checked, 1):.2%})"),
        ("tokens that agree", f"{tokens:.2%}"),
    ]


def _failures(verdicts: Sequence[Any]) -> Table:
    ordered = sorted(verdicts, key=lambda v: v.outcome != "failed")
    rows = [
        (v.uid, v.outcome, f"{v.num_agreeing}/{v.num_checked}", f"{v.margin:.4f}", v.reason)
        for v in ordered[:_SHOWN]
    ]
    columns = ("uid", "outcome", "steps", "margin", "first difference")
    table = _table("Records that are not exact", columns, rows)
    if len(ordered) > _SHOWN:
        table.caption = f"... and {len(ordered) - _SHOWN} more"
    return table


# -- recover ---------------------------------------------------------------------------------------


def _run_recover(options: argparse.Namespace) -> int:
    console = Console()
    if not options.folder.is_dir():
        raise ValueError(f"{options.folder}: there is no such folder")
    rows = [
        (
            entry.path.name,
            str(entry.num_records),
            str(entry.num_dropped_blocks),
            "-" if entry.shard is None else entry.shard.name,
        )
        for entry in recover(options.folder)
    ]
    columns = ("file", ">records saved", ">blocks dropped", "now in")
    console.print(_table("Recovered", columns, rows) if rows else "nothing to recover")
    if side_files(options.folder):
        manifest = merge_manifest(options.folder)
        console.print(
            f"{options.folder}: {manifest['num_records']:,} records in "
            f"{len(manifest['shards'])} shards, {decimal(manifest['bytes'], precision=2)}",
            soft_wrap=True,
        )
    return 0


# -- export and import -----------------------------------------------------------------------------


def _run_export(options: argparse.Namespace) -> int:
    from lit_dlm.trajectories import exchange

    shards = shard_paths(options.shards)
    kind = options.format or _by_suffix(options.out, "--out")
    if not options.out.parent.is_dir():
        raise ValueError(f"--out: there is no folder {options.out.parent}")
    reader = TrajectoryShardReader(shards, features=False)
    records = _tracked(reader, reader.num_records)
    if kind == "parquet":
        if options.tokenizer is not None:
            raise ValueError("--tokenizer: parquet holds ids and no texts; leave it out")
        texts = {run_of_shard(shard)[0].text() for shard in shards}
        run_text = texts.pop() if len(texts) == 1 else None
        count = exchange.write_parquet(records, options.out, run_text=run_text)
    else:
        tokenizer = tokenizer_of(shards, options.tokenizer)
        make_row = exchange.tabom_row if kind == "jsonl" else exchange.step_map_row
        write = exchange.write_jsonl if kind == "jsonl" else exchange.write_json_list
        count = write((make_row(record, tokenizer) for record in records), options.out)
    Console().print(f"{options.out}: {count:,} records", soft_wrap=True)
    return 0


def _run_import(options: argparse.Namespace) -> int:
    kinds = {options.format or _by_suffix(path, "FILE") for path in options.file}
    if len(kinds) > 1:
        raise ValueError(f"FILE: expected one format, got {', '.join(sorted(kinds))}")
    kind = kinds.pop()
    for path in options.file:
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
    records, run_text = _read_all(options, kind)
    run = RunRecord.parse(run_text) if run_text is not None else _import_run(options.file, kind)
    count = 0
    with TrajectoryShardWriter(
        options.out, name=options.name, split=options.split, rank=0, run=run
    ) as writer:
        for record in _tracked(records, None):
            writer.put(record)
            count += 1
    if count:
        merge_manifest(options.out)
    Console().print(f"{options.out}: {count:,} records", soft_wrap=True)
    return 0


def _read_all(options: argparse.Namespace, kind: str) -> tuple[Iterator[Trajectory], str | None]:
    """Records of all files, and the run of all rows where a single Parquet file names it."""
    from lit_dlm.trajectories import exchange

    if kind == "parquet":
        parts = [exchange.read_parquet(path) for path in options.file]
        texts = {text for _, text in parts}
        run_text = texts.pop() if len(texts) == 1 else None
        return (record for records, _ in parts for record in records), run_text
    tokenizer = None
    if options.tokenizer is not None:
        from lit_dlm.backbones.location import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
    settings = exchange.ImportSettings(
        mask_id=options.mask_id,
        vocab_size=options.vocab_size,
        tokenizer=tokenizer,
        pad_id=options.pad_id,
    )
    read = exchange.read_tabom if kind == "jsonl" else exchange.read_step_map
    return (record for path in options.file for record in read(path, settings)), None


def _import_run(files: list[Path], kind: str) -> RunRecord:
    """What is known of a run that others made: the files it came from."""
    sources = [
        {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in files
    ]
    data = {"imported_from": kind, "sources": sources}
    return RunRecord(model={}, tokenizer={}, decode={}, randomness={}, data=data)


def _by_suffix(path: Path, option: str) -> str:
    kind = _FORMATS.get(path.suffix)
    if kind is None:
        raise ValueError(f"{option}: cannot tell the format by the ending of {path}; give --format")
    return kind


# -- what the commands share -----------------------------------------------------------------------


def _find_record(shards: Sequence[Path], uid: str | None) -> Trajectory:
    """One record by its uid, or the first one."""
    reader = TrajectoryShardReader(list(shards))
    found = next(iter(reader) if uid is None else reader.find({uid}), None)
    if found is not None:
        return found
    assert uid is not None
    near = [known for known in reader.uids if uid in known][:3]
    hint = f"; did you mean {', '.join(near)}?" if near else f", such as {reader.uids[0]}"
    raise ValueError(f"no record has the uid {uid!r} among {reader.num_records}{hint}")


def _tracked(items: Iterable[Any], total: int | None, name: str = "Records") -> Iterable[Any]:
    """Shows on a terminal how many have been taken; ``None`` where nobody knows their number."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    return track(items, name, total, console=console, transient=True, disable=hidden)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table; columns whose name begins with ``>`` stand to the right."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        side: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=side, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _facts_table(title: str, rows: Sequence[tuple[str, Any]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, str(value))
    return table


def tokenizer_of(shards: Sequence[Path], name: str | None) -> Any:
    """A tokenizer by name, or that of the run if it is on this machine: nothing is downloaded."""
    from lit_dlm.backbones.location import embedded_names, load_tokenizer

    if name is not None:
        return load_tokenizer(name)
    path = run_of_shard(shards[0])[0].tokenizer.get("path")
    if isinstance(path, str) and (path in embedded_names() or Path(path).is_dir()):
        return load_tokenizer(path)
    raise ValueError(f"--tokenizer: the run's tokenizer {path!r} is not on this machine; name one")


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, str, list[_Option]]] = {
    "inspect": (
        _run_inspect,
        "the run, counts, lengths, steps and sizes of a set",
        "Shows the run that made a set, its counts, lengths and steps, and how many bytes each "
        "column takes per record before it is packed.",
        [_SHARDS],
    ),
    "replay": (
        _run_replay,
        "a record step by step",
        "Prints the response after every step. Replay shows what a record says; it does not "
        "verify it.",
        [
            _SHARDS,
            _option("--uid", "record to replay (default: the first)"),
            _option("--tokenizer", f"prints text: {_MODEL} (default: that of the run; none: ids)"),
            _option("--step", "only the canvas after this step", type=int),
        ],
    ),
    "verify": (
        _run_verify,
        "integrity, structure, authenticity, and re-execution",
        "Levels: 0 integrity (checksums), 1 structure (rules of the format), 2 authenticity "
        "(digests, manifest), 3 teacher-forced (each recorded canvas is decided again), 4 "
        "free-running (prompts are decoded again). Exit status 1 when something fails or the "
        "model, tokenizer, seed or decoder is not that of the run.",
        [
            _SHARDS,
            _option("--level", "default: 2", type=int, default=2, choices=range(5)),
            _option("--backbone", f"levels 3, 4: {_MODEL}"),
            _option("--tokenizer", "default: the one beside the backbone"),
            _option("--seed", "base seed instead of the stored sample seeds", type=int),
            _option("--temperature", "instead of the recorded one", type=float),
            _option(
                "--policy",
                "exported policy of a TraceLock method; found by its digest, may be repeated",
                action="append",
                default=[],
                type=Path,
                metavar="FOLDER",
            ),
            _option(
                "--plugs",
                "module with plugs of your own that the run names; importing it runs its code",
                action="append",
                default=[],
                metavar="MODULE",
            ),
            _option("--sample", "execute only N records", type=int, metavar="N"),
            _option("--steps", "level 3: only K steps of a batch", type=int, metavar="K"),
            _option("--device", "default: cpu", default="cpu"),
        ],
    ),
    "recover": (
        _run_recover,
        "save what a killed process left in a folder",
        "Saves the whole blocks of unfinished shards whose process is dead, and rebuilds the "
        "manifest.",
        [_option("folder", "folder of the set", type=Path, metavar="FOLDER")],
    ),
    "export": (
        _run_export,
        "to Parquet, TABOM's JSONL or dLLM-RL's JSON",
        "Writes the records of a set into one file.",
        [
            _SHARDS,
            _option("--out", "file to write", type=Path, required=True),
            _FORMAT,
            _option("--tokenizer", "gives jsonl and step_map their texts (default: the run's)"),
        ],
    ),
    "import": (
        _run_import,
        "from Parquet, TABOM's JSONL or dLLM-RL's JSON",
        "Writes the rows of a file into a new set. Token ids in a row win over its texts.",
        [
            _option("file", "files of one format", type=Path, nargs="+", metavar="FILE"),
            _option("--out", "folder of the new set", type=Path, required=True),
            _FORMAT,
            _option("--name", "name of the set (default: imported)", default="imported"),
            _option("--split", "split of the set (default: train)", default="train"),
            _option("--mask_id", "for rows that do not say it", type=int),
            _option("--vocab_size", "for rows that do not say it", type=int),
            _option("--pad_id", "behind token ids that end before their steps", type=int),
            _option("--tokenizer", "for rows that have texts and no token ids"),
        ],
    ),
}
