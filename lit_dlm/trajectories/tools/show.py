"""Shows stored trajectories in a terminal: a set, a record step by step, a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from rich.filesize import decimal
from rich.progress import track
from rich.table import Table
from rich.text import Text

from lit_dlm.system.terminal import PlainConsole, printable
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.provenance import run_of_shard
from lit_dlm.trajectories.store.reader import TrajectoryShardReader

if TYPE_CHECKING:  # it imports torch
    from lit_dlm.trajectories.tools.verify import Verification

_LEVELS = ("integrity", "structure", "authenticity", "teacher-forced", "free-running")
_SHOWN = 20


def show_set(shards: Sequence[Path]) -> None:
    """Prints the run, counts, lengths, steps and sizes of a set."""
    reader = TrajectoryShardReader(shards, features=False)
    columns: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    for place in tracked(reader.blocks, len(reader.blocks), "Blocks"):
        block, records = reader.outline(*place)
        columns.update({name: block.batch[name].nbytes for name in block.batch.schema.names})
        rows += map(_counts, records)
    console = PlainConsole()
    # A folder may hold shards of several runs, which differ in software or hardware.
    for digest, run in {digest: run for run, digest in map(run_of_shard, shards)}.items():
        console.print(f"Run {digest}", style="bold")
        console.print_json(run.text(), indent=1, ensure_ascii=True)
    console.print(_set_table(rows, shards, reader))
    console.print(_method_table(rows))
    sizes = [(name, f"{size / max(len(rows), 1):.1f}") for name, size in columns.items()]
    console.print(table("Columns, unpacked bytes per record", ("column", ">bytes"), sizes))


def _counts(record: Trajectory) -> dict[str, Any]:
    correct = record.meta.get("correct")
    return {
        "method": str(record.meta.get("method", "-")),
        "prompt tokens": record.num_prompt,
        "response tokens": record.num_generated,
        "steps": record.num_steps,
        "committed": record.num_committed,
        "status": record.status,
        "overwritten": record.superseded is not None,
        "correct": None if correct is None else float(correct),
    }


def _set_table(
    rows: list[dict[str, Any]], shards: Sequence[Path], reader: TrajectoryShardReader
) -> Table:
    entries = [entry for shard in shards for entry in reader.side_file(shard).blocks]
    size, count = sum(shard.stat().st_size for shard in shards), max(len(rows), 1)
    lines = [
        ("records", f"{len(rows):,}"),
        ("shards, blocks", f"{len(shards):,}, {len(entries):,}"),
        ("size", decimal(size, precision=2)),
        ("bytes per record", f"{size / count:,.0f}"),
        ("of these, features", f"{sum(e.feature_size or 0 for e in entries) / count:,.0f}"),
    ]
    for name in ("prompt tokens", "response tokens", "steps"):
        values = [row[name] for row in rows] or [0]
        mean = sum(values) / len(values)
        lines.append((name, f"{min(values)} to {max(values)}, mean {mean:.1f}"))
    ended = Counter(row["status"] for row in rows)
    lines.append(("ended", ", ".join(f"{number} {name}" for name, number in ended.items())))
    lines.append(("with overwritten writes", str(sum(row["overwritten"] for row in rows))))
    return table("Set", (), lines)


def _method_table(rows: list[dict[str, Any]]) -> Table:
    # Tokens per step are those of the set, not a mean over records, which short decodes would bias.
    sums = [("steps", "count"), ("steps", "sum"), ("committed", "sum"), ("correct", "mean")]
    lines = [
        (
            method["method"],
            f"{method['steps_count']:,}",
            f"{method['steps_sum'] / method['steps_count']:.1f}",
            f"{method['committed_sum'] / max(method['steps_sum'], 1):.2f}",
            "-" if method["correct_mean"] is None else f"{method['correct_mean']:.3f}",
        )
        for method in pa.Table.from_pylist(rows).group_by("method").aggregate(sums).to_pylist()
    ]
    heads = ("method", ">records", ">steps", ">tokens per step", ">correct")
    return table("Methods", heads, sorted(lines))


def show_record(record: Trajectory, tokenizer: Any) -> None:
    """Prints the response after every step, as token ids without a tokenizer."""
    console = PlainConsole()
    prompt = record.prompt_ids.tolist()
    console.print(f"{record.uid}: {record.num_steps} steps, {record.status}", style="bold")
    console.print(str(tokenizer.decode(prompt) if tokenizer else prompt), style="dim")
    width = len(str(record.num_steps - 1))
    for step, state in enumerate(record.all_states()[1:]):
        line = Text(f"{step:>{width}}  ", style="dim")
        written = set(record.committed_at(step).tolist())
        pieces = [
            (position in written, _piece(token, record.mask_id, tokenizer))
            for position, token in enumerate(state.tolist())
        ]
        for (is_new, piece), equal in groupby(pieces):
            count = len(list(equal))
            # A response usually ends in a long fill of end-of-text tokens.
            fold = tokenizer is not None and piece.startswith("<|") and count > 1
            line.append(f"{piece}*{count} " if fold else piece * count, "bold green" * is_new)
        console.print(line, soft_wrap=True)


def _piece(token: int, mask_id: int, tokenizer: Any) -> str:
    """Text of one position, with a symbol for line breaks, so that a canvas stays on one line."""
    if token == mask_id:
        return "·" if tokenizer else "· "
    if tokenizer is None:
        return f"{token} "
    return printable(str(tokenizer.decode([token])).replace("\n", "⏎"))


def show_verification(result: Verification) -> None:
    """Prints what was wrong, what was executed and the verdict."""
    console = PlainConsole()
    for title, lines in (("Problems", result.problems), ("Not as in the run", result.differences)):
        for number, line in enumerate(lines[:_SHOWN]):
            console.print(f"{title}: {line}" if number == 0 else f"  {line}", soft_wrap=True)
        if len(lines) > _SHOWN:
            console.print(f"  ... and {len(lines) - _SHOWN} more")
    name = _LEVELS[result.level]
    if result.level >= 3:
        console.print(_execution_table(result, f"Level {result.level}, {name}"))
        inexact = [v for v in result.verdicts if v.outcome != "exact"]
        rows = [
            (v.uid, v.outcome, f"{v.num_agreeing}/{v.num_checked}", f"{v.margin:.4f}", v.reason)
            for v in sorted(inexact, key=lambda v: v.outcome != "failed")[:_SHOWN]
        ]
        if rows:
            title = f"{len(inexact)} records that are not exact, of which {len(rows)} are shown"
            columns = ("uid", "outcome", "steps", "margin", "first difference")
            console.print(table(title, columns, rows))
    verdict, style = ("FAILED", "bold red") if result.failed else ("passed", "bold green")
    text = f"{verdict}: level {result.level} ({name}), {result.num_records} records"
    console.print(text, style=style, highlight=False)


def _execution_table(result: Verification, title: str) -> Table:
    verdicts = result.verdicts
    checked, agreeing = sum(v.num_checked for v in verdicts), sum(v.num_agreeing for v in verdicts)
    tokens = sum(v.token_agreement for v in verdicts) / max(len(verdicts), 1)
    lines = [
        ("records executed", f"{len(verdicts):,} of {result.num_records:,}"),
        *[(name, f"{number:,}") for name, number in result.counts.items()],
        ("steps that agree", f"{agreeing:,} of {checked:,} ({agreeing / max(checked, 1):.2%})"),
        ("tokens that agree", f"{tokens:.2%}"),
    ]
    return table(title, (), lines)


def tracked(items: Iterable[Any], total: int | None, name: str = "Records") -> Iterable[Any]:
    """Shows on a terminal how many items have been taken; ``total`` is ``None`` if unknown."""
    console = PlainConsole(stderr=True)
    hidden = not console.is_terminal
    return track(items, name, total, console=console, transient=True, disable=hidden)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table, of names and values without ``columns``; ``>`` right-aligns a column."""
    shown = Table(title=title, title_justify="left", show_header=bool(columns))
    for number, name in enumerate(columns):
        justify: Any = "right" if name.startswith(">") else "left"
        # The first column, of names, is not wrapped; values are folded instead.
        shown.add_column(
            name.removeprefix(">"), justify=justify, overflow="fold", no_wrap=not number
        )
    if not columns:
        shown.add_column(style="bold")
        shown.add_column(overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown
