"""Rollouts: prompts to decoded, graded responses, of the policy in training or of a former run.

:class:`OnlineRollouts` decodes prompts with :class:`RolloutEngine`, scores the responses and marks
the groups that the filters keep; :class:`StoredRollouts` reads what ``RolloutWriter`` wrote. Both
give :class:`Rollouts`, the same on all processes. The engine is a plain class over the module's own
decoder and weights, so training and validation share it; another engine needs
:meth:`RolloutEngine.generate` and nothing else.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import DecodeResult, DecodeState, StepRecord
from lit_dlm.decoding.observers import QueueObserver
from lit_dlm.decoding.queue import Occupancy, WorkQueue, decode_queued_prompts
from lit_dlm.modules.decode import DecodeModule, image_facts
from lit_dlm.modules.finetune import TrainableModule
from lit_dlm.ops.noise import sample_seed
from lit_dlm.rewards import Rewarder
from lit_dlm.rewards.base import RewardScore, Rollout
from lit_dlm.rl.ranks import ALONE, Ranks
from lit_dlm.rl.settings import RolloutSettings
from lit_dlm.tasks import PromptExample, Task, tasks_by_name
from lit_dlm.tasks.base import check_uids
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.format import decode_block, encode_block
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import TrajectoryShardReader
from lit_dlm.vision.prompts import add_picture_folders, add_pictures, find_pictures

logger = logging.getLogger(__name__)

_MAX_BLOCK = 60_000
"""Records of one process and RL step: the most that travel in one block."""

Report = Callable[[str, int, int], None]
"""Told which phase is running, how much of it is done and how much there is."""


def no_report(phase: str, done: int, total: int) -> None:
    """Takes a report and does nothing with it."""


SAMPLED = "commit_log_prob"
"""Signal that holds the sampler's own log-probability of every token."""


@dataclass(frozen=True, kw_only=True)
class RolloutPrompt:
    """One response that is asked for."""

    example: PromptExample
    """The problem."""
    prompt_ids: list[int]
    """Its token ids, chat template included, pictures numbered as in records."""
    uid: str
    """Name of the response; its noise follows from it and the module's seed."""
    meta: Mapping[str, Any]
    """Facts for the record: RL step, number of the prompt in it, number of the response."""


def rollout_prompts(
    example: PromptExample,
    prompt_ids: list[int],
    *,
    method: str,
    step: int,
    place: int,
    num_responses: int,
) -> list[RolloutPrompt]:
    """The responses of one prompt in one RL step.

    Args:
        example: the problem.
        prompt_ids: its token ids.
        method: decoder to use, part of the names.
        step: number of the RL step.
        place: number of the prompt in it.
        num_responses: size of the group.

    Returns:
        One entry per response; names differ between RL steps, so responses do.
    """
    return [
        RolloutPrompt(
            example=example,
            prompt_ids=prompt_ids,
            uid=f"{example.uid}@{method}/{step:06d}.{place:04d}.{number:03d}",
            meta={
                "task": example.task,
                "method": method,
                "rl_step": step,
                "place": place,
                "response": number,
                **image_facts(example),
            },
        )
        for number in range(num_responses)
    ]


def rl_step_of(uid: str) -> int:
    """The RL step in a name that :func:`rollout_prompts` gave.

    Args:
        uid: name of a response.
    """
    return int(uid.rpartition("/")[2].partition(".")[0])


