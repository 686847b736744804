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

Teacher-forced, every recorded canvas is fed to the model again, the step is decided by the very
function that the decode loop calls, and the result is compared with the next recorded canvas. One
difference does not lead to others. Free-running, the prompt is decoded again from its seed, and
everything after the first difference follows from it. Records are executed in batches, in their
stored order; their rows are not those that were beside each other in the run, where one that ended
was replaced by the next.

Floating point differs between machines, batch sizes and dtypes, so a step may decide differently
where two options were almost equal. Such a difference is explained by its margin: the distance by
which the executed step's own numbers would have to move to give the recorded decision.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.caches import NoCache
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.description import decoder_from_description
from lit_dlm.decoding.engine import Decision, decide, enter_block, initial_state, needs
from lit_dlm.decoding.policies.lockstep import LockstepPolicy
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.decoding.state import (
    Canvas,
    DecodeResult,
    DecodeState,
    StepRecord,
    prompt_canvas,
)
from lit_dlm.decoding.windows import first_column
from lit_dlm.ops.noise import sample_seed
from lit_dlm.ops.options import at_least
from lit_dlm.trajectories.capture import KeptSteps
from lit_dlm.trajectories.errors import TrajectoryFormatError
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.replay import states_at
from lit_dlm.trajectories.store.files import (
    MANIFEST_FILE,
    RECORDS,
    ShardName,
    SideFile,
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
from lit_dlm.vision.prompts import find_pictures, insert_pictures

Outcome = Literal["exact", "explained", "failed"]

TOLERANCE = 0.01
"""Margin below which a differing decision counts as a near tie."""

MANY_TIES = 4
"""From so many differing steps on, they must not be more than half of the checked ones, if a record
is to count as explained: a model whose distributions are flat finds near ties everywhere."""

_STATUS_OPEN = "step_limit"


@dataclass(kw_only=True)
class RecordVerdict:
    """What re-execution says of one record."""

    uid: str
    outcome: Outcome = "exact"
    """``exact``: every decision is the recorded one; ``explained``: every differing decision was a
    near tie, and near ties are the exception (see :data:`MANY_TIES`); ``failed``."""
    num_checked: int = 0  # steps that were compared
    num_agreeing: int = 0  # steps after which the canvas is the recorded one
    num_tokens: int = 0
    num_equal: int = 0
    """Of the tokens that the checked steps wrote (teacher-forced), or of the final response
    (free-running)."""
    differing_steps: list[int] = field(default_factory=list)
    """All checked steps that differ; the others agree."""
    margin: float = 0.0
    """Largest margin among the differing decisions; infinite when no near tie explains one."""
    reason: str = ""
    """What differs, in words; empty when nothing does."""

    @property
    def first_step(self) -> int | None:
        """First step that differs."""
        return self.differing_steps[0] if self.differing_steps else None

    @property
    def token_agreement(self) -> float:
        """Share of equal tokens."""
        return self.num_equal / self.num_tokens if self.num_tokens else 1.0

    def differ(self, step: int, margin: float, reason: str) -> None:
        """A step decided otherwise, by a margin; infinite where no near tie can explain it."""
        is_worst = margin == float("inf") > self.margin
        if is_worst or not self.differing_steps:  # the reason that fails it is the one to tell
            self.reason = f"step {step}: {reason}"
        self.differing_steps.append(step)
        self.margin = max(self.margin, margin)

    def conclude(self, tolerance: float, *, independent: bool) -> RecordVerdict:
        """Sets the outcome.

        Without ``independent`` all differing steps but the first may follow from it, and their
        number says nothing.
        """
        num = len(self.differing_steps)
        too_many = independent and num >= MANY_TIES and 2 * num > self.num_checked
        if num:
            self.outcome = "explained" if self.margin < tolerance and not too_many else "failed"
        return self


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How records are executed again, at levels 3 and 4."""

    backbone: Backbone
    tokenizer: Any = None  # compared with that of the run; not compared when None
    seed: int | None = None  # base seed instead of the stored sample seeds
    temperature: float | None = None  # sampling temperature instead of the recorded one
    policy_folders: Sequence[str | Path] = ()
    """Where exported policies lie; they are found by the digest of their weights."""
    plug_modules: Sequence[str] = ()
    """Modules that plugs from outside of the package may be imported from."""
    num_steps: int | None = None
    """Check this many steps of every batch, drawn with a fixed seed; all by default. Level 3."""
    device: torch.device | str = "cpu"
    """Where to compute."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result for a set."""

    level: int
    num_records: int
    problems: list[str] = field(default_factory=list)  # what levels 0 to 2 found wrong
    differences: list[str] = field(default_factory=list)
    """What is not as in the run: weights, tokenizer, seed, decoder."""
    verdicts: list[RecordVerdict] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Executed records by outcome."""
        found = Counter(verdict.outcome for verdict in self.verdicts)
        return {name: found[name] for name in ("exact", "explained", "failed")}

    @property
    def failed(self) -> bool:
        """Whether anything is wrong: a file, an identity, or a record."""
        return bool(self.problems or self.differences or self.counts["failed"])


Track = Callable[[Sequence[Any], str], Iterable[Any]]
"""Shows how many items have been taken."""


def verify(
    shards: Sequence[str | Path],
    *,
    level: int = 2,
    execution: Execution | None = None,
    sample: int | None = None,
    track: Track = lambda items, _: items,
) -> Verification:
    """Verifies shards up to a level.

    Problems of files do not stop the execution of what can be read, and neither does another
    identity: the result then says how far the records agree all the same.

    Args:
        shards: paths of shards, with their side files beside them.
        level: 0 to 4.
        execution: needed at levels 3 and 4.
        sample: execute only this many records, spread evenly over the set.
        track: shows how far the work is.
    """
    if not 0 <= level <= 4:
        raise ValueError(f"level: expected 0 to 4, got {level}")
    if level >= 3 and execution is None:
        raise ValueError(f"level {level}: needs a backbone to execute the records with")
    at_least(1, sample=sample)
    paths = [Path(shard) for shard in shards]
    problems = check_files(paths, level=min(level, 2), track=track)
    try:
        num_records = _lenient(paths).num_records
    except TrajectoryFormatError:  # no shard has its side file: nothing can be read
        return Verification(level=level, num_records=0, problems=problems)
    found = Verification(level=level, num_records=num_records, problems=problems)
    if execution is not None and level >= 3:
        batches = list(_batches(paths, sample))
        # A method that cannot be rebuilt is found before hours of work, not after.
        for run, method in {
            (b.run.digest(), b.method): (b.run, b.method) for b in batches
        }.values():
            rebuilt_decoder(run, method, execution)
        for number, batch in enumerate(track(batches, "Re-execution")):
            lines, verdicts = _execute(batch, number, level, execution)
            found.differences.extend(line for line in lines if line not in found.differences)
            found.verdicts.extend(verdicts)
    return found


@dataclass(frozen=True)
class _Batch:
    """Records that are executed together."""

    run: RunRecord
    method: str
    records: list[Trajectory]


def _batches(paths: Sequence[Path], sample: int | None) -> Iterator[_Batch]:
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
        size = run.hardware.get("batch_size") or 16
        for first in range(0, len(records), int(size)):
            yield _Batch(run, method, records[first : first + int(size)])


def _lenient(paths: Sequence[Path], *, features: bool = True) -> TrajectoryShardReader:
    """Reads what can be read; the problems of files are named by :func:`check_files`."""
    return TrajectoryShardReader(list(paths), on_error="skip", features=features)


def _chosen(num_records: int, sample: int | None) -> set[int] | None:
    if sample is None or sample >= num_records:
        return None
    return set(np.linspace(0, num_records - 1, sample).round().astype(int).tolist())


def _execute(
    batch: _Batch,
    number: int,
    level: int,
    execution: Execution,
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
        "captured": _captured(run, records),
        "device": execution.device,
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


# -- files: levels 0 to 2 ------------------------------------------------------------------------


def check_files(
    shards: Sequence[Path], *, level: int, track: Track = lambda items, _: items
) -> list[str]:
    """Checks shards of a folder without running a model; one line per problem.

    Args:
        shards: shards with their side files.
        level: 0 integrity, 1 also structure, 2 also authenticity.
        track: shows how far the work is.
    """
    problems: list[str] = []
    owners: dict[str, str] = {}
    for shard in track(shards, "Files"):
        problems += _check_shard(shard, level, owners)
    if level >= 2:
        for folder in sorted({shard.parent for shard in shards}):
            problems += _check_manifest(folder, shards)
    return problems


def _check_shard(shard: Path, level: int, owners: dict[str, str]) -> list[str]:
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
    for index in range(len(side.blocks)):
        try:
            records = reader.read_block(shard, index)
        except TrajectoryFormatError as error:
            problems.append(str(error))
            continue
        if level >= 1:
            for record in records:
                if record.uid in owners:
                    problems.append(f"{shard}: uid {record.uid!r} is also in {owners[record.uid]}")
                owners[record.uid] = shard.name
    # Reading by offset passes over the archive's own headers; reading as a stream does not.
    problems += _check_archive(shard, side)
    if level >= 2 and not problems:
        problems += _check_authenticity(shard, side)
    return problems


def _check_archive(shard: Path, side: SideFile) -> list[str]:
    """The tar headers: every block is found where a tar reader looks for it."""
    with shard.open("rb") as file:
        members, reached_end = scan_members(file)
    found = {name.partition(".")[0] for name, _ in members if name.endswith(f".{RECORDS}")}
    missing = [entry.key for entry in side.blocks if entry.key not in found]
    if missing:
        return [
            f"{shard}: a tar reader finds {len(found)} of {len(side.blocks)} blocks; the archive "
            f"is cut or damaged before {missing[0]!r}"
        ]
    return [] if reached_end else [f"{shard}: the end marker of the archive is missing"]


def _check_authenticity(shard: Path, side: SideFile) -> list[str]:
    problems = []
    sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
    if sha256 != side.sha256:
        problems.append(f"{shard}: SHA-256 {side.sha256} in its side file, {sha256} now")
    try:
        _, run = run_of_shard(shard)
    except TrajectoryFormatError as error:
        return [*problems, str(error)]
    if run != side.run_digest:
        problems.append(f"{shard}: run digest {side.run_digest} in its side file, {run} inside it")
    return problems


def _check_manifest(folder: Path, shards: Sequence[Path]) -> list[str]:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return [f"{path}: there is no manifest, so nothing says which shards were published"]
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        listed = {entry["shard"]: entry for entry in manifest["shards"]}
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
            for key in ("bytes", "sha256", "num_records")
            if entry.get(key) != getattr(side, key)
        ]
    absent = [name for name in listed if not (folder / name).is_file()]
    return problems + [f"{folder / name}: the manifest lists it, but it is gone" for name in absent]


# -- identity: what the run names, and what is at hand -------------------------------------------


def named_differences(
    recorded: Mapping[str, Any], current: Mapping[str, Any], prefix: str
) -> list[str]:
    """Lines such as ``model.dtype: "float32" recorded, "bfloat16" now`` of what both sides know."""
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
    """Name of the decoding method that made a record."""
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
    """The decoder of one method of a run, and how it differs from the recorded one."""
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
    """The records with the noise seeds to execute them with, and what is wrong with these.

    That is another base seed than the run's, or stored seeds that do not follow from it. With
    ``None`` the stored seeds stay.
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


# -- execution: levels 3 and 4 ---------------------------------------------------------------------


def teacher_forced(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    tolerance: float = TOLERANCE,
    steps: frozenset[int] | None = None,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
) -> list[RecordVerdict]:
    """Decides recorded steps again (V3).

    Args:
        backbone: the denoiser.
        decoder: the plugs that the records were made with.
        records: records of one batch: one response length, one mask id.
        tolerance: margin below which a differing decision is explained.
        steps: only these steps; all by default.
        captured: what the run's capture asked of each step, such as ``region``: more columns in
            one product can change its last bits.
        device: where to compute.
    """
    decoder.check(backbone)
    backbone = decoder.guided(backbone)
    if steps is not None and not isinstance(decoder.cache, NoCache):
        raise ValueError(
            f"steps: with {type(decoder.cache).__name__} a step depends on the ones before it, so "
            "all have to be executed; leave the selection of steps out"
        )
    plugs = decoder.plugs(backbone.spec)
    requires, hidden_layers = needs(decoder.policy)
    margins = _stored_margins(records, device)
    verdicts = [RecordVerdict(uid=record.uid) for record in records]
    num_steps = torch.tensor([record.num_steps for record in records], device=device)
    with torch.no_grad():
        canvas = decoder.prepared(canvas_of(records, backbone, device=device), backbone)
        state = initial_state(backbone, canvas)
        session = decoder.cache.start(
            backbone, state, window=plugs.window, hidden_layers=hidden_layers
        )
        for step in count():
            # A row ends where its record does, whatever this model would do.
            running = num_steps[state.rows] > step
            full = running & ~state.masked.any(1)
            for row in state.rows[full].tolist():
                reason = "the canvas was full before this recorded step"
                verdicts[row].differ(step, torch.inf, reason)
            keep = (running & ~full).nonzero()[:, 0]
            if not len(keep):
                break
            if len(keep) < len(state.rows):
                state = state.take(keep)
                if session is not None:
                    session.take(keep.tolist(), keep)
            state = replace(state, frontier=tuple(first_column(state.masked).tolist()))
            after = _recorded_after(records, state, step)
            if steps is None or step in steps:
                decision = decide(
                    backbone,
                    state,
                    plugs,
                    requires=requires | captured(step) | {"logits"},
                    hidden_layers=hidden_layers,
                    session=session,
                )
                state = decision.record.state
                stored = None if margins is None else margins[state.rows]
                _, margin = compare_step(decision, after, decoder, stored)
                _judge_step(verdicts, records, decision, after, margin, decoder, step)
            else:  # without a decision, but quotas count the steps of a block
                state = enter_block(state, plugs.window.view(state), counts=True)
            # On with the recorded tokens: one difference must not cause others.
            state = _advanced(state, after)
    _release(backbone, canvas)
    return [verdict.conclude(tolerance, independent=True) for verdict in verdicts]


def free_running(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    tolerance: float = TOLERANCE,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
) -> list[RecordVerdict]:
    """Decodes the prompts again from their seeds (V4); arguments as in :func:`teacher_forced`.

    A record is ``explained`` when the first step that differs was a near tie; later differences
    follow from that one.
    """
    canvas = canvas_of(records, backbone, device=device)
    observer = _FirstDifference(records, decoder, captured, device)
    result = decoder(backbone, canvas, [observer])
    _release(backbone, canvas)
    response = result.ids[:, result.start :].cpu().numpy()
    for row, (record, verdict) in enumerate(zip(records, observer.verdicts, strict=True)):
        verdict.num_tokens = record.num_generated
        verdict.num_equal = int((response[row] == record.tokens).sum())
        then = f"{record.num_steps} steps, {record.status}"
        now = f"{int(result.num_steps[row])} steps, {result.status[row]}"
        if then != now and verdict.first_step is None:
            last = min(int(result.num_steps[row]), record.num_steps)
            verdict.differ(last, torch.inf, f"{then} recorded; {now} now")
    return [verdict.conclude(tolerance, independent=False) for verdict in observer.verdicts]


def canvas_of(
    records: Sequence[Trajectory], backbone: Backbone, *, device: torch.device | str = "cpu"
) -> Canvas:
    """The canvas that a batch of records was decoded from."""
    lengths = sorted({record.num_generated for record in records})
    if len(lengths) != 1:
        raise ValueError(f"re-execution: expected one response length in a batch, got {lengths}")
    for record in records:
        where = f"trajectory {record.uid!r}"
        if record.mask_id != backbone.spec.mask_id:
            raise ValueError(
                f"{where}: recorded with mask id {record.mask_id}, "
                f"the backbone has {backbone.spec.mask_id}"
            )
        if record.vocab_size != backbone.vocab_size:
            raise ValueError(
                f"{where}: recorded with a vocabulary of {record.vocab_size}, "
                f"the backbone has {backbone.vocab_size}"
            )
    prompts = [record.prompt_ids.tolist() for record in records]
    for row, record in enumerate(records):
        find_pictures(backbone, record.uid, record.meta)
        if getattr(backbone, "vision", None) is not None:
            prompts[row] = insert_pictures(backbone, prompts[row], record.meta.get("images", ()))
    canvas = prompt_canvas(
        prompts,
        response_length=lengths[0],
        spec=backbone.spec,
        seeds=[signed_seed(record.seed) for record in records],
        device=device,
    )
    if all(record.given is None for record in records):
        return canvas
    ids, editable = canvas.ids.clone(), canvas.editable.clone()
    for row, record in enumerate(records):
        if record.given is not None:
            given = torch.from_numpy(record.given).to(device)
            tokens = torch.from_numpy(record.tokens).long().to(device)
            ids[row, canvas.start :][given] = tokens[given]
            editable[row, canvas.start :] = ~given
    return replace(canvas, ids=ids, editable=editable)


def _release(backbone: Backbone, canvas: Canvas) -> None:
    """Lets go of the pictures that :func:`canvas_of` took up."""
    if (vision := getattr(backbone, "vision", None)) is not None:
        vision.release(canvas.ids[:, : canvas.start].flatten().tolist())


class _FirstDifference:
    """Observer that compares a decode with records until each first differs."""

    def __init__(
        self,
        records: Sequence[Trajectory],
        decoder: Decoder,
        captured: Callable[[int], frozenset[str]],
        device: torch.device | str,
    ) -> None:
        self.requires = captured(0) | {"logits"}
        self._captured = captured
        self.verdicts = [RecordVerdict(uid=record.uid) for record in records]
        self._records = records
        self._margins = _stored_margins(records, device)
        self._decoder = decoder

    def on_start(self, state: DecodeState) -> None:
        """Counts steps from 0."""
        self._step = 0

    def on_step(self, record: StepRecord) -> None:
        """Compares the canvases; margins only for rows that never differed before."""
        state, step = record.state, self._step
        self._step += 1
        self.requires = self._captured(self._step) | {"logits"}
        after = _recorded_after(self._records, state, step)
        decided = torch.ones_like(state.rows, dtype=torch.bool)
        stored = None if self._margins is None else self._margins[state.rows]
        decision = Decision(record, decided, None)
        differs, margin = compare_step(decision, after, self._decoder, stored)
        for i, row in enumerate(state.rows.tolist()):
            verdict = self.verdicts[row]
            verdict.num_checked += 1
            if not bool(differs[i]):
                verdict.num_agreeing += 1
            elif verdict.first_step is None:
                verdict.differ(step, float(margin[i]), _difference(after[i], record, i))
            else:  # follows from the first one
                verdict.differing_steps.append(step)

    def on_end(self, result: DecodeResult) -> None:
        """Nothing to finish."""


def _advanced(state: DecodeState, ids: Tensor) -> DecodeState:
    """The state before the next step, with the recorded canvas."""
    return replace(
        state,
        ids=ids,
        masked=state.editable & (ids == state.mask_id),
        step=state.step + 1,
        block_step=state.block_step + 1,
        written=ids != state.ids,
    )


def _recorded_after(records: Sequence[Trajectory], state: DecodeState, step: int) -> Tensor:
    """``(b, L)`` int64: the canvases that the records have after a step."""
    after = state.ids.clone()
    here = [records[row] for row in state.rows.tolist()]
    after[:, state.start :] = states_at(here, step + 1).to(after.device)
    return after


def _stored_margins(records: Sequence[Trajectory], device: torch.device | str) -> Tensor | None:
    """``(B, P + G)`` stored selection margins, not a number outside the response."""
    if not any("commit_margin" in record.signals for record in records):
        return None
    width = max(record.num_prompt for record in records)
    margins = np.full((len(records), width + records[0].num_generated), np.nan, dtype=np.float32)
    for row, record in enumerate(records):
        if "commit_margin" in record.signals:
            margins[row, width:] = record.signals["commit_margin"]
    return torch.from_numpy(margins).to(device)


def signed_seed(seed: int) -> int:
    """A stored seed as the signed 64-bit integer that the loop works with."""
    return seed - 2**64 if seed >= 2**63 else seed


# -- one step and one record -----------------------------------------------------------------------


def _judge_step(
    verdicts: Sequence[RecordVerdict],
    records: Sequence[Trajectory],
    decision: Decision,
    after: Tensor,
    margin: Tensor,
    decoder: Decoder,
    number: int,
) -> None:
    """Adds a teacher-forced step to the verdicts of its rows."""
    step = decision.record
    state = step.state
    wrote = after != state.ids
    num_tokens = wrote.sum(1).tolist()
    num_equal = (wrote & (step.new_ids == after)).sum(1).tolist()
    differs = (step.new_ids != after).any(1).tolist()
    is_open = (state.editable & (step.new_ids == state.mask_id)).any(1)
    has_ended = torch.zeros_like(is_open) if decision.ended is None else decision.ended
    for i, row in enumerate(state.rows.tolist()):
        verdict = verdicts[row]
        verdict.num_checked += 1
        verdict.num_tokens += num_tokens[i]
        verdict.num_equal += num_equal[i]
        status = "complete" if not is_open[i] else "eos" if has_ended[i] else _STATUS_OPEN
        if differs[i]:
            verdict.differ(number, float(margin[i]), _difference(after[i], step, i))
        elif wrong_end := _wrong_end(records[row], number, status, decoder):
            verdict.differ(number, torch.inf, wrong_end)
        else:
            verdict.num_agreeing += 1


def _wrong_end(record: Trajectory, step: int, status: str, decoder: Decoder) -> str:
    """Why a record may not go on, or end, after an agreeing step; empty when it may."""
    if step < record.num_steps - 1:
        return "" if status == _STATUS_OPEN else f"the record goes on, the loop ends ({status})"
    if record.status == "aborted":
        return ""
    if status != record.status:
        return f"the record ends here ({record.status}), the loop says {status}"
    num_masks = int((record.initial() == record.mask_id).sum())
    budget = decoder.settings.max_steps or num_masks
    if status == _STATUS_OPEN and record.num_steps < budget:
        return f"the record stops at {record.num_steps} steps, the loop has {budget}"
    return ""


def _difference(after: Tensor, step: StepRecord, row: int) -> str:
    """The first difference of a row, in words."""
    differing = step.new_ids[row] != after
    column = int(differing.nonzero()[0, 0])
    state = step.state
    old, ours, theirs = (int(x[column]) for x in (state.ids[row], step.new_ids[row], after))

    def spoken(token: int) -> str:
        return "nothing" if token == old else f"token {token}"

    return (
        f"position {column - state.start}: {spoken(theirs)} recorded, {spoken(ours)} now "
        f"({int(differing.sum())} positions differ)"
    )


def compare_step(
    decision: Decision,
    recorded: Tensor,
    decoder: Decoder,
    recorded_margin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compares a step with the recorded canvas after it, ``(b, L)`` int64.

    Args:
        decision: the executed step, with its forward.
        recorded: ``(b, L)`` int64.
        decoder: the plugs that decided.
        recorded_margin: ``(b, L)`` stored selection margins of the writes, not a number where
            there is none.

    Returns:
        ``(b,)`` bool whether the canvas is another one, and ``(b,)`` float64 the largest margin
        among the differing decisions of a row: 0 where nothing differs, infinite where no near tie
        can explain a difference. Tokens: difference of the softmax values that the arg-max chose
        from. Positions: difference of the policy's scores (probabilities, or nats for the entropy
        policy) to the boundary of the selection, or the recorded ``commit_margin`` where that is
        smaller.
    """
    step, ids = decision.record, decision.record.state.ids
    differing = step.new_ids != recorded
    differs = differing.any(1)
    margin = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    if not bool(differs.any()):
        return differs, margin
    wrote = recorded != ids
    token_gap = _token_gaps(decision, recorded, decoder)
    position_gap = _position_gaps(decision, decoder)
    # Both questions can differ at once: which token, and whether it is written now.
    other_token = differing & wrote & (step.proposal.ids != recorded)
    other_set = differing & (wrote != step.commit)
    token_gap = torch.where(other_token, token_gap, 0.0)
    set_gap = torch.where(other_set, position_gap, 0.0)
    # An ended answer is filled: what differs there follows from the commits of the same step.
    is_fill = torch.zeros_like(differing)
    if decoder.settings.eos_rule == "fill":
        fill = step.state.eos_ids[0]
        is_fill = differing & ~step.commit & ((step.new_ids == fill) | (recorded == fill))
    decided = differing & ~is_fill
    largest_set = torch.where(decided, set_gap, 0.0).amax(1)
    if recorded_margin is not None:
        lost = decided & other_set & wrote
        stored = recorded_margin.double().abs().nan_to_num(torch.inf, torch.inf)
        stored = torch.where(lost, stored, 0.0).amax(1)
        largest_set = torch.where(lost.any(1), torch.minimum(largest_set, stored), largest_set)
    largest_token = torch.where(decided, token_gap, 0.0).amax(1)
    # Only a fill differs: one of its cells was the end that began it, the nearest to a tie.
    gaps = torch.maximum(token_gap, set_gap)
    first_end = torch.where(is_fill, gaps, torch.inf).amin(1)
    margin = torch.maximum(largest_set, largest_token)
    margin = torch.where(decided.any(1), margin, first_end)
    return differs, torch.where(differs, margin, 0.0)


def _token_gaps(decision: Decision, recorded: Tensor, decoder: Decoder) -> Tensor:
    """``(b, L)`` how much more probable the proposed token was than the recorded one."""
    state, denoised = decision.record.state, decision.record.denoised
    assert denoised is not None
    columns = denoised.columns
    gaps = torch.full(recorded.shape, torch.inf, dtype=torch.float64, device=recorded.device)
    values = decoder.sampler.perturbed(state, denoised).double().softmax(-1)
    best = values.amax(-1)
    other = values.gather(-1, recorded.gather(1, columns).clamp(0, values.shape[-1] - 1)[..., None])
    looked_at = best - other[..., 0]
    # A filtered-out or forbidden token has probability 0: no near tie.
    looked_at = looked_at.masked_fill(other[..., 0] == 0.0, torch.inf)
    return gaps.scatter(1, columns, looked_at)


def _position_gaps(decision: Decision, decoder: Decoder) -> Tensor:
    """``(b, L)`` how far each candidate's score is from being decided the other way."""
    step = decision.record
    scores = step.scores.double()
    threshold = getattr(decoder.policy, "threshold", None)
    if isinstance(decoder.policy, TraceLockPolicy):
        scores = scores.sigmoid()
    passed_over = step.candidates & ~step.commit
    weakest = scores.masked_fill(~step.commit, torch.inf).amin(1, keepdim=True)
    strongest = scores.masked_fill(~passed_over, -torch.inf).amax(1, keepdim=True)
    # A committed cell gives way to the best one passed over, and the other way round.
    gaps = torch.where(step.commit, scores - strongest, weakest - scores).clamp_min(0.0)
    if isinstance(decoder.policy, LockstepPolicy):
        threshold = decoder.policy.thresholds(step.state)
    if threshold is not None:
        gaps = torch.minimum(gaps, (scores - threshold).abs())
    return gaps.masked_fill(~step.candidates, torch.inf)
