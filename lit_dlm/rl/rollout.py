"""Rollouts: decoded and graded responses of the policy in training, or of a former run.

:class:`OnlineRollouts` decodes prompts with :class:`DecodingEngine`, scores the responses and marks
the groups that the filters keep; :class:`StoredRollouts` reads what ``RolloutWriter`` wrote. Both
return :class:`Rollouts`, the same on all processes.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding.api import (
    DecodePrompt,
    Occupancy,
    SampledWrites,
    WorkQueue,
    decode_stream,
    prompt_limit,
)
from lit_dlm.finetuning.trainable import TrainableModule
from lit_dlm.predict.decode import image_facts
from lit_dlm.rewards import Rewarder
from lit_dlm.rewards.base import RewardScore, Rollout
from lit_dlm.rl.batch import SAMPLED
from lit_dlm.rl.engine import Problem, RolloutPrompt, answered
from lit_dlm.rl.settings import RolloutSettings
from lit_dlm.tasks import Task, tasks_by_name
from lit_dlm.tasks.base import check_uids
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.training.ranks import Ranks
from lit_dlm.trajectories.members import decode_members, encode_members
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import TrajectoryShardReader
from lit_dlm.vision.base import add_picture_folders, add_pictures, find_pictures

# Records sent together: features of all steps may take 100 MB per record, and 1 GiB per block.
_PER_BLOCK = 8

logger = logging.getLogger(__name__)

# What the meta of a stored rollout must have; older runs wrote less than today's.
_NEEDED = ("rl_step", "prompt", "response", "reward", "kept")

# Called with the phase that is running, how much of it is done and how much there is.
Report = Callable[[str, int, int], None]


def rollout_prompts(
    problems: Iterable[Problem],
    *,
    method: str,
    step: int = 0,
    num_responses: int,
    response_length: int,
) -> list[RolloutPrompt]:
    """Lists the responses to decode in one RL step, by group."""
    return [
        RolloutPrompt(
            example=example,
            prompt_ids=ids,
            uid=f"{example.uid}@{method}/{step:06d}.{prompt:04d}.{number:03d}",
            meta={
                "task": example.task,
                "method": method,
                "rl_step": step,
                "prompt": prompt,
                "response": number,
                **image_facts(example),
            },
            response_length=response_length,
        )
        for prompt, (example, ids) in enumerate(problems)
        for number in range(num_responses)
    ]


def rl_step_of(uid: str) -> int:
    """Returns the RL step in a uid that :func:`rollout_prompts` made."""
    return int(uid.rpartition("/")[2].partition(".")[0])


@dataclass(eq=False)
class DecodingEngine:
    """Decodes with the module's own weights, in evaluation mode, and one of its decoders."""

    module: TrainableModule
    _: KW_ONLY
    method: str  # name of the decoder
    response_length: int  # positions of every response
    # Responses decoded together, each replaced by the next one; results depend on it by rounding.
    batch_size: int
    overlong_margin: int = 0  # positions short of the budget at which a response counts as overlong
    occupancy: Occupancy = field(default_factory=Occupancy)  # of the batches of this process so far
    _steps: dict[str, float] = field(default_factory=dict)  # mean per response, by prompt uid

    def __post_init__(self) -> None:
        self.module.decoders[self.method].check(self.module.backbone)

    def generate(self, prompts: Sequence[RolloutPrompt], *, shared: bool = False) -> list[Rollout]:
        """Decodes responses and returns them in order.

        If ``shared``, all processes must call it with the same prompts; each gets what it decoded.
        """
        queue = WorkQueue(len(prompts), shared=shared)
        records = {record.uid: record for record in self.records(prompts, queue)}
        own = [prompt for prompt in prompts if prompt.uid in records]
        return self.rollouts(own, [records[prompt.uid] for prompt in own])

    def records(
        self,
        prompts: Sequence[RolloutPrompt],
        queue: WorkQueue,
        *,
        report: Callable[[int], None] = lambda done: None,
    ) -> list[Trajectory]:
        """Decodes the responses that this process takes from a queue, longest expected first.

        Records are in the order in which rows end, with the log-probability with which each token
        was drawn (:data:`SAMPLED`).
        """
        # A number of the queue means the same prompt on all processes, since all have the same
        # prompts and step counts.
        module, order = self.module, self._by_expected_steps(prompts)
        capture = module.rollout_capture(self.method)
        sampled = SampledWrites()
        found: list[Trajectory] = []

        def prompt(number: int) -> DecodePrompt:
            one = order[number]
            ids = module.placed(one.example, one.prompt_ids)
            # The seed follows from the uid, so neither batch nor process changes a response.
            return DecodePrompt(one.uid, ids, sample_seed(module.seed, one.uid))

        for rows in decode_stream(
            module.backbone,
            module.decoders[self.method],
            queue,
            prompt,
            response_length=self.response_length,
            batch_size=self.batch_size,
            observers=[capture, sampled, self.occupancy],
        ):
            ended = [order[number] for number in rows.numbers]
            metas = [
                {**one.meta, "num_tokens": num_tokens}
                for one, num_tokens in zip(ended, rows.responses.num_tokens, strict=True)
            ]
            records = capture.trajectories([one.uid for one in ended], metas)
            log_probs = sampled.ended()[..., 0].cpu().numpy()
            for record, log_prob in zip(records, log_probs, strict=True):
                found.append(replace(record, signals={**record.signals, SAMPLED: log_prob}))
            report(len(found))
        return found

    def _by_expected_steps(self, prompts: Sequence[RolloutPrompt]) -> list[RolloutPrompt]:
        """Sorts prompts by the steps of their former responses, then by length, most first."""
        # The last rows to end are then short ones, and no process waits long for another.
        known = [self._steps[uid] for p in prompts if (uid := p.example.uid) in self._steps]
        mean = sum(known) / max(len(known), 1)
        return sorted(
            prompts, key=lambda one: (-self._steps.get(one.example.uid, mean), -len(one.prompt_ids))
        )

    def record_step_counts(self, records: Sequence[Trajectory]) -> None:
        """Notes how many steps the responses to each prompt took on all processes."""
        steps: dict[str, list[int]] = {}
        for record in records:
            steps.setdefault(record.uid.rpartition("@")[0], []).append(record.num_steps)
        self._steps |= {uid: sum(counts) / len(counts) for uid, counts in steps.items()}

    def rollouts(
        self, prompts: Sequence[RolloutPrompt], records: Sequence[Trajectory]
    ) -> list[Rollout]:
        """Returns responses, from whichever process, as rewards take them."""
        texts, lengths = self.module.texts(records) if records else ([], [])
        return [
            Rollout(
                trajectory=record,
                example=prompt.example,
                text=text,
                is_overlong=length + bool(self.overlong_margin)  # the end of text counts
                >= self.response_length - self.overlong_margin,
                num_tokens=min(length + 1, self.response_length),  # the end of text included
                decode=lambda ids: str(
                    self.module.tokenizer.decode(list(ids), skip_special_tokens=True)
                ),
            )
            for prompt, record, text, length in zip(prompts, records, texts, lengths, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """A decoded response and what it is worth.

    Files hold the fields as entries of the record's ``meta``. Here ``record`` may lack them: what
    an RL step asks is asked of the fields.
    """

    record: Trajectory
    prompt: int  # number of the prompt within the RL step; equal numbers are a group
    response: int  # number among the responses to it
    num_tokens: int  # before the first end of text
    reward: float
    correct: bool | None = None  # None: nothing has graded it
    overlong: bool = False
    garbled: bool = False  # the text is not valid Unicode
    kept: bool  # the filters keep its group
    policy_version: int = 0  # optimiser steps that the policy had taken
    parts: Mapping[str, float] = field(default_factory=dict)  # unweighted rewards by name
    token_rewards: Sequence[float] | None = None  # (G,)

    @classmethod
    def from_record(cls, record: Trajectory, **scores: Any) -> ScoredRollout:
        """Reads the fields from the record's ``meta``, except those that are given."""
        meta = {"num_tokens": record.num_committed, **record.meta, **scores}
        names = [one.name for one in fields(cls) if one.name in meta]
        return cls(record=record, **{name: meta[name] for name in names})

    def to_record(self) -> Trajectory:
        """Returns the record as files hold it."""
        names = [one.name for one in fields(self) if one.name != "record"]
        found = {name: getattr(self, name) for name in names}
        if self.token_rewards is None:
            del found["token_rewards"]
        return self.record.with_meta(**found)


def scores_of(rollout: Rollout, score: RewardScore, *, kept: bool, version: int) -> dict[str, Any]:
    """Returns the fields of a :class:`ScoredRollout` that only its own process knows, as JSON.

    ``kept``: the filters keep its group; ``version``: optimiser steps that the policy had taken.
    """
    paid = score.token_rewards
    return {
        "reward": float(score.total),
        "correct": bool(score.is_correct) if score.is_graded else None,
        "overlong": rollout.is_overlong,
        "garbled": "\ufffd" in rollout.text,
        "kept": kept,
        "policy_version": version,
        "parts": {name: float(value) for name, value in score.parts.items()},
        "token_rewards": None if paid is None else [float(value) for value in paid],
    }


def in_order(rollouts: Iterable[ScoredRollout]) -> list[ScoredRollout]:
    """Sorts the rollouts of one RL step by prompt and response."""
    return sorted(rollouts, key=lambda one: (one.prompt, one.response))


def groups_of(rollouts: Sequence[ScoredRollout]) -> list[list[int]]:
    """Returns the numbers of each prompt's rollouts."""
    groups: dict[int, list[int]] = {}
    for number, rollout in enumerate(rollouts):
        groups.setdefault(rollout.prompt, []).append(number)
    return list(groups.values())


def encoded_problems(
    module: TrainableModule, tasks: Sequence[Task], *, max_length: int, response_length: int
) -> list[Problem]:
    """Returns the encoded problems of some tasks that have at most ``max_length`` tokens.

    Those that do not fit the model's positions beside their response are left out, too.
    """
    examples = {task.name: list(task.examples()) for task in tasks}
    check_uids(examples)
    graded = [
        one for one in chain.from_iterable(examples.values()) if not one.reference.get("ungraded")
    ]
    if dropped := sum(map(len, examples.values())) - len(graded):
        logger.warning("left out %d prompts whose answers cannot be graded", dropped)
    every = [(one, module.prompt_ids(one)) for one in graded]
    most, limit = prompt_limit(module.backbone, response_length, max_length)
    found = [(example, ids) for example, ids in every if len(ids) <= most]
    for example, _ in found:
        add_pictures(module.backbone, example.uid, example.images)
    if len(found) < len(every):
        logger.warning("left out %d prompts with more than %s", len(every) - len(found), limit)
    if not found:
        raise ValueError(
            f"tasks: no prompt of {', '.join(task.name for task in tasks)} has at most {limit}"
        )
    return found


def draw_prompts(num_prompts: int, cursor: int, count: int, *, seed: int) -> list[int]:
    """Draws the next prompts from endless shuffled passes, each of which has every prompt once."""
    # A function of the cursor alone: a resumed run needs no state of a generator.
    first, last = cursor // num_prompts, (cursor + count - 1) // num_prompts
    passes = [
        np.random.default_rng([seed, number, 7]).permutation(num_prompts)
        for number in range(first, last + 1)
    ]
    begin = cursor - first * num_prompts
    drawn: list[int] = np.concatenate(passes)[begin : begin + count].tolist()
    return drawn


@dataclass
class Rollouts:
    """The rollouts of one RL step, the same on all processes."""

    scored: list[ScoredRollout]  # in order
    # Seconds of this process by phase (``wait``: for the rollouts of others) and, if it decoded,
    # ``occupancy``, the share of the batch's slots that were in use, and ``tokens_per_second``.
    times: dict[str, float] = field(default_factory=dict)

    @property
    def kept(self) -> list[ScoredRollout]:
        return [one for one in self.scored if one.kept]

    @property
    def num_prompts(self) -> int:
        return len(groups_of(self.scored))


class OnlineRollouts:
    """Rolls out prompts with the policy in training and scores them.

    Processes take responses from a shared queue as rows of their batches end. One of the decoders
    ``methods`` rolls out in each RL step; they take turns. Where the settings have an ``engine``,
    this one answers instead, each process a share of the prompts.
    """

    def __init__(
        self, module: TrainableModule, methods: Sequence[str], settings: RolloutSettings
    ) -> None:
        self.settings = settings
        self.filters = tuple(settings.filters or ())
        self.rewarder = Rewarder(
            settings.rewards,
            tasks_by_name(settings.tasks),
            filters=self.filters,
            overlong_is_wrong=settings.overlong_is_wrong,
            num_workers=settings.num_workers,
            require_isolation=settings.require_isolation,
        )
        self.problems = encoded_problems(
            module,
            settings.tasks,
            max_length=settings.max_prompt_length,
            response_length=settings.response_length,
        )
        if settings.engine is not None:
            sizes = {"size": settings.responses_per_prompt, "length": settings.response_length}
            self.problems = settings.engine.answerable(self.problems, module, **sizes)
        held = {one.digest for task in settings.val_tasks or () for one in task.examples()}
        if common := sum(example.digest in held for example, _ in self.problems):
            logger.warning("%d prompts of val_tasks are among those that are trained on", common)
        self.engines = [
            DecodingEngine(
                module,
                method=method,
                response_length=settings.response_length,
                batch_size=settings.rollout_batch_size,
                overlong_margin=settings.overlong_margin,
            )
            for method in methods
        ]

    def close(self) -> None:
        self.rewarder.close()

    def collect(
        self,
        step: int,
        cursor: int,
        *,
        version: int,
        ranks: Ranks,
        report: Report = lambda *_: None,
    ) -> Rollouts:
        """Returns the rollouts of one RL step from all processes, which must all call it.

        ``cursor``: prompts drawn before; ``version``: optimiser steps that the policy has taken.
        """
        # By the step's number alone: a resumed run goes on with the same one.
        engine = self.engines[step % len(self.engines)]
        count = self.settings.prompts_per_step
        drawn = draw_prompts(len(self.problems), cursor, count, seed=self.settings.seed)
        # All processes ask for the same responses: a number of the shared queue means one of them.
        asked = rollout_prompts(
            [self.problems[number] for number in drawn],
            method=engine.method,
            step=step,
            num_responses=self.settings.responses_per_prompt,
            response_length=self.settings.response_length,
        )
        engine.occupancy = Occupancy()
        share = -(-len(asked) // ranks.world_size)  # which this process may exceed
        spent: dict[str, float] = defaultdict(float)
        records = self.decoded(
            *(engine, asked, ranks), lambda done: report("rollout", min(done, share), share), spent
        )
        engine.record_step_counts(records)
        begin = time.perf_counter()
        scored = self._scored(engine, asked, records, version, ranks)
        times = {
            "rollout": spent["rollout"],
            "wait": spent["wait"],
            "reward": time.perf_counter() - begin,
            "occupancy": engine.occupancy.share,
            "tokens_per_second": spent["tokens"] / max(spent["rollout"], 1e-9),
        }
        return Rollouts(scored, times)

    def decoded(
        self,
        engine: DecodingEngine,
        asked: Sequence[RolloutPrompt],
        ranks: Ranks,
        report: Callable[[int], None],
        spent: dict[str, float],
    ) -> list[Trajectory]:
        """Decodes responses on all processes; returns those of all, in the order of the prompts.

        ``report`` is told how many this process has decoded; its seconds and tokens are added to
        ``spent``.
        """
        begin = time.perf_counter()
        if (other := self.settings.engine) is not None:
            own = answered(other, asked[ranks.rank :: ranks.world_size], engine.module)
            report(len(own))
        else:
            queue = WorkQueue(len(asked), shared=ranks.world_size > 1)
            own = engine.records(asked, queue, report=report)
        decoded = time.perf_counter()
        # From here on in the order of the prompts, whichever process decoded what and when: sums
        # and noise of training must not depend on it.
        by_uid = {record.uid: record for record in gathered(own, ranks)}
        spent["rollout"] += decoded - begin
        spent["wait"] += time.perf_counter() - decoded
        spent["tokens"] += sum(int(record.meta["num_tokens"]) for record in own)
        return [by_uid[prompt.uid] for prompt in asked]

    def _scored(
        self,
        engine: DecodingEngine,
        asked: Sequence[RolloutPrompt],
        records: Sequence[Trajectory],
        version: int,
        ranks: Ranks,
    ) -> list[ScoredRollout]:
        """Returns all records with their scores."""
        size = self.settings.responses_per_prompt
        # Rewards and filters look at whole groups, so each group is scored on one process, whoever
        # decoded its responses.
        own = [
            engine.rollouts(asked[at : at + size], records[at : at + size])
            for at in range(ranks.rank * size, len(asked), ranks.world_size * size)
        ]
        scores_by_uid: dict[str, dict[str, Any]] = {}
        for group, scores in zip(own, self.rewarder.score(own), strict=True):
            kept = all(keep.keep(scores) for keep in self.filters)
            for rollout, score in zip(group, scores, strict=True):
                found = scores_of(rollout, score, kept=kept, version=version)
                scores_by_uid[rollout.trajectory.uid] = found
        # Rewards run programs and ask servers: only one process's answer counts, for all of them.
        for part in ranks.gather(json.dumps(scores_by_uid).encode()):
            scores_by_uid |= json.loads(part)
        return [ScoredRollout.from_record(one, **scores_by_uid[one.uid]) for one in records]


def gathered(records: Sequence[Trajectory], ranks: Ranks) -> list[Trajectory]:
    """Returns the records of all processes, in no order; every process must call it."""
    if ranks.world_size == 1:
        return list(records)
    found: list[Trajectory] = []
    rest = list(records)
    # In the format of shards: compact, checked, and without pickles, which could run code.
    while True:
        own, rest = rest[:_PER_BLOCK], rest[_PER_BLOCK:]
        # Processes have decoded different numbers of rows; one that has sent all sends nothing
        # until none has anything left, since every collective needs every process. Readers check
        # the rules, and a record that was derived from a decode keeps them.
        members = encode_members(own, level=1, check=False) if own else (b"", None)
        blocks = ranks.gather(members[0])
        if not any(blocks):
            return found
        features = ranks.gather(members[1] or b"")
        for block, member in zip(blocks, features, strict=True):
            if block:
                found += decode_members(block, member or None, strict=False)[1]


class StoredRollouts:
    """Replays the RL steps that a former run wrote to a folder of trajectory shards."""

    def __init__(
        self, folder: str | Path, *, mask_id: int, backbone: HFBackbone | None = None
    ) -> None:
        self.folder = Path(folder)
        add_picture_folders(backbone, self.folder)
        self._steps: dict[int, list[Trajectory]] = {}
        for record in TrajectoryShardReader(self.folder, features=False):
            missing = [name for name in _NEEDED if name not in record.meta]
            if record.mask_id != mask_id or missing:
                raise ValueError(
                    f"shards: {record.uid} in {self.folder}: expected rollouts that RolloutWriter "
                    f"wrote, with mask id {mask_id} and {', '.join(_NEEDED)} in their meta; "
                    f"got mask id {record.mask_id}, lacking {', '.join(missing) or 'nothing'}"
                )
            find_pictures(backbone, record.uid, record.meta)
            self._steps.setdefault(int(record.meta["rl_step"]), []).append(record)
        if not self._steps:
            raise ValueError(f"shards: expected rollouts in {self.folder}, got no record")
        self.steps = sorted(self._steps)

    def collect(self, step: int, cursor: int = 0, **online: Any) -> Rollouts:
        """Returns the rollouts of an RL step; after the last stored one they start again."""
        records = self._steps[self.steps[step % len(self.steps)]]
        scored = in_order(map(ScoredRollout.from_record, records))
        return Rollouts(scored, {"rollout": 0.0, "reward": 0.0})

    def close(self) -> None:
        """Does nothing: there are no threads to stop."""


RolloutSource = OnlineRollouts | StoredRollouts
