"""Decoded samples with their grades, from shards or from the folder of a benchmark."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dlm.config_files import nearest
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.files import shard_paths, shards_in
from lit_dlm.trajectories.store.provenance import run_of_shard
from lit_dlm.trajectories.store.reader import TrajectoryShardReader


class NoSampleError(ValueError):
    """No sample of a source fits what was asked for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One decode: its record and what is known about its answer."""

    record: Trajectory
    example: str
    """Uid of the prompt, shared by all decodes of it."""
    task: str
    method: str
    correct: bool | None
    """``None`` where nothing was graded."""
    verdict: str = ""
    detail: str = ""
    answer: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleSet:
    """Samples of one source."""

    label: str
    source: Path
    shards: list[Path]
    samples: list[Sample]
    num_available: int
    """Samples that fitted the filters, before the limit."""
    methods: Mapping[str, Mapping[str, Any]]
    """Descriptions of the decoders by method, where the run recorded them."""


def load_samples(
    path: Path,
    *,
    limit: int | None = None,
    names: Sequence[str] = (),
    methods: Collection[str] = (),
    examples: Collection[str] | None = None,
) -> SampleSet:
    """Reads samples, prompts in order; of a large set only the blocks that are needed.

    Args:
        path: a shard, a folder of shards, or a run folder with ``results/`` whose lines name their
            trajectories.
        limit: most samples; prompts are taken in turn from all tasks, each with all its decodes.
        names: only these: uids of decodes, or of prompts for all decodes of them.
        methods: only these.
        examples: only these prompts.
    """
    rows, shards = _open(path)
    reader = TrajectoryShardReader(shards, features=False)
    known = [uid for uid in reader.uids if rows is None or uid in rows]
    if not known:
        raise ValueError(f"{path}: expected trajectories, found a set without records")
    _require("sample", names, {*known, *map(_example, known)}, path)
    _require("method", methods, set(map(_method, known)), path)
    fitting = [
        uid
        for uid in known
        if (not names or uid in names or _example(uid) in names)
        and (not methods or _method(uid) in methods)
        and (examples is None or _example(uid) in examples)
    ]
    if not fitting:
        raise NoSampleError(f"{path}: no sample fits, of {len(known)} such as {known[0]!r}")
    kept = _chosen(fitting, limit)
    records = {record.uid: record for record in reader.find(set(kept))}
    return SampleSet(
        label=path.resolve().name,
        source=path,
        shards=shards,
        samples=[_sample(records[uid], (rows or {}).get(uid)) for uid in kept],
        num_available=len(fitting),
        methods=run_of_shard(shards[0])[0].decode.get("methods") or {},
    )


def is_run_folder(path: Path) -> bool:
    """Whether it has results."""
    return (path / "results").is_dir()


def _open(path: Path) -> tuple[dict[str, ResultRow] | None, list[Path]]:
    """Result rows by the uid of their trajectory, if there are results; and the shards."""
    if path.is_dir() and not shards_in(path) and not is_run_folder(path):
        if is_run_folder(path.parent) and path.name == "results":
            return _open(path.parent)
        inside = sorted(
            {found.parent for found in (*path.glob("*/*.tar"), *path.glob("*/results"))}
        )
        hint = f"; did you mean {' or '.join(map(str, inside[:3]))}?" if inside else ""
        raise ValueError(
            f"{path}: expected trajectory shards or a run folder with results/, found neither{hint}"
        )
    if path.is_file() and path.suffix != ".tar":
        raise ValueError(f"{path}: expected a shard (.tar), a folder of shards or a run folder")
    if not path.is_dir() or not is_run_folder(path):
        return None, shard_paths([path])
    results = ResultFolder(path / "results")
    rows: dict[str, ResultRow] = {}
    sets: dict[str, None] = {}
    num_rows = 0
    for task, method in results.pairs():
        for row in results.rows(task, method):
            num_rows += 1
            if row.trajectory is not None:
                rows[row.trajectory["uid"]] = row
                sets[row.trajectory["set"]] = None
    if not rows:
        raise ValueError(
            f"{path}: {num_rows} results, but none names a trajectory; decode with model.level set "
            "to keep them"
        )
    return rows, shard_paths([path / name for name in sets])


def _example(uid: str) -> str:
    return uid.rpartition("@")[0] or uid


def _method(uid: str) -> str:
    # A rollout's uid goes on behind the method: its step, prompt and number.
    return uid.rpartition("@")[2].partition("/")[0] if "@" in uid else ""


def _require(kind: str, wanted: Collection[str], known: set[str], path: Path) -> None:
    for name in wanted:
        if name not in known:
            raise ValueError(f"{path}: no {kind} {name!r}{nearest(name, known)}")


def _chosen(uids: Sequence[str], limit: int | None) -> list[str]:
    """Prompts in turn from all tasks, each with all its decodes, until the limit is reached."""
    groups: dict[str, dict[str, list[str]]] = {}
    for uid in uids:
        example = _example(uid)
        task = example.partition("/")[0]
        groups.setdefault(task, {}).setdefault(example, []).append(uid)
    if limit is None or len(uids) <= limit:
        return [uid for task in groups.values() for group in task.values() for uid in group]
    queues = {task: iter(group.values()) for task, group in groups.items()}
    taken: dict[str, list[str]] = {task: [] for task in groups}
    left = limit
    while left > 0 and queues:
        for task, queue in list(queues.items()):
            decodes = next(queue, None)
            if decodes is None:
                del queues[task]
                continue
            taken[task] += decodes[:left]
            left -= len(decodes[:left])
    return [uid for group in taken.values() for uid in group]


def _sample(record: Trajectory, row: ResultRow | None) -> Sample:
    if row is None:
        correct = record.meta.get("correct")
        return Sample(
            record=record,
            example=_example(record.uid),
            task=str(record.meta.get("task", "")),
            method=str(record.meta.get("method", _method(record.uid))),
            correct=correct if isinstance(correct, bool) else None,
        )
    assert row.trajectory is not None
    if record.digest().hex() != row.trajectory["digest"]:
        raise ValueError(
            f"{record.uid}: the results name another decode than the trajectories hold "
            f"(digest {row.trajectory['digest']}, found {record.digest().hex()})"
        )
    return Sample(
        record=record,
        example=row.uid,
        task=row.task,
        method=row.method,
        correct=None if row.verdict == "ungraded" else row.correct,
        verdict=row.verdict,
        detail=row.detail,
        answer=row.answer,
    )
