"""What the experiments share: commands that run once, lists of problems, differences, tables."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from lit_dlm import cli
from lit_dlm.reports.results import ResultFolder
from lit_dlm.system.files import write_atomically

CONFIGS = Path(cli.__file__).resolve().parent / "configs"
BARE = (
    *("--trainer.callbacks", "[]", "--trainer.enable_checkpointing", "false"),
    *("--trainer.logger", "false"),
)
"""Flags of training that leaves nothing but what it exports."""


def parser(doc: str | None, *seeds: int) -> argparse.ArgumentParser:
    """Returns the options that experiments share, with default seeds; sets torch to one thread."""
    torch.set_num_threads(1)
    found = argparse.ArgumentParser(description=doc)
    found.add_argument("--out", type=Path, help="folder of the runs; none only reports")
    found.add_argument("--train_seeds", nargs="+", type=int, default=list(seeds))
    return found


def call(done: Path, *arguments: object, costs: Path | None = None) -> None:
    """Runs a command, unless the file ``done``, which marks its completion, exists.

    A completed command adds its processor time in seconds to the file ``costs``; wall time depends
    on what else the machine does.
    """
    if done.exists():
        return
    words = list(map(str, arguments))
    began = time.process_time()
    cli.main([*words, "--trainer.enable_progress_bar", "false"])
    if costs is not None:
        with costs.open("a") as file:
            file.write(f"{time.process_time() - began}\n")
    write_atomically(done, shlex.join(words) + "\n")


def seed_flags(seed: int) -> list[str]:
    """Returns flags that give one seed to everything that is random in training."""
    return [f"--{name}={seed}" for name in ("seed_everything", "model.seed", "data.seed")]


def problems(task: str, split: str, count: int, **options: object) -> str:
    """Returns a list of problems of one task as a flag's value."""
    values = {"split": split, "num_examples": count, **options}
    return json.dumps([{"class_path": task, "init_args": values}])


def recorded(folder: Path) -> str:
    """Returns the right decodes of a run as the value of the flag ``--data.sources``."""
    values = {"shards": str(folder / "traces"), "only_correct": True, "tasks": None}
    return json.dumps([{"class_path": "RecordedDecodes", "init_args": values}])


SCHEMA = pa.schema(
    {
        **dict.fromkeys(("arm", "task", "method"), pa.dictionary(pa.int16(), pa.string())),
        "seed": pa.int8(),  # of training
        "uid": pa.string(),
        "correct": pa.bool_(),
        "forwards": pa.int16(),
    }
)
"""One row for each decode."""

Decodes = dict[tuple[str, str, str], tuple[NDArray[Any], NDArray[Any]]]
"""By arm, task and method: forwards and verdicts, both of shape (seeds, problems)."""


def keep_decodes(path: Path, runs: Iterable[tuple[str, int, Path]]) -> Decodes:
    """Writes every decode of some runs (arm, seed and results folder) to one Parquet file.

    Returns what :func:`read_decodes` reads back.
    """
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for arm, seed, folder in runs:
        results = ResultFolder(folder)
        for task, method in results.pairs():
            for row in results.rows(task, method):
                values = (arm, task, method, seed, row.uid, row.correct, row.nfe)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
    kept = pa.table(columns, schema=SCHEMA)
    pq.write_table(kept, path, compression="zstd", compression_level=19)
    return read_decodes(path)


def read_decodes(path: Path) -> Decodes:
    """Returns what :func:`keep_decodes` wrote, sorted by seed and problem."""
    try:
        frame = pq.read_table(path).to_pandas().sort_values(["seed", "uid"])
    except (pa.ArrowInvalid, OSError) as error:
        message = f"{path}: expected kept decodes, which a run with --out makes, got {error!r}"
        raise SystemExit(message) from None
    return {
        cell: tuple(
            rows[name].to_numpy(float).reshape(rows.seed.nunique(), -1)
            for name in ("forwards", "correct")
        )
        for cell, rows in frame.groupby(["arm", "task", "method"], observed=True)
    }


def between(
    front: Iterable[tuple[NDArray[Any], NDArray[Any]]], forwards: float
) -> NDArray[Any] | None:
    """What the two points of a front around a number of forwards get right, mixed by chance.

    Points are forwards and verdicts of shape (seeds, problems). Returns verdicts of this shape,
    from 0 to 1; ``None`` where the front does not reach.
    """
    by_speed = sorted(((float(cost.mean()), right) for cost, right in front), key=lambda p: p[0])
    for (fast, one), (slow, two) in pairwise(by_speed):
        if fast <= forwards <= slow:
            share = (forwards - fast) / max(slow - fast, 1e-9)
            return (1 - share) * one + share * two
    return None


@lru_cache(maxsize=4)
def resamples(seeds: int, problems: int, count: int = 2000) -> NDArray[Any]:
    """Draws bootstrap weights for means of ``(seeds, problems)`` values, resampling both.

    The variance of resampled seeds is too small by a factor ``(S - 1) / S``; this is corrected.
    Returns ``(1 + count, seeds * problems)``, first the weights of the plain mean.
    """
    generator = np.random.default_rng(0)
    factor = (seeds / (seeds - 1)) ** 0.5 if seeds > 1 else 0.0
    weights = np.full((1 + count, seeds, problems), 1 / (seeds * problems))
    for drawn in weights[1:]:
        by_problem = generator.integers(problems, size=problems)
        by_seed = np.bincount(generator.integers(seeds, size=seeds), minlength=seeds) / seeds
        by_seed = 1 / seeds + factor * (by_seed - 1 / seeds)
        np.outer(by_seed, np.bincount(by_problem, minlength=problems) / problems, out=drawn)
    return weights.reshape(1 + count, -1)


def standard_error(values: NDArray[Any]) -> float:
    """Standard error of the mean of ``(seeds, problems)`` values, over :func:`resamples`."""
    return float((resamples(*values.shape)[1:] @ values.ravel()).std(ddof=1))


def points(values: NDArray[Any], sign: str = "+") -> str:
    """Formats the mean of ``(seeds, problems)`` values in per cent or points, with its error."""
    return f"{100 * values.mean():{sign}.1f} ± {100 * standard_error(values):.1f}"


def degrees_of_freedom(values: NDArray[Any]) -> float:
    """Satterthwaite's for :func:`standard_error`, whose part over ``S`` seeds has ``S - 1``."""
    seeds = len(values)
    part = values.mean(1).std(ddof=1) / seeds**0.5 if seeds > 1 else 0.0
    return float((seeds - 1) * (standard_error(values) / part) ** 4) if part else math.inf


def student(df: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns values of Student's t from 0 on, and the probabilities that it is larger in size."""
    df = min(df, 1e4)  # normal to four digits
    angles = np.linspace(0.0, np.pi / 2, 100_001)[:-1]  # t is tan(angle) times the root of df
    density = np.cos(angles) ** (df - 1)
    areas = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return df**0.5 * np.tan(angles), 1.0 - areas / areas[-1]


def table(lines: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; all columns but the first are aligned to the right."""
    head, *rows = lines
    rule = f"|---{'|---:' * (len(head) - 1)}|\n"
    text = [
        "".join(f"| {cell} " if cell else "| " for cell in line) + "|\n" for line in (head, *rows)
    ]
    return text[0] + rule + "".join(text[1:])
