"""Verification of a set of trajectories, levels V0 to V4.

| level | needs | proves |
|---|---|---|
| 0 integrity | files | bytes unchanged by accident |
| 1 structure | files | every intermediate canvas is well defined |
| 2 authenticity | manifest | the records are the published ones |
| 3 teacher-forced | weights | each recorded canvas leads to the recorded decision |
| 4 free-running | weights, seed | decoding from the prompt gives the record |

A level includes those below it, except that 4 stands in for 3. Replay of a record is none of these:
it shows what the record says, whoever wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from lit_dlm.backbones.base import Backbone
from lit_dlm.trajectories.errors import ShardError, TrajectoryFormatError
from lit_dlm.trajectories.identity import (
    backbone_differences,
    method_of,
    rebuilt_decoder,
    run_of_shard,
    seeds_of,
    tokenizer_differences,
)
from lit_dlm.trajectories.integrity import check_files
from lit_dlm.trajectories.kept_steps import KeptSteps
from lit_dlm.trajectories.provenance import RunRecord
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.reexecution import free_running, signed_seed, teacher_forced
from lit_dlm.trajectories.shard_files import ShardName
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader
from lit_dlm.trajectories.verdict import TOLERANCE, RecordVerdict


class Progress(Protocol):
    """Told how far the work is."""

    def start(self, description: str, total: int) -> None:
        """A part begins that takes ``total`` units."""
        ...

    def advance(self, count: int) -> None:
        """``count`` more units are done."""
        ...


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How records are executed again, at levels 3 and 4."""

    backbone: Backbone
    """The denoiser, on ``device``."""
    tokenizer: Any = None
    """Compared with that of the run; not compared when ``None``."""
    seed: int | None = None
    """Base seed instead of the stored sample seeds."""
    temperature: float | None = None
    """Sampling temperature instead of the recorded one."""
    policy_folders: Sequence[str | Path] = ()
    """Where exported policies lie; they are found by the digest of their weights."""
    batch_size: int | None = None
    """Records in a batch; that of the run by default, so that batches are the same."""
    num_steps: int | None = None
    """Check this many steps of every batch, drawn with a fixed seed; all by default. Level 3."""
    device: torch.device | str = "cpu"
    """Where to compute."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result for a set."""

    level: int
    """Highest level that was asked for."""
    num_records: int
    """Records of the set."""
    problems: list[str] = field(default_factory=list)
    """What levels 0 to 2 found wrong."""
    differences: list[str] = field(default_factory=list)
    """What is not as in the run: weights, tokenizer, seed, decoder."""
    verdicts: list[RecordVerdict] = field(default_factory=list)
    """One per executed record."""

    @property
    def counts(self) -> dict[str, int]:
        """Executed records by outcome."""
        found = Counter(verdict.outcome for verdict in self.verdicts)
        return {name: found[name] for name in ("exact", "explained", "failed")}

    @property
    def failed(self) -> bool:
        """Whether anything is wrong: a file, an identity, or a record."""
        return bool(self.problems or self.differences or self.counts["failed"])

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON types; infinite margins become ``None``."""
        verdicts = [asdict(verdict) for verdict in self.verdicts]
        for verdict in verdicts:
            if not np.isfinite(verdict["margin"]):
                verdict["margin"] = None
        return {
            "level": self.level,
            "num_records": self.num_records,
            "failed": self.failed,
            "problems": self.problems,
            "differences": self.differences,
            **self.counts,
            "records": verdicts,
        }


def verify(
    shards: Sequence[str | Path],
    *,
    level: int = 2,
    execution: Execution | None = None,
    tolerance: float = TOLERANCE,
    sample: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Verifies shards up to a level.

    Problems of files do not stop the execution of what can be read, and neither does another
    identity: the result then says how far the records agree all the same.

    Args:
        shards: paths of shards, with their side files beside them.
        level: 0 to 4.
        execution: needed at levels 3 and 4.
        tolerance: margin below which a differing decision counts as a near tie.
        sample: execute only this many records, spread evenly over the set.
        progress: told how far the work is.

    Returns:
        What was found.

    Raises:
        ValueError: the level is unknown, levels 3 and 4 lack a backbone, or a record cannot be
            executed at all, for a reason that it names.
    """
    if not 0 <= level <= 4:
        raise ValueError(f"level: expected 0 to 4, got {level}")
    if level >= 3 and execution is None:
        raise ValueError(f"level {level}: needs a backbone to execute the records with")
    if not tolerance >= 0.0:  # also refuses what is not a number
        raise ValueError(f"tolerance: expected 0 or more, got {tolerance}")
    if sample is not None and sample < 1:
        raise ValueError(f"sample: expected at least 1, got {sample}")
    paths = [Path(shard) for shard in shards]
    advance = progress.advance if progress is not None else None
    try:
        reader = _lenient(paths)
    except ShardError:  # no shard has its side file: nothing can be read
        problems = check_files(paths, level=min(level, 2), progress=None)
        return Verification(level=level, num_records=0, problems=problems)
    if progress is not None:
        progress.start("Files", reader.num_records)
    problems = check_files(paths, level=min(level, 2), progress=advance)
    differences: list[str] = []
    verdicts: list[RecordVerdict] = []
    if level >= 3:
        assert execution is not None
        batches = list(_batches(paths, execution.batch_size, sample))
        # A method that cannot be rebuilt is found before hours of work, not after.
        for run, method in {
            (b.run.digest(), b.method): (b.run, b.method) for b in batches
        }.values():
            rebuilt_decoder(run, method, policy_folders=execution.policy_folders)
        if progress is not None:
            total = sum(_num_forwards(batch, level, execution.num_steps) for batch in batches)
            progress.start("Re-execution", total)
        for number, batch in enumerate(batches):
            lines, found = _execute(batch, number, level, execution, tolerance, progress)
            differences += [line for line in lines if line not in differences]
            verdicts += found
    return Verification(
        level=level,
        num_records=reader.num_records,
        problems=problems,
        differences=differences,
        verdicts=verdicts,
    )


