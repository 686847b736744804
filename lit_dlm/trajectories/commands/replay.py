"""``lit-dlm traj replay``: a record step by step, as text or as arrays."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from lit_dlm.trajectories.commands.console import Bar, add_shards, find_record, shard_paths
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.replay import iter_steps
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="a record step by step, as text or as arrays",
        description="Replays records: prints the response after every step, or writes all canvases "
        "to an .npz file. Replay shows what a record says; it does not verify it.",
    )
    add_shards(parser)
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    shards = shard_paths(options.shards)
    console = Console()
    if options.npz is not None:
        if options.step is not None or options.tokenizer is not None:
            raise ValueError("--npz: writes all steps as ids; leave --step and --tokenizer out")
        return _write_states(shards, options.uid, options.npz, console)
    record = find_record(shards, options.uid)
    if options.step is not None and not 0 <= options.step < record.num_steps:
        raise ValueError(f"--step: expected 0 to {record.num_steps - 1}, got {options.step}")
    tokenizer = None
    if options.tokenizer != "none":
        # Here: transformers takes seconds to import.
        from lit_dlm.trajectories.commands.loading import tokenizer_of

        tokenizer = tokenizer_of(shards, options.tokenizer)
    _print_steps(record, tokenizer, options.step, console)
    return 0


def _print_steps(record: Trajectory, tokenizer: Any, step: int | None, console: Console) -> None:
    prompt = record.prompt_ids.tolist()
    console.print(f"{record.uid}: {record.num_steps} steps, {record.status}", style="bold")
    console.print(Text(str(tokenizer.decode(prompt) if tokenizer else prompt), style="dim"))
    width = len(str(record.num_steps - 1))
    for replayed in iter_steps(record):
        if step is not None and replayed.step != step:
            continue
        line = Text(f"{replayed.step:>{width}}  ", style="dim")
        cells = [
            (position in replayed.positions, _piece(token, record.mask_id, tokenizer))
            for position, token in enumerate(replayed.canvas.tolist())
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
    if uid is not None:
        record = find_record(shards, uid)
        arrays = {"uids": np.array([record.uid]), "states_0": record.all_states()}
    else:
        reader = TrajectoryShardReader(shards, features=False)
        uids = []
        with Bar() as bar:
            bar.start("Records", reader.num_records)
            for number, record in enumerate(reader):
                uids.append(record.uid)
                arrays[f"states_{number}"] = record.all_states()
                bar.advance(1)
        arrays["uids"] = np.array(uids)
    np.savez_compressed(path, **arrays)
    console.print(f"{path}: canvases of {len(arrays) - 1} records, (T + 1, G) each")
    return 0
