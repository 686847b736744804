"""``lit-dlm traj verify``: integrity, structure, authenticity, and re-execution."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lit_dlm.trajectories.commands.console import Bar, add_shards, facts_table, shard_paths
from lit_dlm.trajectories.errors import TrajectoryFormatError
from lit_dlm.trajectories.identity import run_of_shard
from lit_dlm.trajectories.provenance import RunRecord
from lit_dlm.trajectories.verdict import TOLERANCE
from lit_dlm.trajectories.verify import Execution, Verification, verify

_SHOWN = 20
_NAMES = ("integrity", "structure", "authenticity", "teacher-forced", "free-running")


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="integrity, structure, authenticity, and re-execution",
        description="Levels: 0 integrity (checksums), 1 structure (rules of the format), 2 "
        "authenticity (digests, Merkle root, manifest), 3 teacher-forced (each recorded canvas is "
        "decided again), 4 free-running (prompts are decoded again). Exit status 1 when something "
        "fails or the model, tokenizer, seed or decoder is not that of the run.",
    )
    add_shards(parser)
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
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="margin below which a differing decision is a near tie (default: %(default)s)",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="execute only N records")
    parser.add_argument("--steps", type=int, metavar="K", help="level 3: only K steps of a batch")
    parser.add_argument("--batch_size", type=int, help="default: that of the run")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    shards = shard_paths(options.shards)
    for name in ("sample", "steps", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected at least 1, got {value}")
    if options.level >= 3 and options.backbone is None:
        raise ValueError(f"--backbone: level {options.level} executes the records, so it needs one")
    with Bar() as bar:
        execution = _execution(shards, options) if options.level >= 3 else None
        result = verify(
            shards,
            level=options.level,
            execution=execution,
            tolerance=options.tolerance,
            sample=options.sample,
            progress=bar,
        )
    if options.json:
        Console().print_json(json.dumps(result.as_dict()))
    else:
        _print(result)
    return 1 if result.failed else 0


def _execution(shards: Sequence[Path], options: argparse.Namespace) -> Execution:
    """Loads what levels 3 and 4 need, with the dtype and attention route of the run."""
    # Here: transformers takes seconds to import.
    from lit_dlm.backbones import load_backbone, load_tokenizer

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
    )
    return Execution(
        backbone=backbone,
        tokenizer=load_tokenizer(options.tokenizer or options.backbone),
        seed=options.seed,
        temperature=options.temperature,
        policy_folders=[*options.policy, *_policies_beside(shards)],
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


def _print(result: Verification) -> None:
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
        console.print(facts_table(f"Level {result.level}, {_NAMES[result.level]}", _rows(result)))
        failing = [v for v in result.verdicts if v.outcome != "exact"]
        if failing:
            console.print(_failures(failing))
    verdict = "FAILED" if result.failed else "passed"
    style = "bold red" if result.failed else "bold green"
    text = f"{verdict}: level {result.level} ({_NAMES[result.level]}), {result.num_records} records"
    console.print(text, style=style, highlight=False)


def _rows(result: Verification) -> list[tuple[str, Any]]:
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
    table = Table(title="Records that are not exact", title_justify="left")
    for name in ("uid", "outcome", "steps", "margin", "first difference"):
        table.add_column(name, overflow="fold")
    ordered = sorted(verdicts, key=lambda v: v.outcome != "failed")
    for verdict in ordered[:_SHOWN]:
        table.add_row(
            verdict.uid,
            verdict.outcome,
            f"{verdict.num_agreeing}/{verdict.num_checked}",
            f"{verdict.margin:.4f}",
            verdict.reason,
        )
    if len(ordered) > _SHOWN:
        table.caption = f"... and {len(ordered) - _SHOWN} more"
    return table
