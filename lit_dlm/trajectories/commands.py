"""``lit-dlm traj``: look at stored trajectories, verify them, convert them, and keep them.

A command returns the exit status: 0, 1 for a failed verification, 2 for bad usage or unreadable
input. What takes seconds to import (torch, transformers) is imported by the commands that need it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from lit_dlm.ops.options import at_least
from lit_dlm.trajectories.container import stored_sizes
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
_FORMATS = {
    "parquet": "everything but features, for sharing and queries",
    "jsonl": "TABOM's rows with decoding_order",
    "step_map": "dLLM-RL's JSON list with step_map",
}
_SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "step_map"}
_TAGS = {
    "SMID": "uids",
    "PLEN": "prompt lengths",
    "GLEN": "response lengths",
    "NSTP": "steps",
    "PTOK": "prompt tokens",
    "GTOK": "response tokens",
    "CSTP": "commit steps",
    "GIVN": "given positions",
    "ECNT": "overwritten writes: counts",
    "ESTP": "overwritten writes: steps",
    "EPOS": "overwritten writes: positions",
    "ETOK": "overwritten writes: tokens",
    "SEED": "seeds",
    "CDIG": "content digests",
    "STAT": "statuses",
    "META": "meta",
    "CCNF": "probability of writes",
    "CMRG": "margin of writes",
    "CSCO": "policy's score of writes",
    "STMU": "step times",
    "RCNF": "probability per step",
    "RENT": "entropy per step",
    "RPRP": "proposal per step",
    "RTKI": "most probable tokens per step",
    "RTKL": "their log-probabilities",
    "ROLD": "log-probability of writes",
    "CVAL": "value before writes",
    "CADV": "advantage of writes",
}


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="lit-dlm traj",
        description="Look at stored trajectories, verify them, convert them, and keep them.",
        epilog="SHARDS is a folder of a set, or paths of its .tar files.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_inspect, _add_replay, _add_verify, _add_recover, _add_export, _add_import):
        add(commands)
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


def _add_inspect(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="the run, counts, lengths, steps and sizes of a set",
        description="Shows the run that made a set, its counts, lengths and steps, and how many "
        "bytes each column takes per record.",
    )
    _add_shards(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run_inspect)


def _run_inspect(options: argparse.Namespace) -> int:
    shards = shard_paths(options.shards)
    facts = inspect(shards)
    console = Console()
    if options.json:
        console.print_json(json.dumps(facts))
        return 0
    for digest, record in facts["runs"].items():
        console.print(_facts_table(f"Run {digest}", _run_rows(record)))
    console.print(_facts_table("Set", _set_rows(facts)))
    console.print(_method_table(facts["methods"]))
    console.print(_column_table(facts))
    return 0


def inspect(shards: Sequence[Path]) -> dict[str, Any]:
    """Facts about shards, as JSON types; reads every record once."""
    reader = TrajectoryShardReader(list(shards), features=False)
    sides = [reader.side_file(shard) for shard in shards]
    columns: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    lengths: dict[str, list[int]] = {"prompt": [], "response": [], "steps": []}
    statuses: Counter[str] = Counter()
    methods: dict[str, Counter[str]] = defaultdict(Counter)
    num_overwritten = num_features = 0
    blocks = (reader.read_block(*block) for block in reader.blocks)
    for record in _tracked(chain.from_iterable(blocks), reader.num_records):
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
    for shard, side in zip(shards, sides, strict=True):
        with shard.open("rb") as file:
            for entry in side.blocks:
                num_features += entry.feature_size or 0
                for offset, size in (
                    (entry.offset, entry.size),
                    (entry.feature_offset, entry.feature_size),
                ):
                    if offset is None or size is None:
                        continue
                    file.seek(offset)
                    for tag, (raw, stored) in stored_sizes(file.read(size)).items():
                        columns[tag][0] += raw
                        columns[tag][1] += stored
    runs = {digest: run.as_dict() for run, digest in map(run_of_shard, shards)}
    return {
        "runs": runs,
        "num_shards": len(shards),
        "num_blocks": sum(len(side.blocks) for side in sides),
        "num_records": reader.num_records,
        "bytes": sum(side.bytes for side in sides),
        "feature_bytes": num_features,
        "num_overwritten": num_overwritten,
        "statuses": dict(statuses),
        "lengths": {
            name: {"min": min(values), "mean": float(np.mean(values)), "max": max(values)}
            for name, values in lengths.items()
        },
        "methods": {name: _method_facts(counts) for name, counts in sorted(methods.items())},
        "columns": {tag: {"raw": raw, "stored": size} for tag, (raw, size) in columns.items()},
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
    record = RunRecord(**{k: v for k, v in run.items() if k not in ("format", "version")})
    model, software = record.model, record.software
    rows: list[tuple[str, Any]] = [
        ("model", _short(model, "id", "path", "family", "decoder", "num_parameters", "dtype")),
        ("weights", model.get("weights_sha256")),
        ("tokenizer", _short(record.tokenizer, "path", "digest")),
        ("seed", record.randomness.get("seed")),
        ("capture", _short(dict(record.decode.get("capture") or {}))),
    ]
    for name, method in (record.decode.get("methods") or {}).items():
        text = method.get("undescribed") or ", ".join(
            _plug(part, settings) for part, settings in method.items() if part != "settings"
        )
        rows.append((f"method {name}", text))
    rows.append(("software", _short(software, "lit_dlm", "commit", "torch", "transformers")))
    rows.append(("hardware", _short(record.hardware)))
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


def _method_table(methods: dict[str, Any]) -> Table:
    rows = [
        (
            name,
            f"{facts['num_records']:,}",
            f"{facts['mean_steps']:.1f}",
            f"{facts['tokens_per_step']:.2f}",
            "-" if facts["correct"] is None else f"{facts['correct']:.3f}",
        )
        for name, facts in methods.items()
    ]
    return _table("Methods", ("method", ">records", ">steps", ">tokens per step", ">correct"), rows)


def _column_table(facts: dict[str, Any]) -> Table:
    count = max(facts["num_records"], 1)
    rows = [
        (tag, _TAGS.get(tag, ""), f"{sizes['raw'] / count:.1f}", f"{sizes['stored'] / count:.1f}")
        for tag, sizes in facts["columns"].items()
    ]
    other = facts["bytes"] - sum(sizes["stored"] for sizes in facts["columns"].values())
    rows.append(("", "headers and tar", "", f"{other / count:.1f}"))
    return _table("Columns, bytes per record", ("column", "holds", ">raw", ">stored"), rows)


# -- replay ----------------------------------------------------------------------------------------


def _add_replay(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="a record step by step, as text or as arrays",
        description="Replays records: prints the response after every step, or writes all canvases "
        "to an .npz file. Replay shows what a record says; it does not verify it.",
    )
    _add_shards(parser)
    parser.add_argument("--uid", help="record to replay (default: the first)")
    parser.add_argument(
        "--tokenizer",
        help="print text: embedded name, folder or hub id (default: that of the run; 'none' "
        "prints token ids)",
    )
    parser.add_argument("--step", type=int, help="only the canvas after this step")
    parser.add_argument(
        "--npz", type=Path, help="write all canvases here (of every record without --uid)"
    )
    parser.set_defaults(run=_run_replay)


def _run_replay(options: argparse.Namespace) -> int:
    shards = shard_paths(options.shards)
    console = Console()
    if options.npz is not None:
        if options.step is not None or options.tokenizer is not None:
            raise ValueError("--npz: writes all steps as ids; leave --step and --tokenizer out")
        return _write_states(shards, options.uid, options.npz, console)
    record = _find_record(shards, options.uid)
    if options.step is not None and not 0 <= options.step < record.num_steps:
        raise ValueError(f"--step: expected 0 to {record.num_steps - 1}, got {options.step}")
    tokenizer = None
    if options.tokenizer != "none":
        tokenizer = tokenizer_of(shards, options.tokenizer)
    _print_steps(record, tokenizer, options.step, console)
    return 0


def _print_steps(record: Trajectory, tokenizer: Any, step: int | None, console: Console) -> None:
    prompt = record.prompt_ids.tolist()
    console.print(f"{record.uid}: {record.num_steps} steps, {record.status}", style="bold")
    console.print(Text(str(tokenizer.decode(prompt) if tokenizer else prompt), style="dim"))
    width = len(str(record.num_steps - 1))
    for number in range(record.num_steps) if step is None else (step,):
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


def _piece(token: int, mask_id: int, tokenizer: Any) -> str:
    """Text of one cell; line breaks would tear the line apart."""
    if token == mask_id:
        return "·" if tokenizer else "· "
    if tokenizer is None:
        return f"{token} "
    return str(tokenizer.decode([token])).replace("\n", "⏎")


def _write_states(shards: list[Path], uid: str | None, path: Path, console: Console) -> int:
    if path.suffix != ".npz":
        raise ValueError(f"--npz: expected a name that ends in .npz, got {path}")
    arrays: dict[str, Any] = {}
    uids = []
    if uid is not None:
        records: Iterable[Trajectory] = [_find_record(shards, uid)]
    else:
        reader = TrajectoryShardReader(shards, features=False)
        records = _tracked(reader, reader.num_records)
    for number, record in enumerate(records):
        uids.append(record.uid)
        arrays[f"states_{number}"] = record.all_states()
    np.savez_compressed(path, **arrays, uids=np.array(uids))
    console.print(f"{path}: canvases of {len(arrays)} records, (T + 1, G) each")
    return 0


# -- verify ----------------------------------------------------------------------------------------


def _add_verify(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="integrity, structure, authenticity, and re-execution",
        description="Levels: 0 integrity (checksums), 1 structure (rules of the format), 2 "
        "authenticity (digests, Merkle root, manifest), 3 teacher-forced (each recorded canvas is "
        "decided again), 4 free-running (prompts are decoded again). Exit status 1 when something "
        "fails or the model, tokenizer, seed or decoder is not that of the run.",
    )
    _add_shards(parser)
    parser.add_argument("--level", type=int, default=2, choices=range(5), help="default: 2")
    parser.add_argument("--backbone", help="levels 3, 4: embedded name, folder or hub id")
    parser.add_argument("--tokenizer", help="default: the one beside the backbone")
    parser.add_argument("--seed", type=int, help="base seed instead of the stored sample seeds")
    parser.add_argument("--temperature", type=float, help="instead of the recorded one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: recorded"
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="exported policy of a TraceLock method; found by its digest, may be repeated",
    )
    parser.add_argument(
        "--plugs",
        action="append",
        default=[],
        metavar="MODULE",
        help="module with plugs of your own that the run names; importing it runs its code",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="margin below which a differing decision is a near tie (default: 0.01)",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="execute only N records")
    parser.add_argument("--steps", type=int, metavar="K", help="level 3: only K steps of a batch")
    parser.add_argument("--batch_size", type=int, help="default: that of the run")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run_verify)


def _run_verify(options: argparse.Namespace) -> int:
    from lit_dlm.trajectories.verify import verify

    shards = shard_paths(options.shards)
    counts = {name: vars(options)[name] for name in ("sample", "steps", "batch_size")}
    at_least(1, of="--", **counts)
    if options.level >= 3 and options.backbone is None:
        raise ValueError(f"--backbone: level {options.level} executes the records, so it needs one")
    with _progress() as bar:
        execution = _execution(shards, options) if options.level >= 3 else None
        result = verify(
            shards,
            level=options.level,
            execution=execution,
            **({} if options.tolerance is None else {"tolerance": options.tolerance}),
            sample=options.sample,
            progress=bar,
        )
    if options.json:
        Console().print_json(json.dumps(result.as_dict()))
    else:
        _print_verification(result)
    return 1 if result.failed else 0


def _execution(shards: Sequence[Path], options: argparse.Namespace) -> Execution:
    """Loads what levels 3 and 4 need, with the dtype and attention route of the run."""
    import torch

    from lit_dlm.backbones import load_backbone, load_tokenizer
    from lit_dlm.backbones.vision import VisionSettings
    from lit_dlm.pictures import look_in
    from lit_dlm.trajectories.verify import Execution

    kind = options.device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a device of this machine, got {options.device!r}")
    run = _first_run(shards)
    recorded = run.model if run is not None else {}
    backbone = load_backbone(
        options.backbone,
        dtype=options.dtype or recorded.get("dtype") or "float32",
        device=options.device,
        attn_implementation=recorded.get("attn_implementation") or "sdpa",
        vision=VisionSettings(**recorded["vision"]) if "vision" in recorded else None,
    )
    look_in(backbone, *sorted({shard.resolve().parent for shard in shards}))
    return Execution(
        backbone=backbone,
        tokenizer=load_tokenizer(options.tokenizer or options.backbone),
        seed=options.seed,
        temperature=options.temperature,
        policy_folders=[*options.policy, *_policies_beside(shards)],
        plug_modules=options.plugs,
        batch_size=options.batch_size,
        num_steps=options.steps,
        device=options.device,
    )


def _policies_beside(shards: Sequence[Path]) -> list[Path]:
    """The folders where training leaves the policy of the same run; they count by their digest."""
    beside = {shard.resolve().parent.parent / "policy" for shard in shards}
    return sorted(folder for folder in beside if (folder / "config.json").is_file())


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
    if result.level >= 3:
        console.print(
            _facts_table(f"Level {result.level}, {_LEVELS[result.level]}", _agreement_rows(result))
        )
        failing = [v for v in result.verdicts if v.outcome != "exact"]
        if failing:
            console.print(_failures(failing))
    verdict = "FAILED" if result.failed else "passed"
    style = "bold red" if result.failed else "bold green"
    text = (
        f"{verdict}: level {result.level} ({_LEVELS[result.level]}), {result.num_records} records"
    )
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


def _add_recover(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "recover",
        help="save what a killed process left in a folder",
        description="Saves the whole blocks of unfinished shards whose process is dead, and "
        "rebuilds the manifest.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the set")
    parser.set_defaults(run=_run_recover)


def _run_recover(options: argparse.Namespace) -> int:
    console = Console()
    if not options.folder.is_dir():
        raise ValueError(f"{options.folder}: there is no such folder")
    found = recover(options.folder)
    if found:
        rows = [
            (
                entry.path.name,
                str(entry.num_records),
                str(entry.num_dropped_blocks),
                "-" if entry.shard is None else entry.shard.name,
            )
            for entry in found
        ]
        columns = ("file", ">records saved", ">blocks dropped", "now in")
        console.print(_table("Recovered", columns, rows))
    else:
        console.print("nothing to recover")
    if side_files(options.folder):
        manifest = merge_manifest(options.folder)
        console.print(
            f"{options.folder}: {manifest['num_records']:,} records in "
            f"{len(manifest['shards'])} shards, {decimal(manifest['bytes'], precision=2)}",
            soft_wrap=True,
        )
    return 0


# -- export and import -----------------------------------------------------------------------------


def _add_export(commands: Any) -> None:
    listed = "; ".join(f"{name}: {text}" for name, text in _FORMATS.items())
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="to Parquet, TABOM's JSONL or dLLM-RL's JSON",
        description=f"Writes the records of a set into one file. {listed}.",
    )
    _add_shards(parser)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--format", choices=sorted(_FORMATS), help="default: by the ending of --out"
    )
    parser.add_argument(
        "--tokenizer", help="gives the texts of jsonl and step_map (default: that of the run)"
    )
    parser.add_argument(
        "--skip_misfits",
        action="store_true",
        help="leave out and count records that the format cannot hold, instead of stopping",
    )
    parser.set_defaults(run=_run_export)


def _add_import(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "import",
        help="from Parquet, TABOM's JSONL or dLLM-RL's JSON",
        description="Writes the rows of a file into a new set of shards. Token ids in a row win "
        "over its texts.",
    )
    parser.add_argument("file", type=Path, nargs="+", metavar="FILE", help="files of one format")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new set")
    parser.add_argument(
        "--format",
        choices=sorted(_FORMATS),
        help="default: by the ending of the file",
    )
    parser.add_argument("--name", default="imported", help="name of the set (default: imported)")
    parser.add_argument("--split", default="train", help="split of the set (default: train)")
    parser.add_argument("--mask_id", type=int, help="for rows that do not say it")
    parser.add_argument("--vocab_size", type=int, help="for rows that do not say it")
    parser.add_argument("--pad_id", type=int, help="behind token ids that end before their steps")
    parser.add_argument("--tokenizer", help="for rows that have texts and no token ids")
    parser.add_argument(
        "--first_step",
        type=int,
        default=0,
        choices=(0, 1),
        help="number of the first step in a step_map (default: 0)",
    )
    parser.set_defaults(run=_run_import)


def _run_export(options: argparse.Namespace) -> int:
    from lit_dlm.trajectories import exchange

    shards = shard_paths(options.shards)
    kind = options.format or _by_suffix(options.out, "--out", _FORMATS)
    if not options.out.parent.is_dir():
        raise ValueError(f"--out: there is no folder {options.out.parent}")
    reader = TrajectoryShardReader(shards, features=False)
    records = _tracked(reader, reader.num_records)
    skipped: list[str] = []
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
        keep = skipped if options.skip_misfits else None
        count = write(_rows(records, make_row, tokenizer, keep), options.out)
    console = Console()
    console.print(f"{options.out}: {count:,} records", soft_wrap=True)
    if skipped:
        console.print(f"left out: {len(skipped)} records, such as: {skipped[0]}", soft_wrap=True)
    return 0


def _run_import(options: argparse.Namespace) -> int:
    kinds = {
        options.format or _by_suffix(path, "FILE", _SUFFIXES.values()) for path in options.file
    }
    if len(kinds) > 1:
        raise ValueError(f"FILE: expected one format, got {', '.join(sorted(kinds))}")
    kind = kinds.pop()
    for path in options.file:
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
    records, run_text = _read_all(options, kind)
    run = RunRecord.parse(run_text) if run_text is not None else _import_run(options.file, kind)
    writer = TrajectoryShardWriter(
        options.out, name=options.name, split=options.split, rank=0, run=run
    )
    count = 0
    with writer:
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
        first_step=options.first_step,
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
    return RunRecord(
        model={},
        tokenizer={},
        decode={},
        randomness={},
        data={"imported_from": kind, "sources": sources},
    )


def _rows(
    records: Iterable[Trajectory],
    make_row: Callable[[Trajectory, Any], dict[str, Any]],
    tokenizer: Any,
    skipped: list[str] | None,
) -> Iterator[dict[str, Any]]:
    """Rows; what does not fit is an error, or goes to ``skipped``."""
    for record in records:
        try:
            row = make_row(record, tokenizer)
        except ValueError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
            continue
        yield row


def _by_suffix(path: Path, option: str, known: Any) -> str:
    kind = _SUFFIXES.get(path.suffix)
    if kind is None or kind not in known:
        raise ValueError(f"{option}: cannot tell the format by the ending of {path}; give --format")
    return kind


# -- what the commands share -----------------------------------------------------------------------


def _add_shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shards",
        nargs="+",
        type=Path,
        metavar="SHARDS",
        help="folder of a set, or paths of its .tar files",
    )


def _find_record(shards: Sequence[Path], uid: str | None) -> Trajectory:
    """One record by its uid, or the first one.

    Raises:
        ValueError: no record has this uid; uids that contain it are named.
    """
    reader = TrajectoryShardReader(list(shards))
    found = next(iter(reader) if uid is None else reader.find({uid}), None)
    if found is not None:
        return found
    assert uid is not None
    near = [known for known in reader.uids if uid in known][:3]
    hint = f"; did you mean {', '.join(near)}?" if near else f", such as {reader.uids[0]}"
    raise ValueError(f"no record has the uid {uid!r} among {reader.num_records}{hint}")


def _progress() -> Progress:
    """A progress bar on standard error with counts and remaining time; silent off a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _tracked(records: Iterable[Trajectory], total: int | None) -> Iterator[Trajectory]:
    """Shows how many of the records have been taken; ``None`` where nobody knows their number."""
    with _progress() as bar:
        yield from bar.track(records, total=total, description="Records")


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
    """A tokenizer by name, or that of the run.

    Args:
        shards: shards of the set.
        name: embedded name, folder or hub id; ``None`` for what the run names, if that is on this
            machine (nothing is downloaded unless it was asked for).

    Raises:
        ValueError: there is no such tokenizer, or the run names none that is here.
    """
    from lit_dlm.backbones.location import embedded_names, load_tokenizer

    if name is not None:
        return load_tokenizer(name)
    path = run_of_shard(shards[0])[0].tokenizer.get("path")
    if isinstance(path, str) and (path in embedded_names() or Path(path).is_dir()):
        return load_tokenizer(path)
    raise ValueError(f"--tokenizer: the run's tokenizer {path!r} is not on this machine; name one")