class RolloutEngine:
    """Decodes in place with the module's weights and one of its decoders.

    Args:
        module: the module; must be in evaluation mode while it generates.
        method: name of the decoder.
        response_length: cells of every response.
        batch_size: responses decoded together, each replaced by the next one when it ends; results
            do not depend on it beyond rounding.
        overlong_margin: cells short of the budget at which a response counts as overlong.
    """

    def __init__(
        self,
        module: DecodeModule,
        *,
        method: str,
        response_length: int,
        batch_size: int,
        overlong_margin: int = 0,
    ) -> None:
        if method not in module.decoders:
            raise ValueError(
                f"method: expected one of {', '.join(module.decoders) or '(no decoders)'}, "
                f"got {method!r}"
            )
        module.decoders[method].check(module.backbone)
        if response_length < 1 or batch_size < 1:
            raise ValueError(
                "response_length and batch size of rollouts: expected at least 1, got "
                f"{response_length} and {batch_size}"
            )
        if not 0 <= overlong_margin < response_length:
            raise ValueError(
                f"overlong_margin: expected 0 to {response_length - 1}, less than a response has "
                f"cells, got {overlong_margin}"
            )
        self.module = module
        self.method = method
        self.response_length = response_length
        self.batch_size = batch_size
        self.overlong_margin = overlong_margin
        self.occupancy = Occupancy()
        """Of the batches of this process so far."""
        self._steps: dict[str, float] = {}  # of former responses, by the prompt's uid

    @classmethod
    def of(
        cls, module: DecodeModule, method: str, response_length: int, settings: RolloutSettings
    ) -> RolloutEngine:
        """The engine of a run.

        Args:
            module: the module.
            method: name of the decoder.
            response_length: cells of every response.
            settings: of the data module.
        """
        return cls(
            module,
            method=method,
            response_length=response_length,
            batch_size=settings.rollout_batch_size,
            overlong_margin=settings.overlong_margin,
        )

    def generate(
        self,
        prompts: Sequence[RolloutPrompt],
        *,
        shared: bool = False,
        report: Callable[[int], None] | None = None,
    ) -> list[Rollout]:
        """Decodes responses.

        Args:
            prompts: what is asked for.
            shared: with all processes; every one must call it with the same prompts, and gets the
                responses that it has decoded.
            report: told now and then how many responses are done.

        Returns:
            One rollout per response, in order. Records hold the log-probability under which each
            token was drawn (:data:`SAMPLED`; NaN where an end-of-text fill wrote).
        """
        queue = WorkQueue(len(prompts), shared=shared)
        records = {record.uid: record for record in self.records(prompts, queue, report=report)}
        return [self.rollout(p, records[p.uid]) for p in prompts if p.uid in records]

    def records(
        self,
        prompts: Sequence[RolloutPrompt],
        queue: WorkQueue,
        *,
        report: Callable[[int], None] | None = None,
    ) -> list[Trajectory]:
        """Decodes the responses that this process takes from a queue, longest expected first.

        Args:
            prompts: what is asked for, of all processes.
            queue: of as many numbers; what they stand for follows from the prompts and from
                :meth:`learn`, on all processes alike.
            report: told now and then how many responses of this process are done.

        Returns:
            Records as rows end.
        """
        module = self.module
        order = self._by_expected_steps(prompts)
        capture = TrajectoryCapture(vocab_size=module.backbone.vocab_size)
        sampled = SampledLogProb()
        found: list[Trajectory] = []
        waiting: list[RolloutPrompt] = []

        def collect() -> None:
            rows = zip(
                capture.trajectories([prompt.uid for prompt in waiting]),
                waiting,
                sampled.ended().cpu().numpy(),
                strict=True,
            )
            for record, prompt, log_prob in rows:
                num_tokens = module.texts([record])[1][0]
                record = record.with_meta(**prompt.meta, num_tokens=num_tokens)
                signals = {**record.signals, SAMPLED: log_prob}
                found.append(replace(record, signals=signals))
            waiting.clear()
            if report is not None:
                report(len(found))

        def prompt(number: int) -> tuple[Sequence[int], int]:
            chosen = order[number]
            ids = module.placed(chosen.example, chosen.prompt_ids)
            return ids, sample_seed(module.seed, chosen.uid)

        for numbers, _ in decode_queued_prompts(
            module.backbone,
            module.decoders[self.method],
            queue,
            prompt,
            response_length=self.response_length,
            num_slots=self.batch_size,
            observers=[capture, sampled, self.occupancy],
        ):
            waiting += [order[number] for number in numbers]
            if len(waiting) >= self.batch_size:
                collect()
        if waiting:
            collect()
        return found

    def _by_expected_steps(self, prompts: Sequence[RolloutPrompt]) -> list[RolloutPrompt]:
        """Prompts whose former responses took most steps first, then longer prompts first.

        The last rows to end are then short ones, and no process waits long for another.
        """
        known = [self._steps[uid] for p in prompts if (uid := p.example.uid) in self._steps]
        mean = sum(known) / max(len(known), 1)
        return sorted(
            prompts,
            key=lambda prompt: (
                -self._steps.get(prompt.example.uid, mean),
                -len(prompt.prompt_ids),
            ),
        )

    def learn(self, records: Sequence[Trajectory]) -> None:
        """Notes how many steps the responses to each prompt took; speed alone depends on it.

        Args:
            records: of one RL step, those of all processes.
        """
        steps: dict[str, list[int]] = {}
        for record in records:
            steps.setdefault(record.uid.rpartition("@")[0], []).append(record.num_steps)
        self._steps |= {uid: sum(counts) / len(counts) for uid, counts in steps.items()}

    def rollout(self, prompt: RolloutPrompt, record: Trajectory) -> Rollout:
        """A response as rewards take it.

        Args:
            prompt: what was asked for.
            record: what came, on whatever process.
        """
        (text,), (length,) = self.module.texts([record])
        return Rollout(
            trajectory=record,
            example=prompt.example,
            text=text,
            is_overlong=length >= self.response_length - self.overlong_margin,
            num_tokens=min(length + 1, self.response_length),  # the end of text included
            decode=self._text,
        )

    def _text(self, ids: Sequence[int]) -> str:
        """Text of response tokens, as completions are made."""
        return str(self.module.tokenizer.decode(list(ids), skip_special_tokens=True))


