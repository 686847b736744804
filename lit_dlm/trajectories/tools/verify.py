"""Verification of a set of trajectories, levels V0 to V4.

| level | needs | proves |
|---|---|---|
| 0 integrity | files | no accidental change of bytes |
| 1 structure | files | every intermediate canvas is well defined |
| 2 authenticity | manifest | the records are the published ones |
| 3 teacher-forced | weights | each recorded canvas leads to the recorded decision |
| 4 free-running | weights, seed | decoding from the prompt reproduces the record |

A level includes those below it, except that 4 replaces 3. Levels 3 and 4 execute the records again,
see :mod:`lit_dlm.trajectories.tools.execution`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.description import decoder_from_description
from lit_dlm.system.options import within
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.trajectories.capture import KeptSteps
from lit_dlm.trajectories.record import Trajectory, TrajectoryFormatError, expect
from lit_dlm.trajectories.store.files import (
    MANIFEST_FILE,
    RECORDS,
    STRANGE,
    ShardName,
    archived_blocks,
    claim_uids,
)
from lit_dlm.trajectories.store.provenance import (
    SAMPLE_SEED_RULE,
    RunRecord,
    differences,
    run_of_shard,
    tokenizer_digest,
)
from lit_dlm.trajectories.store.reader import TrajectoryShardReader
from lit_dlm.trajectories.tools.execution import (
    RecordVerdict,
    free_running,
    signed_seed,
    teacher_forced,
)

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What levels 3 and 4 re-execute records with."""

    backbone: Backbone
    tokenizer: Any = None  # compared with that of the run; not compared when None
    policy_folders: Sequence[str | Path] = ()
    """Folders of exported policies, which are matched by the digest of their weights."""
    component_modules: Sequence[str] = ()
    """Modules that components from outside the package may be imported from."""
    device: torch.device | str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result for a set."""

    level: int
    num_records: int
    problems: list[str] = field(default_factory=list)  # what levels 0 to 2 found wrong
    differences: list[str] = field(default_factory=list)
    """What differs from the run: model, tokenizer, seeds."""
    verdicts: list[RecordVerdict] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        counted = Counter(verdict.outcome for verdict in self.verdicts)
        return {name: counted[name] for name in ("exact", "explained", "failed")}

    @property
    def failed(self) -> bool:
        """Whether anything is wrong: a file, an identity, or a record."""
        return bool(self.problems or self.differences or self.counts["failed"])


Track = Callable[[Sequence[Any], str], Iterable[Any]]
"""Passes on items under a title, and shows how many have been taken."""


def verify(
    shards: Sequence[str | Path],
    *,
    level: int = 2,
    execution: Execution | None = None,
    sample: int | None = None,
    track: Track = lambda items, _: items,
) -> Verification:
    """Verifies shards, with their side files beside them, up to a level.

    Neither file problems nor a model or tokenizer other than the run's stop the execution of what
    can be read: the result still says how far the records agree.

    Args:
        shards: paths of shards.
        level: 0 to 4.
        execution: needed at levels 3 and 4.
        sample: execute only this many records, spread evenly over the set.
        track: shows progress.
    """
    within("[0, 4]", level=level)
    paths = [Path(shard) for shard in shards]
    problems: list[str] = []
    owners: dict[Path, dict[str, str]] = {}
    # By folder: two copies of a set are no harm, the same uid twice in one of them is.
    for path in track(paths, "Files"):
        problems += _shard_problems(path, level, owners.setdefault(path.parent, {}))
    for folder in sorted({path.parent for path in paths}) if level >= 2 else ():
        problems += _manifest_problems(folder, paths)
    try:
        # Takes what can be read; the rest is among the problems.
        reader = TrajectoryShardReader(paths, on_error="skip", features=False)
    except TrajectoryFormatError:
        return Verification(level=level, num_records=0, problems=problems)
    result = Verification(level=level, num_records=reader.num_records, problems=problems)
    if level >= 3:
        assert execution is not None, "levels 3 and 4 need a backbone"
        _execute(result, list(_batches(reader, sample)), execution, track)
    return result


def _execute(
    result: Verification, batches: Sequence[_Batch], execution: Execution, track: Track
) -> None:
    """Adds the verdicts on batches of records, and what differs from their runs."""
    methods = {(batch.run.digest(), batch.method): batch for batch in batches}
    # All before the first is executed: one that cannot be rebuilt is reported at once.
    decoders = {key: _decoder_of(batch, execution) for key, batch in methods.items()}
    execute = free_running if result.level == 4 else teacher_forced
    for batch in track(batches, "Re-execution"):
        lines = _differences(batch, execution)
        result.differences.extend(line for line in lines if line not in result.differences)
        # Operations that run in half precision under autocast must do so again.
        autocast = _AUTOCAST.get(str(batch.run.model.get("autocast")))
        device = torch.device(execution.device)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            result.verdicts.extend(
                execute(
                    execution.backbone,
                    decoders[batch.run.digest(), batch.method],
                    batch.records,
                    captured=_captured(batch),
                    device=device,
                )
            )


# -- files: levels 0 to 2 ------------------------------------------------------------------------


def _shard_problems(shard: Path, level: int, owners: dict[str, str]) -> list[str]:
    try:
        reader = TrajectoryShardReader([shard], strict=level >= 1)
    except TrajectoryFormatError as error:
        return [str(error)]
    side = reader.side_file(shard)
    problems = [problem] if (problem := side.size_problem(shard)) else []
    checks: list[Callable[[], object]] = [
        *(partial(reader.read_block, *place) for place in reader.blocks),
        partial(claim_uids, shard.parent, side, owners),
    ]
    for check in checks:
        try:
            check()
        except TrajectoryFormatError as error:
            problems.append(str(error))
    # Reading by offset skips the archive's own headers; what others read as a stream does not.
    archived, is_whole = archived_blocks(shard)
    missing = [entry.key for entry in side.blocks if RECORDS not in archived.get(entry.key, {})]
    if missing or not is_whole:
        cut = f", cut or corrupt before {missing[0]!r}" if missing else ", but not its end"
        count = len(side.blocks) - len(missing)
        problems.append(f"{shard}: a tar reader finds {count} of {len(side.blocks)} blocks{cut}")
    if level >= 2 and not problems:  # of a file that is corrupt, the digest says nothing more
        current = {"sha256": hashlib.sha256(shard.read_bytes()).hexdigest()}
        try:
            current["run_digest"] = run_of_shard(shard)[1]
        except TrajectoryFormatError as error:
            problems.append(str(error))
        problems += [f"{shard}: its side file: {line}" for line in _unequal(vars(side), current)]
    return problems


def _manifest_problems(folder: Path, shards: Sequence[Path]) -> list[str]:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return [f"{path}: there is no manifest, so nothing says which shards were published"]
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        listed = {str(entry["shard"]): dict(entry) for entry in manifest["shards"]}
    except STRANGE as error:
        return [f"{path}: not a manifest: {error!r}"]
    problems = []
    for shard in (shard for shard in shards if shard.parent == folder):
        if shard.name not in listed:
            problems.append(f"{shard}: the manifest does not list it")
            continue
        try:
            side = vars(TrajectoryShardReader([shard]).side_file(shard))
        except TrajectoryFormatError:
            continue  # named already, when the files were checked
        current = {name: side[name] for name in ("bytes", "sha256", "num_records")}
        problems += [f"{shard}: the manifest: {x}" for x in _unequal(listed[shard.name], current)]
    absent = [name for name in listed if not (folder / name).is_file()]
    return problems + [f"{folder / name}: the manifest lists it, but it is gone" for name in absent]


def _unequal(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {recorded.get(name)} there, {value} now"
        for name, value in current.items()
        if recorded.get(name) != value
    ]


# -- identity: what the run recorded, and what is used now ---------------------------------------


@dataclass(frozen=True)
class _Batch:
    """Records of one run and method that are executed together."""

    run: RunRecord
    method: str
    records: list[Trajectory]


def _batches(reader: TrajectoryShardReader, sample: int | None) -> Iterator[_Batch]:
    """Yields batches of records in stored order, each of one run, method, task, length and writer.

    Batches of the run's size have about the run's shapes, on which the last bits of matrix products
    depend. They are not its batches: each row that ended was replaced by the next.
    """
    groups: dict[tuple[Any, ...], _Batch] = {}
    total = reader.num_records
    # The same sample in every call, from the beginning, the middle and the end of the run.
    chosen = set(np.linspace(0, total - 1, min(sample or total, total)).round().astype(int))
    first = 0
    for path in reader.shards:
        numbers = count(first)
        first += reader.side_file(path).num_records
        try:
            run, digest = run_of_shard(path)
        except TrajectoryFormatError:
            continue  # named among the problems of the files
        name = ShardName.parse(path)
        writer = None if name is None else replace(name[0], index=0)
        alone = TrajectoryShardReader([path], on_error="skip", features=False)
        for number, record in zip(numbers, alone, strict=False):
            if number in chosen:
                method = method_of(record, run)
                key = (digest, method, record.meta.get("task"), writer, record.num_generated)
                groups.setdefault(key, _Batch(run, method, [])).records.append(record)
    for group in groups.values():
        size = max(int(group.run.hardware.get("batch_size") or 16), 1)
        for at in range(0, len(group.records), size):
            yield replace(group, records=group.records[at : at + size])


def method_of(record: Trajectory, run: RunRecord) -> str:
    """Name of the decoding method that made a record."""
    methods = run.decode.get("methods")
    names = list(methods) if isinstance(methods, Mapping) else []
    name = record.meta.get("method", names[0] if len(names) == 1 else None)
    expect(
        name in names,
        f"trajectory {record.uid!r}: method: expected one that its run describes "
        f"({', '.join(names) or 'none: it cannot be executed again'}), got {name!r}",
    )
    return str(name)


def _decoder_of(batch: _Batch, execution: Execution) -> Decoder:
    recorded = batch.run.decode["methods"][batch.method]
    reason: object = recorded.get("undescribed")
    try:
        if reason is None:
            return decoder_from_description(
                recorded,
                policy_folders=execution.policy_folders,
                component_modules=execution.component_modules,
            )
    except ValueError as error:
        reason = error
    raise ValueError(
        f"method {batch.method!r}: cannot be executed again, levels 0 to 2 verify its files: "
        f"{reason}"
    )


def _differences(batch: _Batch, execution: Execution) -> list[str]:
    """What differs from the run: weights, configuration, dtype, ids, tokenizer, seeds."""
    run, backbone, tokenizer = batch.run, execution.backbone, execution.tokenizer
    describe = getattr(backbone, "describe", None)
    model = dict(describe()) if callable(describe) else {"class": type(backbone).__name__}
    spec = backbone.spec
    ids = {"mask_id": spec.mask_id, "pad_id": spec.pad_id, "eos_ids": list(spec.eos_ids)}
    if tokenizer is not None:
        # A chat template that was set for the run replaces the tokenizer's own.
        tokenizer.chat_template = run.tokenizer.get("chat_template", tokenizer.chat_template)
        ids["digest"] = tokenizer_digest(tokenizer)
    compared = [*differences(dict(run.model), model, "model")]
    compared += differences(dict(run.tokenizer), ids, "tokenizer")
    lines = [
        f"{_spoken(key)}: {before} recorded, {after} now"
        for key, before, after in compared
        if "absent" not in (before, after)  # an older run said less, a newer one says more
    ]
    base = run.randomness.get("seed")
    if run.randomness.get("sample_seed") == SAMPLE_SEED_RULE and isinstance(base, int):
        uids = [record.uid.removesuffix(f"@{batch.method}") for record in batch.records]
        seeds = [sample_seed(base, uid) for uid in uids]
        strange = [r.uid for r, seed in zip(batch.records, seeds, strict=True) if r.seed != seed]
        if strange:
            lines.append(
                f"seed: {len(strange)} records, the first {strange[0]!r}, hold another seed than "
                f"the run's seed {base} gives"
            )
    return lines


def _spoken(key: str) -> str:
    """A key, in which digests are named as such, since people look for them."""
    name = key.removesuffix(".digest").removesuffix("_sha256")
    return key if name == key else f"{name} digest"


def _captured(batch: _Batch) -> Callable[[int], frozenset[str]]:
    """What the run's capture required of each step, as far as it changes matrix products."""
    recorded = batch.run.decode.get("capture")
    capture = recorded if isinstance(recorded, dict) else {}
    nothing, region = frozenset[str](), frozenset({"region"})
    if capture.get("level") in ("features", "logits"):
        seeds = [signed_seed(record.seed) for record in batch.records]
        plans = [KeptSteps(seed, ratio=capture["step_ratio"]) for seed in seeds]
        return lambda step: region if any(step in plan for plan in plans) else nothing
    return lambda _step: region if capture.get("level") == "signals" else nothing
