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

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.description import decoder_from_description
from lit_dlm.ops.noise import sample_seed
from lit_dlm.ops.options import at_least
from lit_dlm.trajectories.capture import KeptSteps
from lit_dlm.trajectories.container import read_header
from lit_dlm.trajectories.errors import ShardError, TrajectoryFormatError
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.reexecution import (
    TOLERANCE,
    RecordVerdict,
    free_running,
    signed_seed,
    teacher_forced,
)
from lit_dlm.trajectories.store.files import (
    MANIFEST_FILE,
    ShardName,
    SideFile,
    merkle_root,
    scan_members,
    side_path,
)
from lit_dlm.trajectories.store.provenance import (
    SAMPLE_SEED_RULE,
    RunRecord,
    canonical_json,
    run_of_shard,
    tokenizer_digest,
)
from lit_dlm.trajectories.store.reader import TrajectoryShardReader


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
    plug_modules: Sequence[str] = ()
    """Modules that plugs from outside of the package may be imported from."""
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
        progress: bars to show how far the work is.

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
    at_least(0, tolerance=tolerance)
    at_least(1, sample=sample)
    paths = [Path(shard) for shard in shards]
    try:
        reader = _lenient(paths)
    except ShardError:  # no shard has its side file: nothing can be read
        problems = check_files(paths, level=min(level, 2))
        return Verification(level=level, num_records=0, problems=problems)
    on_records = _counter(progress, "Files", reader.num_records)
    problems = check_files(paths, level=min(level, 2), progress=on_records)
    differences: list[str] = []
    verdicts: list[RecordVerdict] = []
    if level >= 3:
        assert execution is not None
        batches = list(_batches(paths, execution.batch_size, sample))
        # A method that cannot be rebuilt is found before hours of work, not after.
        for run, method in {
            (b.run.digest(), b.method): (b.run, b.method) for b in batches
        }.values():
            rebuilt_decoder(run, method, execution)
        total = sum(_num_forwards(batch, level, execution.num_steps) for batch in batches)
        on_step = _counter(progress, "Re-execution", total)
        for number, batch in enumerate(batches):
            lines, found = _execute(batch, number, level, execution, tolerance, on_step)
            differences += [line for line in lines if line not in differences]
            verdicts += found
    return Verification(
        level=level,
        num_records=reader.num_records,
        problems=problems,
        differences=differences,
        verdicts=verdicts,
    )


