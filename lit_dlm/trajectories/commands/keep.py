"""``lit-dlm traj repack`` and ``recover``: sets on disk."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_dlm.trajectories.commands.console import Bar, add_shards, shard_paths, spoken_size
from lit_dlm.trajectories.recovery import merge_manifest, recover
from lit_dlm.trajectories.repack import repack
from lit_dlm.trajectories.shard_files import side_files
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader


def add_parser(commands: Any) -> None:
    """Adds both commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "repack",
        help="rewrite a set with larger blocks and stronger compression",
        description="Writes the records of a set into another folder, with other blocks and "
        "stronger compression, and compares every content digest. The old set is only read; a "
        "repack that was broken off goes on when it is called again.",
    )
    add_shards(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the new set")
    parser.add_argument(
        "--block_size", type=int, default=256, help="records per block (default: %(default)s)"
    )
    parser.add_argument(
        "--level", type=int, default=19, help="zstd level, 1 to 22 (default: %(default)s)"
    )
    parser.set_defaults(run=run_repack)
    parser = commands.add_parser(
        "recover",
        help="save what a killed process left in a folder",
        description="Saves the whole blocks of unfinished shards whose process is dead, and "
        "rebuilds the manifest.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the set")
    parser.set_defaults(run=run_recover)


def run_repack(options: argparse.Namespace) -> int:
    """Runs ``repack``."""
    if not 1 <= options.level <= 22:
        raise ValueError(f"--level: expected 1 to 22, got {options.level}")
    shards = shard_paths(options.shards)
    with Bar() as bar:
        bar.start("Records", 2 * TrajectoryShardReader(shards, features=False).num_records)
        done = repack(
            shards,
            options.out,
            block_size=options.block_size,
            level=options.level,
            progress=bar.advance,
        )
    saved = 1 - done.bytes_after / max(done.bytes_before, 1)
    Console().print(
        f"{options.out}: {done.num_records:,} records, "
        f"{spoken_size(done.bytes_before)} -> {spoken_size(done.bytes_after)} ({saved:.1%} less), "
        "all content digests equal",
        soft_wrap=True,
    )
    return 0


def run_recover(options: argparse.Namespace) -> int:
    """Runs ``recover``."""
    console = Console()
    if not options.folder.is_dir():
        raise ValueError(f"{options.folder}: there is no such folder")
    found = recover(options.folder)
    if found:
        table = Table(title="Recovered", title_justify="left")
        table.add_column("file", overflow="fold")
        table.add_column("records saved", justify="right")
        table.add_column("blocks dropped", justify="right")
        table.add_column("now in", overflow="fold")
        for entry in found:
            shard = "-" if entry.shard is None else entry.shard.name
            table.add_row(
                entry.path.name, str(entry.num_records), str(entry.num_dropped_blocks), shard
            )
        console.print(table)
    else:
        console.print("nothing to recover")
    if side_files(options.folder):
        manifest = merge_manifest(options.folder)
        console.print(
            f"{options.folder}: {manifest['num_records']:,} records in "
            f"{len(manifest['shards'])} shards, {spoken_size(manifest['bytes'])}",
            soft_wrap=True,
        )
    return 0
