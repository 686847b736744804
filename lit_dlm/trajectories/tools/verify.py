"""Verification of a set of trajectories, levels V0 to V4.

| level | needs | proves |
|---|---|---|
| 0 integrity | files | no accidental change of bytes |
| 1 structure | files | every intermediate canvas is well defined |
| 2 authenticity | manifest | the records are the published ones |
| 3 teacher-forced | weights | each recorded canvas leads to the recorded decision |
| 4 free-running | weights, seed | decoding from the prompt reproduces the record |

A level includes those below it, except that 4 replaces 3. Teacher-forced, the function that the
decode loop calls decides a step from its recorded canvas: one difference does not lead to others.
Free-running, everything after the first difference follows from it.

Floating-point results differ between machines, batch sizes and dtypes, so a step may decide
differently where two options were almost equal. Such a difference is explained by its margin: how
far the executed step's own numbers would have to move to yield the recorded decision.
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
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.description import decoder_from_description
from lit_dlm.decoding.loop import decode
from lit_dlm.decoding.state import (
    STATUS,
    Canvas,
    DecodeState,
    Observer,
    StepRecord,
    prompt_canvas,
)
from lit_dlm.decoding.step import Decision, advance, decide, needs
from lit_dlm.system.options import within
from lit_dlm.tensors.batches import first_column
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.trajectories.capture import KeptSteps
from lit_dlm.trajectories.record import Trajectory, TrajectoryFormatError
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
from lit_dlm.vision.base import find_pictures, insert_pictures

Outcome = Literal["exact", "explained", "failed"]

TOLERANCE = 0.01
"""Margin below which a differing decision counts as a near tie."""
MANY_TIES = 4
"""With this many differing steps or more, a record counts as explained only if they are at most
half of the checked ones: a model with flat distributions has near ties everywhere."""
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(kw_only=True)
class RecordVerdict:
    """The result of re-executing one record."""

    uid: str
    outcome: Outcome = "exact"
    """``exact``: every decision is the recorded one; ``explained``: every differing decision was a
    near tie, and near ties are the exception (see :data:`MANY_TIES`); ``failed``."""
    num_checked: int = 0  # steps that were compared
    num_agreeing: int = 0  # steps after which the canvas is the recorded one
    num_tokens: int = 0
    num_equal: int = 0
    """Tokens that agree, of ``num_tokens``: those that the checked steps wrote (teacher-forced),
    or those of the final response (free-running)."""
    differing_steps: list[int] = field(default_factory=list)
    margin: float = 0.0
    """Largest margin among the differing decisions; infinite when no near tie explains one."""
    reason: str = ""  # what differs, in words; empty when nothing does

    @property
    def token_agreement(self) -> float:
        return self.num_equal / self.num_tokens if self.num_tokens else 1.0

    def differ(self, step: int, margin: float, reason: str) -> None:
        """Adds a step that decided otherwise; its margin is infinite if no near tie explains it."""
        is_worst = margin == float("inf") > self.margin
        if is_worst or not self.differing_steps:  # report why the record fails
            self.reason = f"step {step}: {reason}"
        self.differing_steps.append(step)
        self.margin = max(self.margin, margin)

    def conclude(self, *, independent: bool) -> RecordVerdict:
        """Sets the outcome and returns the verdict.

        Unless steps are ``independent``, those after the first differing one may follow from it.
        """
        num = len(self.differing_steps)
        too_many = independent and num >= MANY_TIES and 2 * num > self.num_checked
        if num:
            self.outcome = "explained" if self.margin < TOLERANCE and not too_many else "failed"
        return self


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
        found = Counter(verdict.outcome for verdict in self.verdicts)
        return {name: found[name] for name in ("exact", "explained", "failed")}

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
    for path in track(paths, "Files"):
        problems += _shard_problems(path, level, owners.setdefault(path.parent, {}))
    for folder in sorted({path.parent for path in paths}) if level >= 2 else ():
        problems += _manifest_problems(folder, paths)
    try:
        # Takes what can be read; the rest is among the problems.
        reader = TrajectoryShardReader(paths, on_error="skip", features=False)
    except TrajectoryFormatError:
        return Verification(level=level, num_records=0, problems=problems)
    found = Verification(level=level, num_records=reader.num_records, problems=problems)
    if level >= 3:
        assert execution is not None, "levels 3 and 4 need a backbone"
        batches = list(_batches(reader, sample))
        methods = {(batch.run.digest(), batch.method): batch for batch in batches}
        # A method that cannot be rebuilt is found before hours of work, not after.
        decoders = {key: _decoder_of(batch, execution) for key, batch in methods.items()}
        for batch in track(batches, "Re-execution"):
            lines = _differences(batch, execution)
            found.differences.extend(line for line in lines if line not in found.differences)
            execute = free_running if level == 4 else teacher_forced
            autocast = _AUTOCAST.get(str(batch.run.model.get("autocast")))
            with torch.autocast(
                torch.device(execution.device).type, autocast, enabled=autocast is not None
            ):
                verdicts = execute(
                    execution.backbone,
                    decoders[batch.run.digest(), batch.method],
                    batch.records,
                    captured=_captured(batch),
                    device=execution.device,
                )
            found.verdicts.extend(verdicts)
    return found


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
    # Reading by offset skips the archive's own headers; reading as a stream does not.
    archived, is_whole = archived_blocks(shard)
    missing = [entry.key for entry in side.blocks if RECORDS not in archived.get(entry.key, {})]
    if missing or not is_whole:
        cut = f", cut or damaged before {missing[0]!r}" if missing else ", but not its end"
        count = len(side.blocks) - len(missing)
        problems.append(f"{shard}: a tar reader finds {count} of {len(side.blocks)} blocks{cut}")
    if level >= 2 and not problems:
        found = {"sha256": hashlib.sha256(shard.read_bytes()).hexdigest()}
        try:
            found["run_digest"] = run_of_shard(shard)[1]
        except TrajectoryFormatError as error:
            problems.append(str(error))
        problems += [f"{shard}: its side file: {line}" for line in _unequal(vars(side), found)]
    return problems


def _manifest_problems(folder: Path, shards: Sequence[Path]) -> list[str]:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return [f"{path}: there is no manifest, so nothing says which shards were published"]
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        listed = {entry["shard"]: dict(entry) for entry in manifest["shards"]}
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
            continue  # named already
        facts = {name: side[name] for name in ("bytes", "sha256", "num_records")}
        problems += [f"{shard}: the manifest: {x}" for x in _unequal(listed[shard.name], facts)]
    absent = [name for name in listed if not (folder / name).is_file()]
    return problems + [f"{folder / name}: the manifest lists it, but it is gone" for name in absent]


def _unequal(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {recorded.get(name)} there, {value} now"
        for name, value in found.items()
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

    In the run each row that ended was replaced by the next.
    """
    groups: dict[tuple[Any, ...], _Batch] = {}
    total = reader.num_records
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
        size = int(group.run.hardware.get("batch_size") or 16)
        for at in range(0, len(group.records), size):
            yield replace(group, records=group.records[at : at + size])


