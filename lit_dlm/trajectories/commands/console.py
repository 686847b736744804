"""What the commands share: shards from paths, progress with remaining time, tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shard_files import shards_in
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader


def add_shards(parser: argparse.ArgumentParser) -> None:
    """Adds the positional argument SHARDS."""
    parser.add_argument(
        "shards",
        nargs="+",
        type=Path,
        metavar="SHARDS",
        help="folder of a set, or paths of its .tar files",
    )


def shard_paths(paths: Sequence[Path]) -> list[Path]:
    """Shards that paths name; a folder stands for all of its shards.

    Raises:
        ValueError: a path does not exist, or a folder has no shard.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = shards_in(path)
            if not inside:
                raise ValueError(f"{path}: there are no trajectory shards in this folder")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path}: there is no such shard or folder")
    return list(dict.fromkeys(found))


def find_record(shards: Sequence[Path], uid: str | None) -> Trajectory:
    """One record by its uid, or the first one.

    Raises:
        ValueError: no record has this uid; uids that contain it are named.
    """
    reader = TrajectoryShardReader(list(shards))
    if uid is None:
        return next(iter(reader))
    for path, index in reader.blocks:
        side = reader.side_file(path)
        first = sum(entry.num_records for entry in side.blocks[:index])
        if uid in side.uids[first : first + side.blocks[index].num_records]:
            return next(r for r in reader.read_block(path, index) if r.uid == uid)
    near = [known for known in reader.uids if uid in known][:3]
    hint = f"; did you mean {', '.join(near)}?" if near else f", such as {reader.uids[0]}"
    raise ValueError(f"no record has the uid {uid!r} among {reader.num_records}{hint}")


class Bar:
    """A progress bar on standard error with counts and remaining time; silent off a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
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
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, description: str, total: int | None) -> None:
        """A part of the work begins; ``None`` where nobody knows how much it is."""
        self._task = self._progress.add_task(description, total=total)

    def advance(self, count: int) -> None:
        """``count`` more units are done."""
        if self._task is not None:
            self._progress.advance(self._task, count)


def facts_table(title: str, rows: Sequence[tuple[str, Any]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, str(value))
    return table


def spoken_size(num_bytes: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
