"""``lit-dlm traj export`` and ``import``: formats of other tools."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_dlm.trajectories.commands.console import Bar, add_shards, shard_paths
from lit_dlm.trajectories.exporters import (
    step_map_row,
    tabom_row,
    write_json_list,
    write_jsonl,
    write_parquet,
)
from lit_dlm.trajectories.identity import run_of_shard
from lit_dlm.trajectories.importers import (
    ImportSettings,
    read_parquet,
    read_step_map,
    read_tabom,
)
from lit_dlm.trajectories.provenance import RunRecord
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.recovery import merge_manifest
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader
from lit_dlm.trajectories.shard_writer import TrajectoryShardWriter

_FORMATS = {
    "parquet": "everything but features, for sharing and queries",
    "jsonl": "TABOM's rows with decoding_order",
    "step_map": "dLLM-RL's JSON list with step_map",
}
_SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "step_map", ".dtrace": "dtrace"}


def add_parser(commands: Any) -> None:
    """Adds both commands."""
    listed = "; ".join(f"{name}: {text}" for name, text in _FORMATS.items())
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="to Parquet, TABOM's JSONL or dLLM-RL's JSON",
        description=f"Writes the records of a set into one file. {listed}.",
    )
    add_shards(parser)
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
    parser.set_defaults(run=run_export)
    parser = commands.add_parser(
        "import",
        help="from Parquet, TABOM's JSONL, dLLM-RL's JSON or .dtrace",
        description="Writes the rows of a file into a new set of shards. Token ids in a row win "
        "over its texts.",
    )
    parser.add_argument("file", type=Path, nargs="+", metavar="FILE", help="files of one format")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new set")
    parser.add_argument(
        "--format",
        choices=(*sorted(_FORMATS), "dtrace"),
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
    parser.add_argument(
        "--allow_pickle",
        action="store_true",
        help="allow .dtrace files, which are pickles; only two data classes and builtin types are "
        "let through",
    )
    parser.set_defaults(run=run_import)


def run_export(options: argparse.Namespace) -> int:
    """Runs ``export``."""
    shards = shard_paths(options.shards)
    kind = options.format or _by_suffix(options.out, "--out", _FORMATS)
    if not options.out.parent.is_dir():
        raise ValueError(f"--out: there is no folder {options.out.parent}")
    reader = TrajectoryShardReader(shards, features=False)
    skipped: list[str] = []
    with Bar() as bar:
        bar.start("Records", reader.num_records)
        if kind == "parquet":
            if options.tokenizer is not None:
                raise ValueError("--tokenizer: parquet holds ids and no texts; leave it out")
            texts = {run_of_shard(shard)[0].text() for shard in shards}
            run_text = texts.pop() if len(texts) == 1 else None
            records = _counted(reader, bar)
            count = write_parquet(records, options.out, run_text=run_text)
        else:
            from lit_dlm.trajectories.commands.loading import tokenizer_of

            tokenizer = tokenizer_of(shards, options.tokenizer)
            make_row = tabom_row if kind == "jsonl" else step_map_row
            write = write_jsonl if kind == "jsonl" else write_json_list
            keep = skipped if options.skip_misfits else None
            count = write(_rows(_counted(reader, bar), make_row, tokenizer, keep), options.out)
    console = Console()
    console.print(f"{options.out}: {count:,} records", soft_wrap=True)
    if skipped:
        console.print(f"left out: {len(skipped)} records, such as: {skipped[0]}", soft_wrap=True)
    return 0


def run_import(options: argparse.Namespace) -> int:
    """Runs ``import``."""
    kinds = {
        options.format or _by_suffix(path, "FILE", _SUFFIXES.values()) for path in options.file
    }
    if len(kinds) > 1:
        raise ValueError(f"FILE: expected one format, got {', '.join(sorted(kinds))}")
    kind = kinds.pop()
    for path in options.file:
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
    if kind == "dtrace" and not options.allow_pickle:
        raise ValueError(
            f"{options.file[0]}: .dtrace files are pickles; --allow_pickle reads them through an "
            "unpickler that lets only two data classes and builtin types through"
        )
    records, run_text = _read_all(options, kind)
    run = RunRecord.parse(run_text) if run_text is not None else _import_run(options.file, kind)
    writer = TrajectoryShardWriter(
        options.out, name=options.name, split=options.split, rank=0, run=run
    )
    count = 0
    with writer, Bar() as bar:
        bar.start("Records", None)
        for record in records:
            writer.put(record)
            bar.advance(1)
            count += 1
    if writer.refused:
        uid, error = next(iter(writer.refused.items()))
        raise ValueError(f"{len(writer.refused)} records were refused, {uid!r} first: {error}")
    if count:
        merge_manifest(options.out)
    Console().print(f"{options.out}: {count:,} records", soft_wrap=True)
    return 0


def _read_all(options: argparse.Namespace, kind: str) -> tuple[Iterator[Trajectory], str | None]:
    """Records of all files, and the run of all rows where a single Parquet file names it."""
    if kind == "parquet":
        parts = [read_parquet(path) for path in options.file]
        texts = {text for _, text in parts}
        run_text = texts.pop() if len(texts) == 1 else None
        return (record for records, _ in parts for record in records), run_text
    if kind == "dtrace":
        from lit_dlm.trajectories.peer_import import read_dtrace

        if options.mask_id is None or options.vocab_size is None:
            raise ValueError("--mask_id, --vocab_size: .dtrace files do not name them; give both")
        facts = {"mask_id": options.mask_id, "vocab_size": options.vocab_size}
        return (record for path in options.file for record in read_dtrace(path, **facts)), None
    tokenizer = None
    if options.tokenizer is not None:
        from lit_dlm.backbones.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
    settings = ImportSettings(
        mask_id=options.mask_id,
        vocab_size=options.vocab_size,
        tokenizer=tokenizer,
        first_step=options.first_step,
        pad_id=options.pad_id,
    )
    read = read_tabom if kind == "jsonl" else read_step_map
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
    records: Iterator[Trajectory],
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


def _counted(records: Any, bar: Bar) -> Iterator[Trajectory]:
    for record in records:
        bar.advance(1)
        yield record


def _by_suffix(path: Path, option: str, known: Any) -> str:
    kind = _SUFFIXES.get(path.suffix)
    if kind is None or kind not in known:
        raise ValueError(f"{option}: cannot tell the format by the ending of {path}; give --format")
    return kind