def method_of(record: Trajectory, run: RunRecord) -> str:
    """Name of the decoding method that made a record."""
    methods = run.decode.get("methods")
    names = list(methods) if isinstance(methods, Mapping) else []
    name = record.meta.get("method", names[0] if len(names) == 1 else None)
    if name not in names:
        raise ValueError(
            f"trajectory {record.uid!r}: method: expected one that its run describes "
            f"({', '.join(names) or 'none: it cannot be executed again'}), got {name!r}"
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
    facts = {"mask_id": spec.mask_id, "pad_id": spec.pad_id, "eos_ids": list(spec.eos_ids)}
    if tokenizer is not None:
        # A chat template that was set for the run replaces the tokenizer's own.
        tokenizer.chat_template = run.tokenizer.get("chat_template", tokenizer.chat_template)
        facts["digest"] = tokenizer_digest(tokenizer)
    compared = [*differences(dict(run.model), model, "model")]
    compared += differences(dict(run.tokenizer), facts, "tokenizer")
    lines = [
        f"{_spoken(key)}: {before} recorded, {after} now"
        for key, before, after in compared
        if "absent" not in (before, after)
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
    capture = batch.run.decode.get("capture")
    facts = capture if isinstance(capture, dict) else {}
    nothing, region = frozenset[str](), frozenset({"region"})
    if facts.get("level") == "features":
        seeds = [signed_seed(record.seed) for record in batch.records]
        plans = [KeptSteps(seed, ratio=facts["step_ratio"]) for seed in seeds]
        return lambda step: region if any(step in plan for plan in plans) else nothing
    return lambda _step: region if facts.get("level") == "signals" else nothing


# -- execution: levels 3 and 4 ---------------------------------------------------------------------


def teacher_forced(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
) -> list[RecordVerdict]:
    """Decides recorded steps again (V3), of records with one response length and mask id.

    ``captured`` is what the run's capture required of each step, such as ``region``: more columns
    in a matrix product can change its last bits.
    """
    decoder.check(backbone)
    backbone, decoder = decoder.guided(backbone), decoder.on(backbone.spec)
    requires, hidden_layers = needs(decoder.policy)
    verdicts = [RecordVerdict(uid=record.uid) for record in records]
    num_steps = torch.tensor([record.num_steps for record in records], device=device)
    with torch.no_grad():
        canvas = canvas_of(records, backbone, device=device)
        state = decoder.begin(backbone, canvas)
        forwards = decoder.forwards(backbone, state, hidden_layers)
        for step in count():
            # A row ends where its record does, whatever this model would do.
            running = num_steps[state.rows] > step
            full = running & ~state.unfinished.any(1)
            for row in state.rows[full].tolist():
                reason = "the canvas was full before this recorded step"
                verdicts[row].differ(step, torch.inf, reason)
            keep = (running & ~full).nonzero()[:, 0]
            if not len(keep):
                break
            if len(keep) < len(state.rows):
                state = state.take(keep)
                forwards.take(keep.tolist(), keep)
            forwards.prepare(state, first_column(state.unfinished).tolist())
            decision = decide(
                state, decoder, forwards, requires=requires | captured(step) | {"logits"}
            )
            after = _recorded_after(records, decision.record.state, step)
            _judge_step(verdicts, records, decision, after, decoder, step)
            # Continue with the recorded tokens: one difference must not cause others.
            state = advance(decision, new_ids=after)
    _release(backbone, canvas)
    return [verdict.conclude(independent=True) for verdict in verdicts]


def free_running(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
) -> list[RecordVerdict]:
    """Decodes the prompts again from their seeds (V4); arguments as in :func:`teacher_forced`.

    A record is ``explained`` when the first step that differs was a near tie.
    """
    canvas = canvas_of(records, backbone, device=device)
    observer = _FirstDifference(records, decoder, captured)
    result = decode(backbone, decoder, canvas, [observer])
    _release(backbone, canvas)
    response = result.ids[:, result.start :].cpu().numpy()
    for row, (record, verdict) in enumerate(zip(records, observer.verdicts, strict=True)):
        verdict.num_tokens = record.num_generated
        verdict.num_equal = int((response[row] == record.tokens).sum())
        then = f"{record.num_steps} steps, {record.status}"
        now = f"{int(result.num_steps[row])} steps, {result.status[row]}"
        if then != now and not verdict.differing_steps:
            last = min(int(result.num_steps[row]), record.num_steps)
            verdict.differ(last, torch.inf, f"{then} recorded; {now} now")
    return [verdict.conclude(independent=False) for verdict in observer.verdicts]


def canvas_of(
    records: Sequence[Trajectory], backbone: Backbone, *, device: torch.device | str = "cpu"
) -> Canvas:
    """The canvas that a batch of records was decoded from."""
    own = backbone.spec.mask_id, backbone.vocab_size, records[0].num_generated
    for record in records:
        if (found := (record.mask_id, record.vocab_size, record.num_generated)) != own:
            raise ValueError(
                f"trajectory {record.uid!r}: expected the backbone's mask id and vocabulary, and "
                f"one response length: {own}, got {found}"
            )
    prompts = [record.prompt_ids.tolist() for record in records]
    for row, record in enumerate(records):
        find_pictures(backbone, record.uid, record.meta)
        if getattr(backbone, "vision", None) is not None:
            prompts[row] = insert_pictures(backbone, prompts[row], record.meta.get("images", ()))
    canvas = prompt_canvas(
        prompts,
        response_length=records[0].num_generated,
        spec=backbone.spec,
        seeds=[signed_seed(record.seed) for record in records],
        device=device,
    )
    ids, editable = canvas.ids.clone(), canvas.editable.clone()
    for row, record in enumerate(records):
        if record.given is not None:
            ids[row, canvas.start :] = torch.from_numpy(record.initial()).to(device)
            editable[row, canvas.start :] = ~torch.from_numpy(record.given).to(device)
    return replace(canvas, ids=ids, editable=editable)


def _release(backbone: Backbone, canvas: Canvas) -> None:
    """Releases the pictures that :func:`canvas_of` inserted."""
    if (vision := getattr(backbone, "vision", None)) is not None:
        vision.release(canvas.ids[:, : canvas.start].flatten().tolist())


class _FirstDifference(Observer):
    """Compares a decode with records, and judges the first difference of each."""

    def __init__(
        self,
        records: Sequence[Trajectory],
        decoder: Decoder,
        captured: Callable[[int], frozenset[str]],
    ) -> None:
        self.requires = captured(0) | {"logits"}
        self.verdicts = [RecordVerdict(uid=record.uid) for record in records]
        self._records, self._decoder, self._captured = records, decoder, captured

    def on_start(self, state: DecodeState) -> None:
        self._step = 0

    def on_step(self, record: StepRecord) -> None:
        """Compares the canvases; only the first difference of a row gets a margin."""
        state, step = record.state, self._step
        self._step += 1
        self.requires = self._captured(self._step) | {"logits"}
        after = _recorded_after(self._records, state, step)
        differs, margin = compare_step(record, after, self._decoder)
        for i, row in enumerate(state.rows.tolist()):
            verdict = self.verdicts[row]
            verdict.num_checked += 1
            if not bool(differs[i]):
                verdict.num_agreeing += 1
            elif not verdict.differing_steps:
                verdict.differ(step, float(margin[i]), _difference(after[i], record, i))
            else:  # follows from the first one
                verdict.differing_steps.append(step)


def _recorded_after(records: Sequence[Trajectory], state: DecodeState, step: int) -> Tensor:
    """``(b, L)`` int64: the recorded canvases after a step."""
    here = [records[row] for row in state.rows.tolist()]
    responses = [record.state_at(min(step + 1, record.num_steps)) for record in here]
    after = state.ids.clone()
    after[:, state.start :] = torch.from_numpy(np.stack(responses)).to(after.device)
    return after


def signed_seed(seed: int) -> int:
    """A stored seed as the signed 64-bit integer that the loop works with."""
    return seed - 2**64 if seed >= 2**63 else seed


# -- one step and one record -----------------------------------------------------------------------


def _judge_step(
    verdicts: Sequence[RecordVerdict],
    records: Sequence[Trajectory],
    decision: Decision,
    after: Tensor,
    decoder: Decoder,
    number: int,
) -> None:
    """Adds a teacher-forced step to the verdicts of its rows."""
    step = decision.record
    state = step.state
    wrote = after != state.ids
    num_tokens = wrote.sum(1).tolist()
    num_equal = (wrote & (step.new_ids == after)).sum(1).tolist()
    differs, margin = compare_step(step, after, decoder)
    statuses = advance(decision).status.tolist()
    for i, row in enumerate(state.rows.tolist()):
        verdict = verdicts[row]
        verdict.num_checked += 1
        verdict.num_tokens += num_tokens[i]
        verdict.num_equal += num_equal[i]
        status = STATUS.get(statuses[i], "step_limit")  # or the row goes on
        if differs[i]:
            verdict.differ(number, float(margin[i]), _difference(after[i], step, i))
        elif wrong_end := _wrong_end(records[row], number, status, decoder):
            verdict.differ(number, torch.inf, wrong_end)
        else:
            verdict.num_agreeing += 1


def _wrong_end(record: Trajectory, step: int, status: str, decoder: Decoder) -> str:
    """Why a record must not continue, or end, after an agreeing step; empty if it may."""
    if step < record.num_steps - 1:
        return "" if status == "step_limit" else f"the record goes on, the loop ends ({status})"
    if record.status == "aborted":
        return ""
    if status != record.status:
        return f"the record ends here ({record.status}), the loop says {status}"
    num_masks = int((record.initial() == record.mask_id).sum())
    budget = decoder.budget(num_masks)
    if status == "step_limit" and record.num_steps < budget:
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


def compare_step(step: StepRecord, recorded: Tensor, decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Compares an executed step with the recorded canvas after it, ``(b, L)`` int64.

    Returns:
        ``(b,)`` bool, whether the canvases differ, and ``(b,)`` float64, the largest margin of a
        differing decision: 0 where nothing differs, infinite where no near tie explains it. Tokens:
        difference of the softmax values that the arg-max chose from. Positions: distance of the
        policy's score (a probability, or nats for the entropy policy) from the boundary of the
        selection or, for a token already set, of taking it back.
    """
    ids = step.state.ids
    differing = step.new_ids != recorded
    differs = differing.any(1)
    margin = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    if not bool(differs.any()):
        return differs, margin
    wrote = recorded != ids
    token_gap = _token_gaps(step, recorded, decoder)
    position_gap = _position_gaps(step, decoder)
    # For a token already set: the gap to keeping or rewriting it, or to its being the best itself.
    stood = ids != step.state.mask_id
    rewrite_gap = step.scores.abs().double()
    edited = stood & step.commit
    rewrite_gap = torch.where(edited, torch.minimum(rewrite_gap, token_gap), rewrite_gap)
    position_gap = torch.where(stood, rewrite_gap, position_gap)
    # Both questions can differ at once: which token, and whether it is written now.
    is_token = recorded != step.state.mask_id
    other_token = differing & wrote & is_token & (step.proposal.ids != recorded)
    other_set = differing & (wrote != torch.where(stood, step.new_ids != ids, step.commit))
    token_gap = torch.where(other_token, token_gap, 0.0)
    set_gap = torch.where(other_set, position_gap, 0.0)
    # An ended answer is filled: what differs there follows from the commits of the same step.
    is_fill = torch.zeros_like(differing)
    if decoder.settings.eos_rule == "fill":
        fill = step.state.eos_ids[0]
        is_end = (step.new_ids == fill) | (recorded == fill)
        is_fill = differing & ~step.commit & ~stood & is_end
    decided = differing & ~is_fill
    gaps = torch.maximum(token_gap, set_gap)
    margin = torch.where(decided, gaps, 0.0).amax(1)
    # If only a fill differs, one of its cells was the end that began it: the nearest to a tie.
    first_end = torch.where(is_fill, gaps, torch.inf).amin(1)
    margin = torch.where(decided.any(1), margin, first_end)
    return differs, torch.where(differs, margin, 0.0)


def _token_gaps(step: StepRecord, recorded: Tensor, decoder: Decoder) -> Tensor:
    """``(b, L)`` how much more probable the proposed token was than the recorded one."""
    state, denoised = step.state, step.denoised
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


def _position_gaps(step: StepRecord, decoder: Decoder) -> Tensor:
    """``(b, L)`` how far each candidate's score is from being decided the other way."""
    scores = decoder.policy.scale(step.scores)
    passed_over = step.candidates & ~step.commit
    weakest = scores.masked_fill(~step.commit, torch.inf).amin(1, keepdim=True)
    strongest = scores.masked_fill(~passed_over, -torch.inf).amax(1, keepdim=True)
    # A committed cell would give way to the best one passed over, and vice versa.
    gaps = torch.where(step.commit, scores - strongest, weakest - scores).clamp_min(0.0)
    limit = decoder.policy.limit(step.state)
    if limit is not None:
        gaps = torch.minimum(gaps, (scores - limit).abs())
    return gaps.masked_fill(~step.candidates, torch.inf)