class SampledLogProb(QueueObserver):
    """Observer that keeps the log-probability under which each response token was drawn.

    It is that of the distribution after temperature and filters, also where the order of writing is
    decided by raw scores. Of greedy decodes, whose tokens are not drawn, it is the model's own.
    """

    requires: frozenset[str] = frozenset({"drawn"})

    def __init__(self) -> None:
        self._table = torch.empty(0, dtype=torch.float32)  # (B, G), by place
        self._ended: list[Tensor] = []

    def on_start(self, state: DecodeState) -> None:
        """Prepares the table."""
        shape = (len(state.rows), state.ids.shape[1] - state.start)
        self._table = torch.full(shape, torch.nan, dtype=torch.float32, device=state.ids.device)
        self._ended = []

    def on_step(self, record: StepRecord) -> None:
        """Notes the proposals that were written."""
        state, region = record.state, slice(record.state.start, None)
        written = (record.new_ids != state.ids)[:, region]
        assert record.proposal.drawn is not None
        log_prob = record.proposal.drawn[:, region].float().log()
        new = torch.where(record.commit[:, region], log_prob, torch.nan)
        before: Tensor = self._table[state.rows]
        self._table.index_copy_(0, state.rows, torch.where(written, new, before))

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        """Keeps the rows that have ended."""
        self.on_end(result)
        self._table.index_fill_(0, state.rows, torch.nan)

    def on_end(self, result: DecodeResult) -> None:
        """Keeps the rows that have ended."""
        index = torch.tensor(result.rows).to(self._table.device, non_blocking=True)
        self._ended.append(self._table[index])

    def ended(self) -> Tensor:
        """``(n, G)`` float32 of the rows that have ended since the last call, in their order.

        NaN where no proposal was written.
        """
        ended, self._ended = self._ended, []
        return torch.cat(ended)


def score_facts(
    rollout: Rollout, score: RewardScore, *, kept: bool, version: int
) -> dict[str, Any]:
    """What training needs of a rollout's score, as small JSON values for the record.

    Args:
        rollout: the rollout.
        score: its score.
        kept: whether the filters keep its group.
        version: optimiser steps that the policy had taken.

    Returns:
        ``reward``, ``overlong``, ``kept``, ``policy_version``, the ``parts`` of the reward,
        ``correct`` where the task told, and ``token_rewards`` where there are any.
    """
    facts: dict[str, Any] = {
        "reward": float(score.total),
        "overlong": rollout.is_overlong,
        "garbled": "\ufffd" in rollout.text,
        "kept": kept,
        "policy_version": version,
        "parts": {name: float(value) for name, value in score.parts.items()},
    }
    if score.is_graded:
        facts["correct"] = bool(score.is_correct)
    if score.token_rewards is not None:
        facts["token_rewards"] = [float(value) for value in score.token_rewards]
    return facts