@dataclass(frozen=True)
class _Batch:
    """Records that are executed together."""

    run: RunRecord
    method: str
    records: list[Trajectory]


def _batches(paths: Sequence[Path], batch_size: int | None, sample: int | None) -> Iterator[_Batch]:
    """Records in their stored order, of one run, method, task, length and writer per batch."""
    groups: dict[tuple[Any, ...], list[Trajectory]] = {}
    runs: dict[str, RunRecord] = {}
    reader = _lenient(paths, features=False)
    chosen = _chosen(reader.num_records, sample)
    number = -1
    for path in reader.shards:
        try:
            run, digest = run_of_shard(path)
        except TrajectoryFormatError:
            number += reader.side_file(path).num_records
            continue  # named among the problems of the files
        runs[digest] = run
        name = ShardName.parse(path)
        series = None if name is None else (name[0].name, name[0].split, name[0].rank)
        for record in _lenient([path], features=False):
            number += 1
            if chosen is not None and number not in chosen:
                continue
            key = (digest, method_of(record, run), record.meta.get("task"), series)
            groups.setdefault((*key, record.num_generated), []).append(record)
    for (digest, method, *_), records in groups.items():
        run = runs[digest]
        size = batch_size or run.hardware.get("batch_size") or 16
        for first in range(0, len(records), int(size)):
            yield _Batch(run, method, records[first : first + int(size)])


def _lenient(paths: Sequence[Path], *, features: bool = True) -> TrajectoryShardReader:
    """Reads what can be read; the problems of files are named by :func:`check_files`."""
    return TrajectoryShardReader(
        list(paths), on_error="skip", features=features, max_bad_fraction=1.0
    )


def _chosen(num_records: int, sample: int | None) -> set[int] | None:
    if sample is None or sample >= num_records:
        return None
    return set(np.linspace(0, num_records - 1, sample).round().astype(int).tolist())


def _num_forwards(batch: _Batch, level: int, num_steps: int | None) -> int:
    """Row forwards that a batch takes, as far as its records tell."""
    steps = [record.num_steps for record in batch.records]
    if level == 3 and num_steps is not None:
        return sum(min(count, num_steps) for count in steps)
    return sum(steps)


def _execute(
    batch: _Batch,
    number: int,
    level: int,
    execution: Execution,
    tolerance: float,
    progress: Progress | None,
) -> tuple[list[str], list[RecordVerdict]]:
    """Names what differs from the run, then executes one batch."""
    run = batch.run
    lines = backbone_differences(run, execution.backbone)
    if execution.tokenizer is not None:
        lines += tokenizer_differences(run, execution.tokenizer)
    decoder, changes = rebuilt_decoder(
        run,
        batch.method,
        temperature=execution.temperature,
        policy_folders=execution.policy_folders,
    )
    records, seeds = seeds_of(batch.records, run, execution.seed)
    lines += changes + seeds
    options: dict[str, Any] = {
        "tolerance": tolerance,
        "captured": _captured(run, records),
        "device": execution.device,
        "on_step": progress.advance if progress else None,
    }
    if level == 4:
        return lines, free_running(execution.backbone, decoder, records, **options)
    steps = None
    longest = max(record.num_steps for record in records)
    if execution.num_steps is not None and execution.num_steps < longest:
        drawn = np.random.default_rng(number).choice(longest, execution.num_steps, replace=False)
        steps = frozenset(drawn.tolist())
    return lines, teacher_forced(execution.backbone, decoder, records, steps=steps, **options)


def _captured(run: RunRecord, records: Sequence[Trajectory]) -> Callable[[int], frozenset[str]]:
    """What the run's capture asked of each step of a batch, as far as it shaped the products."""
    capture = run.decode.get("capture")
    facts = capture if isinstance(capture, dict) else {}
    nothing, region = frozenset[str](), frozenset({"region"})
    if facts.get("level") == "features":
        seeds = [signed_seed(record.seed) for record in records]
        plan = KeptSteps(seeds, ratio=facts["step_ratio"])
        return lambda step: region if plan.rows(step) else nothing
    return lambda _step: region if facts.get("level") == "signals" else nothing
