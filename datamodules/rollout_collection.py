"""Where the rollouts of an RL step come from: the policy in training, or shards of a former run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Trainer

from lit_dlm.modules.decode import DecodeModule
from lit_dlm.modules.rollouts import (
    RolloutEngine,
    RolloutPrompt,
    in_order,
    rollout_prompts,
    with_score,
)
from lit_dlm.rewards import GroupFilter, Rewarder, Rollout
from lit_dlm.tasks import PromptExample, Task
from lit_dlm.trajectories.format import decode_block, encode_block
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import TrajectoryShardReader

logger = logging.getLogger(__name__)

_MAX_BLOCK = 60_000


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A problem with its token ids."""

    example: PromptExample
    ids: list[int]


def encoded_prompts(
    module: DecodeModule, tasks: Sequence[Task], *, max_length: int
) -> list[EncodedPrompt]:
    """The problems of some tasks as the model is given them.

    Args:
        module: whose tokenizer and chat template are used.
        tasks: in their order.
        max_length: prompts with more tokens are left out, with a warning.

    Raises:
        ValueError: no prompt is short enough, or two problems have one uid.
    """
    found, dropped = [], 0
    owners: dict[str, Task] = {}
    for task in tasks:
        for example in task.examples():
            if example.uid in owners:
                raise ValueError(
                    f"tasks: expected every uid once, got {example.uid!r} of "
                    f"{owners[example.uid].name!r} and of {task.name!r}"
                )
            owners[example.uid] = task
            ids = module.encode(example)
            if len(ids) > max_length:
                dropped += 1
                continue
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
    return found


def responses_of(
    prompts: Iterable[tuple[int, EncodedPrompt]], *, method: str, step: int, num_responses: int
) -> list[RolloutPrompt]:
    """The responses that are asked for in one RL step, group by group.

    Args:
        prompts: problems with their place in the RL step.
        method: decoder to use.
        step: number of the RL step.
        num_responses: responses to each.
    """
    return [
        response
        for place, prompt in prompts
        for response in rollout_prompts(
            prompt.example,
            prompt.ids,
            method=method,
            step=step,
            place=place,
            num_responses=num_responses,
        )
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
class Collected:
    """The rollouts of one RL step, the same on all processes."""

    records: list[Trajectory]
    """All of them, ordered by prompt and response; meta holds the scores."""
    num_drawn: int
    """Prompts that were drawn for them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of this process by phase."""

    @property
    def kept(self) -> list[Trajectory]:
        """The records of groups that the filters keep."""
        return [record for record in self.records if record.meta["kept"]]


Progress = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done and how much there is."""


class OnlineCollector:
    """Rolls out prompts with the policy in training and scores them.

    Processes take every ``world_size``-th prompt with all of its responses.

    Args:
        engine: what decodes.
        rewarder: what scores.
        prompts: all training prompts.
        filters: groups that one of them drops are not trained on.
        num_prompts: prompts of an RL step.
        num_responses: responses to each.
        max_rounds: rounds of rollouts; after the first one, as many new prompts are drawn as groups
            were dropped.
        seed: seed of the order of prompts.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        rewarder: Rewarder,
        prompts: Sequence[EncodedPrompt],
        *,
        filters: Sequence[GroupFilter],
        num_prompts: int,
        num_responses: int,
        max_rounds: int,
        seed: int,
    ) -> None:
        self.engine = engine
        self.rewarder = rewarder
        self.prompts = prompts
        self.filters = tuple(filters)
        self.num_prompts = num_prompts
        self.num_responses = num_responses
        self.max_rounds = max_rounds
        self.sampler = PromptSampler(len(prompts), seed=seed)

    def collect(
        self, step: int, cursor: int, trainer: Trainer | None, *, version: int, progress: Progress
    ) -> Collected:
        """The rollouts of one RL step; every process must call it.

        Args:
            step: number of the RL step.
            cursor: prompts drawn before.
            trainer: the running trainer; ``None`` for one process alone.
            version: optimiser steps that the policy has taken.
            progress: told how far it is.

        Returns:
            All records, those of other processes included.
        """
        rank = 0 if trainer is None else trainer.global_rank
        world_size = 1 if trainer is None else trainer.world_size
        found = Collected([], 0, {"rollout": 0.0, "reward": 0.0})
        num_kept = 0
        for _ in range(self.max_rounds):
            missing = self.num_prompts - num_kept
            first = found.num_drawn
            numbers = self.sampler.draw(cursor + first, missing)
            mine = [
                (first + place, self.prompts[number])
                for place, number in enumerate(numbers)
                if place % world_size == rank
            ]
            records = self._round(step, mine, found.seconds, version, progress)
            found.records += gathered(records, trainer)
            found.num_drawn += missing
            num_kept = len({record.meta["place"] for record in found.kept})
            if num_kept >= self.num_prompts:
                break
        found.records = in_order(found.records)
        return found

    def _round(
        self,
        step: int,
        prompts: Sequence[tuple[int, EncodedPrompt]],
        seconds: dict[str, float],
        version: int,
        progress: Progress,
    ) -> list[Trajectory]:
        """Rollouts of this process, scored."""
        asked = responses_of(
            prompts, method=self.engine.method, step=step, num_responses=self.num_responses
        )
        begin = time.perf_counter()
        rollouts = self.engine.generate(
            asked, report=lambda done: progress("rollout", done, len(asked))
        )
        middle = time.perf_counter()
        groups = [
            rollouts[at : at + self.num_responses]
            for at in range(0, len(rollouts), self.num_responses)
        ]
        records = self._scored(groups, version)
        seconds["rollout"] += middle - begin
        seconds["reward"] += time.perf_counter() - middle
        return records

    def _scored(self, groups: list[list[Rollout]], version: int) -> list[Trajectory]:
        records = []
        for group, scores in zip(groups, self.rewarder.score(groups), strict=True):
            kept = all(keep.keep(scores) for keep in self.filters)
            for rollout, score in zip(group, scores, strict=True):
                records.append(with_score(rollout, score, kept=kept, version=version))
        return records