def in_order(records: Sequence[Trajectory]) -> list[Trajectory]:
    """Records of one RL step by prompt and response, whatever process made them."""
    return sorted(records, key=lambda record: (record.meta["place"], record.meta["response"]))


def groups_of(records: Sequence[Trajectory]) -> list[list[int]]:
    """Numbers of the records of each prompt.

    Args:
        records: ordered by :func:`in_order`.
    """
    groups: dict[int, list[int]] = {}
    for number, record in enumerate(records):
        groups.setdefault(record.meta["place"], []).append(number)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A problem with its token ids, pictures numbered."""

    example: PromptExample
    ids: list[int]


def encoded_prompts(
    module: TrainableModule,
    tasks: Sequence[Task],
    *,
    max_length: int,
    response_length: int = 0,
    option: str = "response_length",
) -> list[EncodedPrompt]:
    """The problems of some tasks as the model is given them.

    Args:
        module: whose tokenizer and chat template are used.
        tasks: in their order.
        max_length: prompts with more tokens are left out, with a warning.
        response_length: cells of the responses.
        option: the setting that says so.
    """
    found, dropped = [], 0
    examples = {task.name: list(task.examples()) for task in tasks}
    check_uids(examples)
    for example in chain.from_iterable(examples.values()):
        ids = module.prompt_ids(example)
        if len(ids) > max_length:
            dropped += 1
            continue
        add_pictures(module.backbone, example.uid, example.images)
        found.append(EncodedPrompt(example=example, ids=ids))
    if dropped:
        logger.warning(
            "left out %d prompts with more than max_prompt_length = %d tokens", dropped, max_length
        )
    if not found:
        raise ValueError(
            f"tasks: no prompt of {', '.join(task.name for task in tasks)} has at most "
            f"max_prompt_length = {max_length} tokens"
        )
    max_positions = module.backbone.architecture.max_positions
    num_long = sum(len(prompt.ids) + response_length > max_positions for prompt in found)
    if num_long:
        raise ValueError(
            f"{option}: {num_long} of {len(found)} prompts have, with a response of "
            f"{response_length} tokens, more than the {max_positions} positions that the model was "
            "made for; expected shorter responses, or a smaller max_prompt_length"
        )
    return found


def grouped_prompts(
    prompts: Iterable[tuple[int, EncodedPrompt]], *, method: str, step: int, num_responses: int
) -> list[RolloutPrompt]:
    """The responses that are asked for in one RL step, group by group.

    Args:
        prompts: problems with their place in the RL step.
        method: decoder to use.
        step: number of the RL step.
        num_responses: responses to each.
    """
    asked: dict[str, Any] = {"method": method, "step": step, "num_responses": num_responses}
    return [
        response
        for place, prompt in prompts
        for response in rollout_prompts(prompt.example, prompt.ids, place=place, **asked)
    ]


class PromptSampler:
    """Endless shuffled passes over prompts; a cursor says where it stands.

    Args:
        num_prompts: how many there are, at least 1.
        seed: seed of the shuffles.
    """

    def __init__(self, num_prompts: int, *, seed: int) -> None:
        if num_prompts < 1:
            raise ValueError("PromptSampler: expected at least one prompt, got none")
        self.num_prompts = num_prompts
        self.seed = seed

    def draw(self, cursor: int, count: int) -> list[int]:
        """Numbers of prompts.

        Args:
            cursor: prompts drawn so far.
            count: how many are wanted.

        Returns:
            ``count`` numbers; one pass gives each prompt once.
        """
        found = []
        for at in range(cursor, cursor + count):
            epoch, place = divmod(at, self.num_prompts)
            found.append(int(self._order(epoch)[place]))
        return found

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch, 7]).permutation(self.num_prompts)


@dataclass
class Rollouts:
    """The rollouts of one RL step, the same on all processes."""

    records: list[Trajectory]
    """All of them, ordered by prompt and response; meta holds the scores."""
    num_drawn: int
    """Prompts that were drawn for them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of this process by phase; ``wait``: for the rollouts of others."""
    occupancy: float | None = None
    """Part of the batch's places that were at work while this process decoded; ``None`` where it
    did not, like the next."""
    tokens_per_second: float | None = None
    """Response tokens of this process, without fill, per second of decoding."""

    @property
    def kept(self) -> list[Trajectory]:
        """The records of groups that the filters keep."""
        return [record for record in self.records if record.meta["kept"]]


class RolloutSource(Protocol):
    """Where the rollouts of an RL step come from."""

    def collect(
        self, step: int, cursor: int, *, version: int, ranks: Ranks, report: Report = no_report
    ) -> Rollouts:
        """The rollouts of one RL step; every process must call it.

        Args:
            step: number of the RL step.
            cursor: prompts drawn before.
            version: optimiser steps that the policy has taken.
            ranks: the processes.
            report: told how far it is.

        Returns:
            All records, those of other processes included.
        """
        ...

    def close(self) -> None:
        """Ends what runs beside."""


def _report_share(report: Report, share: int, done: int) -> None:
    """Tells of this process's share, which it may exceed."""
    report("rollout", min(done, share), share)


