"""Decoded samples with their grades, from shards or from the folder of a benchmark."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.system.options import nearest
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.files import prompt_uid, shard_paths, shards_in
from lit_dlm.trajectories.store.provenance import run_of_shard
from lit_dlm.trajectories.store.reader import TrajectoryShardReader


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One decode: its record and what is known about its answer."""

    record: Trajectory
    example: str  # uid of the prompt, shared by all its decodes
    task: str
    method: str
    correct: bool | None  # None where nothing was graded
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
    num_available: int  # samples that fitted the filters, before the limit
    methods: Mapping[str, Mapping[str, Any]]  # descriptions of decoders


def load_samples(
    path: Path,
    *,
    limit: int | None = None,
    names: Sequence[str] = (),
    methods: Collection[str] = (),
    examples: Collection[str] | None = None,
) -> SampleSet:
    """Reads samples, prompts in order, from only those blocks that are needed.

    ``path`` is a shard, a folder of shards, or a run folder with ``results/``; ``names`` are uids
    of decodes, or of prompts for all their decodes; ``examples`` are uids of prompts.
    """
    rows, shards = _open(path)
    reader = TrajectoryShardReader(shards, features=False)
    # A benchmark that was stopped may have recorded decodes whose results it had not yet written.
    known = [uid for uid in reader.uids if rows is None or uid in rows]
    fitting = _fitting(path, known, names, methods, examples)
    kept = _chosen(fitting, limit)
    records = {record.uid: record for record in reader.find(set(kept))}
    decoders: dict[str, Any] = {}
    for shard in shards:  # each names its own: later runs into a folder may have other decoders
        decoders |= run_of_shard(shard)[0].decode.get("methods") or {}
    return SampleSet(
        label=path.resolve().name,
        source=path,
        shards=shards,
        samples=[sample_of(records[uid], (rows or {}).get(uid)) for uid in kept],
        num_available=len(fitting),
        methods=decoders,
    )


def _fitting(
    path: Path,
    uids: list[str],
    names: Sequence[str],
    methods: Collection[str],
    examples: Collection[str] | None,
) -> list[str]:
    """The uids that :func:`load_samples` may show; refuses names that are not there."""
    _refuse_unknown(path, "sample", names, {*uids, *map(prompt_uid, uids)})
    _refuse_unknown(path, "method", methods, set(map(_method, uids)))
    if methods:
        uids = [uid for uid in uids if _method(uid) in methods]
    if names:
        uids = [uid for uid in uids if uid in names or prompt_uid(uid) in names]
    if examples is not None:
        uids = [uid for uid in uids if prompt_uid(uid) in examples]
    if not uids:
        example = min(examples or ["?"])
        raise ValueError(f"{path}: no decode of the requested prompts, such as {example!r}")
    return uids


def _refuse_unknown(path: Path, kind: str, requested: Collection[str], known: set[str]) -> None:
    for name in requested:
        if name not in known:
            raise ValueError(f"{path}: no {kind} {name!r}{nearest(name, known)}")


def _open(path: Path) -> tuple[dict[str, ResultRow] | None, list[Path]]:
    """Result rows by the uid of their trajectory, if there are results; and the shards."""
    run = path.parent if path.name == "results" else path
    if (run / "results").is_dir():
        return _open_results(run)
    is_set = path.suffix == ".tar" or (path.is_dir() and shards_in(path))
    if path.exists() and not is_set:
        inside = sorted({one.parent for one in (*path.glob("*/*.tar"), *path.glob("*/results"))})
        hint = f"; did you mean {' or '.join(map(str, inside[:3]))}?" if inside else ""
        raise ValueError(
            f"{path}: expected a shard (.tar), a folder of shards or a run folder with results/, "
            f"found neither{hint}"
        )
    return None, shard_paths([path])


def _open_results(run: Path) -> tuple[dict[str, ResultRow], list[Path]]:
    results = ResultFolder(run / "results")
    all_rows = [row for pair in results.pairs() for row in results.rows(*pair)]
    rows = {row.trajectory["uid"]: row for row in all_rows if row.trajectory is not None}
    if not rows:
        raise ValueError(
            f"{run}: {len(all_rows)} results, but none names a trajectory; decode with model.level "
            "set to keep them"
        )
    sets = dict.fromkeys(row.trajectory["set"] for row in rows.values() if row.trajectory)
    return rows, shard_paths([run / name for name in sets])


def _method(uid: str) -> str:
    # A rollout's uid continues after the method with its step, prompt and number.
    return uid.rpartition("@")[2].partition("/")[0] if "@" in uid else ""


def _chosen(uids: Sequence[str], limit: int | None) -> list[str]:
    """Prompts with all their decodes, in turn from all tasks until the limit; task by task."""
    groups: dict[str, dict[str, list[str]]] = {}
    for uid in uids:
        example = prompt_uid(uid)
        groups.setdefault(example.partition("/")[0], {}).setdefault(example, []).append(uid)
    turns = zip_longest(*(task.values() for task in groups.values()), fillvalue=[])
    in_turn = [uid for prompts in turns for decodes in prompts for uid in decodes]
    # Chosen in turn, so that a limit shows something of every task; listed task by task, so that a
    # reader finds the decodes of one prompt next to each other.
    chosen = set(in_turn[:limit])
    ordered = (uid for task in groups.values() for decodes in task.values() for uid in decodes)
    return [uid for uid in ordered if uid in chosen]


def sample_of(record: Trajectory, row: ResultRow | None) -> Sample:
    """A record with its line in the results, or with what its ``meta`` says."""
    if row is None:
        correct = record.meta.get("correct")
        return Sample(
            record=record,
            example=prompt_uid(record.uid),
            task=str(record.meta.get("task", "")),
            method=str(record.meta.get("method", _method(record.uid))),
            correct=correct if isinstance(correct, bool) else None,
        )
    assert row.trajectory is not None
    # A shard that was written again has equal uids; a grade beside another text would mislead.
    if record.digest().hex() != row.trajectory["digest"]:
        raise ValueError(f"{record.uid}: the results name another decode than the shards hold")
    return Sample(
        record=record,
        example=row.prompt_uid,
        task=row.task,
        method=row.method,
        correct=None if row.verdict == "ungraded" else row.correct,
        verdict=row.verdict,
        detail=row.detail,
        answer=row.answer,
    )
