"""``lit-dlm traj diff``: where two sets, or two records, part."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_dlm.trajectories.commands.console import Bar, shard_paths
from lit_dlm.trajectories.compare import TrajectoryDiff, diff
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader

_SHOWN = 20


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "diff",
        help="first differing step of records that two sets share",
        description="Compares records of equal uid in two sets: the first step that differs, the "
        "positions that only one of them wrote there, tokens that differ, and stored margins. "
        "Exit status 1 when something differs.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="folder of a set, or a .tar file")
    parser.add_argument("b", type=Path, metavar="B", help="folder of a set, or a .tar file")
    parser.add_argument("--uid", help="compare this record only")
    parser.add_argument("--uid_b", help="its uid in B, where that is another one")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    if options.uid_b is not None and options.uid is None:
        raise ValueError("--uid_b: needs --uid")
    a = _records(options.a, options.uid)
    b = _records(options.b, options.uid_b or options.uid)
    if options.uid_b is not None:
        b = {options.uid: b[options.uid_b]}
    shared = [uid for uid in a if uid in b]
    alone = [uid for uid in a if uid not in b], [uid for uid in b if uid not in a]
    found = {uid: diff(a[uid], b[uid]) for uid in shared}
    differing = {uid: result for uid, result in found.items() if not result.same}
    if options.json:
        Console().print_json(
            json.dumps(
                {
                    "num_compared": len(shared),
                    "num_equal": len(shared) - len(differing),
                    "only_a": alone[0],
                    "only_b": alone[1],
                    "differing": {uid: _facts(result) for uid, result in differing.items()},
                }
            )
        )
    else:
        _print(differing, len(shared), alone)
    return 1 if differing or alone[0] or alone[1] else 0


def _records(path: Path, uid: str | None) -> dict[str, Trajectory]:
    reader = TrajectoryShardReader(shard_paths([path]), features=False)
    if uid is not None and uid not in reader.uids:
        raise ValueError(f"{path}: no record has the uid {uid!r}")
    with Bar() as bar:
        bar.start(f"Reading {path}", reader.num_records)
        records = {}
        for record in reader:
            if uid is None or record.uid == uid:
                records[record.uid] = record
            bar.advance(1)
    return records


def _facts(result: TrajectoryDiff) -> dict[str, Any]:
    return {
        "same_prompt": result.same_prompt,
        "first_step": result.first_step,
        "only_a": result.only_a.tolist(),
        "only_b": result.only_b.tolist(),
        "tokens": result.tokens.tolist(),
        "num_final_differing": result.num_final_differing,
        "num_steps": list(result.num_steps),
        "margins": [None if m is None else m.astype(float).tolist() for m in result.margins],
    }


def _print(
    differing: dict[str, TrajectoryDiff], num_shared: int, alone: tuple[list[str], list[str]]
) -> None:
    console = Console()
    if differing:
        table = Table(title="Records that differ", title_justify="left")
        for name in ("uid", "steps", "first", "only A wrote", "only B wrote", "tokens A/B"):
            table.add_column(name, overflow="fold")
        table.add_column("final tokens", justify="right")
        for uid, result in list(differing.items())[:_SHOWN]:
            table.add_row(
                uid,
                "/".join(map(str, result.num_steps)),
                _first(result),
                _positions(result.only_a, result.margins[0]),
                _positions(result.only_b, result.margins[1]),
                ", ".join(f"{p}: {x}/{y}" for p, x, y in result.tokens.tolist()[:4]) or "-",
                f"{result.num_final_differing} differ",
            )
        console.print(table)
        if len(differing) > _SHOWN:
            console.print(f"... and {len(differing) - _SHOWN} more")
    console.print(f"{num_shared} records compared, {num_shared - len(differing)} equal")
    for name, uids in zip("AB", alone, strict=True):
        if uids:
            console.print(f"only in {name}: {len(uids)} records, {uids[0]} first")


def _first(result: TrajectoryDiff) -> str:
    if not result.same_prompt:
        return "prompt"
    return "end" if result.first_step is None else f"step {result.first_step}"


def _positions(positions: Any, margins: Any) -> str:
    shown = positions.tolist()[:4]
    if margins is None:
        texts = [str(position) for position in shown]
    else:
        values = margins[: len(shown)].astype(float).tolist()
        texts = [f"{p} (margin {m:.3f})" for p, m in zip(shown, values, strict=True)]
    rest = len(positions) - len(shown)
    return (", ".join(texts) or "-") + (f" and {rest} more" if rest else "")