def _counter(
    progress: Progress | None, description: str, total: int
) -> Callable[[int], None] | None:
    """Begins a bar of so many units, and returns what counts units that are done."""
    if progress is None:
        return None
    return partial(progress.advance, progress.add_task(description, total=total))


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
    return TrajectoryShardReader(list(paths), on_error="skip", features=features)


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
    on_step: Callable[[int], None] | None,
) -> tuple[list[str], list[RecordVerdict]]:
    """Names what differs from the run, then executes one batch."""
    run = batch.run
    lines = backbone_differences(run, execution.backbone)
    if execution.tokenizer is not None:
        lines += tokenizer_differences(run, execution.tokenizer)
    decoder, changes = rebuilt_decoder(run, batch.method, execution)
    records, seeds = seeds_of(batch.records, run, execution.seed)
    lines += changes + seeds
    options: dict[str, Any] = {
        "tolerance": tolerance,
        "captured": _captured(run, records),
        "device": execution.device,
        "on_step": on_step,
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
    if facts.get("top_k"):
        return lambda _step: region
    if facts.get("level") == "features":
        seeds = [signed_seed(record.seed) for record in records]
        plan = KeptSteps(seeds, ratio=facts["step_ratio"])
        return lambda step: region if plan.rows(step) else nothing
    return lambda _step: region if facts.get("level") == "signals" else nothing


# -- files: levels 0 to 2 ------------------------------------------------------------------------


def check_files(
    shards: Sequence[Path], *, level: int, progress: Callable[[int], None] | None = None
) -> list[str]:
    """Checks shards without running a model.

    Args:
        shards: shards with their side files, all of one folder.
        level: 0 integrity, 1 also structure, 2 also authenticity.
        progress: called with the number of records after each block.

    Returns:
        One line per problem, naming the file and block; none when everything is in order.
    """
    problems: list[str] = []
    owners: dict[str, str] = {}
    for shard in shards:
        problems += _check_shard(shard, level, owners, progress)
    if level >= 2:
        for folder in sorted({shard.parent for shard in shards}):
            problems += _check_manifest(folder, shards)
    return problems


def _check_shard(
    shard: Path,
    level: int,
    owners: dict[str, str],
    progress: Callable[[int], None] | None,
) -> list[str]:
    if not side_path(shard).is_file():
        return [f"{shard}: its side file is missing; recover the folder first"]
    try:
        side = SideFile.read(side_path(shard))
        size = shard.stat().st_size
        reader = TrajectoryShardReader([shard], strict=level >= 1)
    except (OSError, TrajectoryFormatError) as error:
        return [str(error)]
    problems = []
    if size != side.bytes:
        problems.append(f"{shard}: expected {side.bytes} bytes, got {size}")
    digests: list[bytes] = []
    for index, entry in enumerate(side.blocks):
        try:
            records = reader.read_block(shard, index)
        except TrajectoryFormatError as error:
            problems.append(str(error))
            continue
        finally:
            if progress is not None:
                progress(entry.num_records)
        if level >= 1:
            for record in records:
                if record.uid in owners:
                    problems.append(f"{shard}: uid {record.uid!r} is also in {owners[record.uid]}")
                owners[record.uid] = shard.name
        if level >= 2:
            digests += [record.digest() for record in records]
    # Reading by offset passes over the archive's own headers; reading as a stream does not.
    problems += _check_archive(shard, side)
    if level >= 2 and not problems:
        problems += _check_authenticity(shard, side, digests)
    return problems


def _check_archive(shard: Path, side: SideFile) -> list[str]:
    """The tar headers: every block is found where a tar reader looks for it."""
    with shard.open("rb") as file:
        members, reached_end = scan_members(file)
    found = {name.partition(".")[0] for name, _ in members if name.endswith(".trajb")}
    missing = [entry.key for entry in side.blocks if entry.key not in found]
    if missing:
        return [
            f"{shard}: a tar reader finds {len(found)} of {len(side.blocks)} blocks; the archive "
            f"is cut or damaged before {missing[0]!r}"
        ]
    return [] if reached_end else [f"{shard}: the end marker of the archive is missing"]


def _check_authenticity(shard: Path, side: SideFile, digests: list[bytes]) -> list[str]:
    problems = []
    sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
    if sha256 != side.sha256:
        problems.append(f"{shard}: SHA-256 {side.sha256} in its side file, {sha256} now")
    root = merkle_root(digests)
    if root != side.merkle_root:
        problems.append(f"{shard}: Merkle root {side.merkle_root} in its side file, {root} now")
    try:
        _, run = run_of_shard(shard)
    except TrajectoryFormatError as error:
        return [*problems, str(error)]
    if run != side.run_digest:
        problems.append(f"{shard}: run digest {side.run_digest} in its side file, {run} inside it")
    with shard.open("rb") as file:
        for entry in side.blocks:
            file.seek(entry.offset)
            named = read_header(file.read(entry.size)).run_digest.hex()
            if named != side.run_digest:
                problems.append(
                    f"{shard}: block {entry.key!r} names the run {named}, "
                    f"its side file {side.run_digest}"
                )
    return problems


def _check_manifest(folder: Path, shards: Sequence[Path]) -> list[str]:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return [f"{path}: there is no manifest, so nothing says which shards were published"]
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        listed = {entry["shard"]: entry for entry in manifest["shards"]}
        root = merkle_root([bytes.fromhex(e["merkle_root"]) for e in manifest["shards"]])
        if root != manifest["merkle_root"]:
            return [f"{path}: Merkle root {manifest['merkle_root']}, its shards give {root}"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return [f"{path}: not a manifest: {error!r}"]
    problems = []
    for shard in (shard for shard in shards if shard.parent == folder):
        entry = listed.get(shard.name)
        if entry is None:
            problems.append(f"{shard}: the manifest does not list it")
            continue
        try:
            side = SideFile.read(side_path(shard))
        except (OSError, TrajectoryFormatError):
            continue  # named already
        problems += [
            f"{shard}: {key} {entry.get(key)} in the manifest, {getattr(side, key)} in its side "
            "file"
            for key in ("bytes", "sha256", "num_records", "merkle_root")
            if entry.get(key) != getattr(side, key)
        ]
    absent = [name for name in listed if not (folder / name).is_file()]
    return problems + [f"{folder / name}: the manifest lists it, but it is gone" for name in absent]


# -- identity: what the run names, and what is at hand -------------------------------------------


def named_differences(
    recorded: Mapping[str, Any], current: Mapping[str, Any], prefix: str
) -> list[str]:
    """One line for every key that both sides know and that differs.

    Args:
        recorded: a group of the run record.
        current: the same facts as they are now.
        prefix: name of the group, such as ``model``.

    Returns:
        Lines such as ``model.dtype: "float32" recorded, "bfloat16" now``.
    """
    lines = []
    for key in sorted(recorded.keys() & current.keys()):
        old, new = recorded[key], current[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += named_differences(old, new, f"{prefix}.{key}")
        elif canonical_json(old) != canonical_json(new):
            before, after = canonical_json(old), canonical_json(new)
            lines.append(f"{_spoken(prefix, key)}: {before} recorded, {after} now")
    return lines


def _spoken(prefix: str, key: str) -> str:
    """Digests are what people look for: ``model.weights digest`` instead of the key."""
    return (
        f"{prefix}.{key.removesuffix('_sha256')} digest"
        if key.endswith("_sha256")
        else (f"{prefix} digest" if key == "digest" else f"{prefix}.{key}")
    )


def backbone_differences(run: RunRecord, backbone: Backbone) -> list[str]:
    """What tells a backbone from the one of the run: weights, configuration, dtype, special ids."""
    describe = getattr(backbone, "describe", None)
    facts = dict(describe()) if callable(describe) else {"class": type(backbone).__name__}
    spec = backbone.spec
    ids = {"mask_id": spec.mask_id, "pad_id": spec.pad_id, "eos_ids": list(spec.eos_ids)}
    return named_differences(run.model, facts, "model") + named_differences(
        run.tokenizer, ids, "tokenizer"
    )


def tokenizer_differences(run: RunRecord, tokenizer: Any) -> list[str]:
    """Whether a tokenizer has another vocabulary or chat template than that of the run.

    A template that the run was given is put in place of the tokenizer's own.
    """
    if "chat_template" in run.tokenizer:
        tokenizer.chat_template = run.tokenizer["chat_template"]
    return named_differences(run.tokenizer, {"digest": tokenizer_digest(tokenizer)}, "tokenizer")


def method_of(record: Trajectory, run: RunRecord) -> str:
    """Name of the decoding method that made a record.

    Raises:
        ValueError: neither the record nor the run says it.
    """
    methods = run.decode.get("methods")
    if not isinstance(methods, Mapping) or not methods:
        raise ValueError(
            f"trajectory {record.uid!r}: its run record describes no decoder, so it cannot be "
            "executed again (an imported record, for example)"
        )
    name = record.meta.get("method")
    if name is None and len(methods) == 1:
        return str(next(iter(methods)))
    if name not in methods:
        raise ValueError(
            f"trajectory {record.uid!r}: expected meta 'method' to be one of "
            f"{', '.join(methods)}, got {name!r}"
        )
    return str(name)


def rebuilt_decoder(run: RunRecord, method: str, execution: Execution) -> tuple[Decoder, list[str]]:
    """The decoder of one method of a run, and how it differs from the recorded one.

    Raises:
        ValueError: the description cannot be rebuilt.
    """
    recorded = run.decode["methods"][method]
    if "undescribed" in recorded:
        raise ValueError(
            f"method {method!r}: its loop cannot be executed again: {recorded['undescribed']}; "
            "levels 0 to 2 verify its files"
        )
    plugs: dict[str, Any] = {
        "policy_folders": execution.policy_folders,
        "plug_modules": execution.plug_modules,
    }
    try:
        decoder = decoder_from_description(recorded, **plugs)
    except ValueError as error:
        raise ValueError(f"method {method!r}: {error}") from error
    if execution.temperature is None:
        return decoder, []
    sampler = {**recorded["sampler"], "temperature": float(execution.temperature)}
    decoder = decoder_from_description({**recorded, "sampler": sampler}, **plugs)
    return decoder, named_differences(recorded, decoder.describe(), f"decode.{method}")


def seeds_of(
    records: Sequence[Trajectory], run: RunRecord, seed: int | None
) -> tuple[list[Trajectory], list[str]]:
    """The records with the noise seeds to execute them with.

    Args:
        records: records of one run.
        run: the run.
        seed: base seed to derive them from; the stored ones when ``None``.

    Returns:
        The records, and what is wrong with their seeds: another base seed than the run's, or
        stored seeds that do not follow from it.
    """
    base = run.randomness.get("seed")
    follows = run.randomness.get("sample_seed") == SAMPLE_SEED_RULE and isinstance(base, int)
    lines = []
    if seed is not None and seed != base:
        lines.append(f"randomness.seed: {canonical_json(base)} recorded, {seed} now")
    elif follows:
        strange = [r.uid for r in records if r.seed != _sample_seed(base, r, run)]
        if strange:
            lines.append(
                f"seed: {len(strange)} records, the first {strange[0]!r}, hold another seed than "
                f"the run's seed {base} gives"
            )
    if seed is None:
        return list(records), lines
    return [replace(r, seed=_sample_seed(seed, r, run)) for r in records], lines


def _sample_seed(base: Any, record: Trajectory, run: RunRecord) -> int:
    """The seed of a record, whose uid is ``{example}@{method}``."""
    return sample_seed(int(base), record.uid.removesuffix(f"@{method_of(record, run)}"))