def gathered(records: Sequence[Trajectory], trainer: Trainer | None) -> list[Trajectory]:
    """The records of all processes; every process must call it.

    They travel in the format of shards: compact, checked, and without pickles.

    Args:
        records: those of this process.
        trainer: the running trainer; ``None`` for one process alone.

    Returns:
        All of them, process by process.
    """
    if trainer is None or trainer.world_size == 1:
        return list(records)
    device = trainer.strategy.root_device
    blocks = [
        encode_block(records[at : at + _MAX_BLOCK], level=1)
        for at in range(0, len(records), _MAX_BLOCK)
    ]
    sizes = torch.tensor([len(block) for block in blocks] or [0], device=device)
    if len(blocks) > 1:
        raise ValueError(
            f"prompts_per_step: expected at most {_MAX_BLOCK} responses per process and RL step, "
            f"got {len(records)}"
        )
    every = [torch.zeros_like(sizes) for _ in range(trainer.world_size)]
    torch.distributed.all_gather(every, sizes)
    lengths = [int(size) for size in every]
    own = torch.zeros(max(max(lengths), 1), dtype=torch.uint8, device=device)
    if blocks:
        own[: len(blocks[0])] = torch.frombuffer(bytearray(blocks[0]), dtype=torch.uint8).to(device)
    buffers = [torch.empty_like(own) for _ in lengths]
    torch.distributed.all_gather(buffers, own)
    found: list[Trajectory] = []
    for buffer, length in zip(buffers, lengths, strict=True):
        if length:
            found += decode_block(buffer[:length].cpu().numpy().tobytes(), strict=False)
    return found


class ShardCollector:
    """Replays the RL steps that a former run wrote to trajectory shards.

    Args:
        folder: folder of the shards.
        mask_id: of the model.

    Raises:
        ValueError: there is none, or a record was not written by an RL run or by another model.
    """

    def __init__(self, folder: str | Path, *, mask_id: int) -> None:
        self.folder = Path(folder)
        self._steps: dict[int, list[Trajectory]] = {}
        for record in self._records():
            if record.mask_id != mask_id:
                raise ValueError(
                    f"{self.folder}: record {record.uid!r} has mask id {record.mask_id}, expected "
                    f"{mask_id}, that of the model"
                )
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

    def _records(self) -> Iterator[Trajectory]:
        yield from TrajectoryShardReader(self.folder, features=False)

    def collect(self, step: int) -> Collected:
        """The rollouts of an RL step; after the last one they begin again.

        Args:
            step: number of the RL step, from 0.
        """
        records = in_order(self._steps[self.steps[step % len(self.steps)]])
        num_drawn = len({record.meta["place"] for record in records})
        return Collected(records, num_drawn, {"rollout": 0.0, "reward": 0.0})


_NEEDED = ("rl_step", "place", "response", "reward", "kept")
