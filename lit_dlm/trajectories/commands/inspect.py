"""``lit-dlm traj inspect``: the run, counts, lengths and sizes of a set."""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lit_dlm.trajectories.commands.console import (
    Bar,
    add_shards,
    facts_table,
    shard_paths,
    spoken_size,
)
from lit_dlm.trajectories.container import stored_sizes
from lit_dlm.trajectories.identity import run_of_shard
from lit_dlm.trajectories.provenance import RunRecord
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader

_TAGS = {
    "SMID": "uids",
    "PLEN": "prompt lengths",
    "GLEN": "response lengths",
    "NSTP": "steps",
    "PTOK": "prompt tokens",
    "PDIG": "prompt digests",
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
    "ROLD": "log-probability of writes",
    "CVAL": "value before writes",
    "CADV": "advantage of writes",
}


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="the run, counts, lengths, steps and sizes of a set",
        description="Shows the run that made a set, its counts, lengths and steps, and how many "
        "bytes each column takes per record.",
    )
    add_shards(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    shards = shard_paths(options.shards)
    facts = inspect(shards)
    console = Console()
    if options.json:
        console.print_json(json.dumps(facts))
        return 0
    for digest, record in facts["runs"].items():
        console.print(facts_table(f"Run {digest}", _run_rows(record)))
    console.print(facts_table("Set", _set_rows(facts)))
    console.print(_method_table(facts["methods"]))
    console.print(_column_table(facts))
    return 0


def inspect(shards: Sequence[Path]) -> dict[str, Any]:
    """Facts about shards, as JSON types; reads every record once."""
    reader = TrajectoryShardReader(list(shards))
    sides = [reader.side_file(shard) for shard in shards]
    columns: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    lengths: dict[str, list[int]] = {"prompt": [], "response": [], "steps": []}
    statuses: Counter[str] = Counter()
    methods: dict[str, list[Trajectory]] = defaultdict(list)
    num_overwritten = num_features = 0
    with Bar() as bar:
        bar.start("Records", reader.num_records)
        for shard, side in zip(shards, sides, strict=True):
            for record in TrajectoryShardReader([shard], features=False):
                lengths["prompt"].append(record.num_prompt)
                lengths["response"].append(record.num_generated)
                lengths["steps"].append(record.num_steps)
                statuses[record.status] += 1
                methods[str(record.meta.get("method", "-"))].append(record)
                num_overwritten += record.superseded is not None
                bar.advance(1)
            with shard.open("rb") as file:
                for entry in side.blocks:
                    for offset, size in (
                        (entry.offset, entry.size),
                        (entry.feature_offset, entry.feature_size),
                    ):
                        if offset is None or size is None:
                            continue
                        file.seek(offset)
                        for tag, sizes in stored_sizes(file.read(size)).items():
                            columns[tag][0] += sizes[0]
                            columns[tag][1] += sizes[1]
            num_features += sum(entry.feature_size or 0 for entry in side.blocks)
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
        "methods": {name: _method_facts(records) for name, records in sorted(methods.items())},
        "columns": {tag: {"raw": raw, "stored": size} for tag, (raw, size) in columns.items()},
    }


def _method_facts(records: Sequence[Trajectory]) -> dict[str, Any]:
    steps = [record.num_steps for record in records]
    correct = [record.meta["correct"] for record in records if "correct" in record.meta]
    return {
        "num_records": len(records),
        "mean_steps": float(np.mean(steps)),
        "tokens_per_step": sum(r.num_committed for r in records) / max(sum(steps), 1),
        "correct": float(np.mean(correct)) if correct else None,
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
        plugs = [_plug(name, value) for name, value in method.items() if name != "settings"]
        rows.append((f"method {name}", ", ".join(plugs)))
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
        ("size", spoken_size(facts["bytes"])),
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
    table = Table(title="Methods", title_justify="left")
    table.add_column("method")
    for name in ("records", "steps", "tokens per step", "correct"):
        table.add_column(name, justify="right")
    for name, facts in methods.items():
        correct = "-" if facts["correct"] is None else f"{facts['correct']:.3f}"
        table.add_row(
            name,
            f"{facts['num_records']:,}",
            f"{facts['mean_steps']:.1f}",
            f"{facts['tokens_per_step']:.2f}",
            correct,
        )
    return table


def _column_table(facts: dict[str, Any]) -> Table:
    count = max(facts["num_records"], 1)
    table = Table(title="Columns, bytes per record", title_justify="left")
    table.add_column("column")
    table.add_column("holds")
    table.add_column("raw", justify="right")
    table.add_column("stored", justify="right")
    for tag, sizes in facts["columns"].items():
        table.add_row(
            tag, _TAGS.get(tag, ""), f"{sizes['raw'] / count:.1f}", f"{sizes['stored'] / count:.1f}"
        )
    total = sum(sizes["stored"] for sizes in facts["columns"].values())
    other = facts["bytes"] - total
    table.add_row("", "headers and tar", "", f"{other / count:.1f}")
    return table