class OnlineRollouts(RolloutSource):
    """Rolls out prompts with the policy in training and scores them.

    Processes take responses from a shared queue as rows of their batches end. A group is scored
    where its number says, on every ``world_size``-th process, since rewards and filters look at it
    as a whole.

    Args:
        module: whose decoder rolls out.
        method: name of that decoder.
        settings: of the data module.
    """

    def __init__(self, module: TrainableModule, method: str, settings: RolloutSettings) -> None:
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
        self.prompts = encoded_prompts(
            module,
            settings.tasks,
            max_length=settings.max_prompt_length,
            response_length=settings.response_length,
        )
        self.engine = RolloutEngine.of(module, method, settings.response_length, settings)
        self.sampler = PromptSampler(len(self.prompts), seed=settings.seed)

    def close(self) -> None:
        """Ends the grading threads."""
        self.rewarder.close()

    def collect(
        self, step: int, cursor: int, *, version: int, ranks: Ranks, report: Report = no_report
    ) -> Rollouts:
        """Decodes, scores and filters; in further rounds makes up for the groups dropped."""
        found = Rollouts([], 0, dict.fromkeys(("rollout", "wait", "reward"), 0.0))
        self.engine.occupancy = Occupancy()
        num_tokens = num_kept = 0
        for _ in range(self.settings.max_rollout_rounds):
            missing = self.settings.prompts_per_step - num_kept
            first = found.num_drawn
            numbers = self.sampler.draw(cursor + first, missing)
            prompts = [(first + at, self.prompts[number]) for at, number in enumerate(numbers)]
            asked = grouped_prompts(
                prompts,
                method=self.engine.method,
                step=step,
                num_responses=self.settings.responses_per_prompt,
            )
            share = -(-len(asked) // ranks.world_size)
            begin = time.perf_counter()
            own = self.engine.records(
                asked,
                WorkQueue(len(asked), shared=ranks.world_size > 1),
                report=partial(_report_share, report, share),
            )
            decoded = time.perf_counter()
            records = in_order(gathered(own, ranks))
            waited = time.perf_counter()
            found.records += self._scored(asked, records, version, ranks)
            found.seconds["rollout"] += decoded - begin
            found.seconds["wait"] += waited - decoded
            found.seconds["reward"] += time.perf_counter() - waited
            num_tokens += sum(int(record.meta["num_tokens"]) for record in own)
            found.num_drawn += missing
            num_kept = len({record.meta["place"] for record in found.kept})
            if num_kept >= self.settings.prompts_per_step:
                break
        found.records = in_order(found.records)
        found.occupancy = self.engine.occupancy.share
        found.tokens_per_second = num_tokens / max(found.seconds["rollout"], 1e-9)
        self.engine.learn(found.records)
        return found

    def _scored(
        self,
        asked: Sequence[RolloutPrompt],
        records: Sequence[Trajectory],
        version: int,
        ranks: Ranks,
    ) -> list[Trajectory]:
        """All records of a round with their scores, every group's from one process."""
        size = self.settings.responses_per_prompt
        own = [
            [
                self.engine.rollout(prompt, record)
                for prompt, record in zip(
                    asked[at : at + size], records[at : at + size], strict=True
                )
            ]
            for at in range(ranks.rank * size, len(asked), ranks.world_size * size)
        ]
        facts: dict[str, dict[str, Any]] = {}
        for group, scores in zip(own, self.rewarder.score(own), strict=True):
            kept = all(keep.keep(scores) for keep in self.filters)
            for rollout, score in zip(group, scores, strict=True):
                facts[rollout.trajectory.uid] = score_facts(
                    rollout, score, kept=kept, version=version
                )
        for part in ranks.gather(json.dumps(facts).encode()):
            facts |= json.loads(part)
        return [record.with_meta(**facts[record.uid]) for record in records]


def gathered(records: Sequence[Trajectory], ranks: Ranks) -> list[Trajectory]:
    """The records of all processes; every process must call it.

    They travel in the format of shards: compact, checked, and without pickles.

    Args:
        records: those of this process.
        ranks: the processes.

    Returns:
        All of them, process by process.
    """
    if ranks.world_size == 1:
        return list(records)
    if len(records) > _MAX_BLOCK:
        raise ValueError(
            f"prompts_per_step: expected at most {_MAX_BLOCK} responses per process and RL step, "
            f"got {len(records)}"
        )
    block = encode_block(records, level=1) if records else b""
    blocks = ranks.gather(block)
    return [record for one in blocks if one for record in decode_block(one, strict=False)]


class StoredRollouts(RolloutSource):
    """Replays the RL steps that a former run wrote to trajectory shards.

    Args:
        folder: folder of the shards.
        mask_id: of the model.
        backbone: the model, which reads the pictures of prompts.
    """

    def __init__(
        self, folder: str | Path, *, mask_id: int, backbone: HFBackbone | None = None
    ) -> None:
        self.folder = Path(folder)
        add_picture_folders(backbone, self.folder)
        self._steps: dict[int, list[Trajectory]] = {}
        for record in TrajectoryShardReader(self.folder, features=False):
            if record.mask_id != mask_id:
                raise ValueError(
                    f"{self.folder}: record {record.uid!r} has mask id {record.mask_id}, expected "
                    f"{mask_id}, that of the model"
                )
            find_pictures(backbone, record.uid, record.meta)
            missing = [name for name in _NEEDED if name not in record.meta]
            if missing:
                raise ValueError(
                    f"{self.folder}: record {record.uid!r} has no {missing[0]!r}; expected "
                    "rollouts of RolloutDataModule, written by RolloutWriter"
                )
            self._steps.setdefault(int(record.meta["rl_step"]), []).append(record)
        if not self._steps:
            raise ValueError(f"{self.folder}: expected rollouts, got no record")
        self.steps = sorted(self._steps)

    def collect(
        self,
        step: int,
        cursor: int = 0,
        *,
        version: int = 0,
        ranks: Ranks = ALONE,
        report: Report = no_report,
    ) -> Rollouts:
        """The rollouts of an RL step; after the last one they begin again."""
        records = in_order(self._steps[self.steps[step % len(self.steps)]])
        num_drawn = len({record.meta["place"] for record in records})
        return Rollouts(records, num_drawn, {"rollout": 0.0, "reward": 0.0})

    def close(self) -> None:
        """Nothing runs beside."""


_NEEDED = ("rl_step", "place", "response", "reward", "kept")
