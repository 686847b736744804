"""Process rewards: a judge grades a response part by part (dLLM-RL, "process reward")."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lit_dlm.config.components import checked_component
from lit_dlm.rewards.base import Reward, RewardScore, Rollout
from lit_dlm.rewards.judge import Grade, Judge, StepQuestion
from lit_dlm.system.options import at_least
from lit_dlm.tasks import PromptExample
from lit_dlm.vision.pictures import picture_to_text

# Opinions requested at the same time, over all groups.
_NUM_REQUESTS = 16


class ProcessReward(Reward):
    """Rewards the parts of a response by the opinions of a judge, at the step that completes each.

    A judge grades each chunk of tokens several times as 1 or -1. If all opinions agree, this is the
    chunk's grade; else (or if one says neither) the grade is the outcome: 1 for a right response,
    -1 for a wrong one. The n-th chunks of a group have their grades standardised (population
    deviation; all 0 if that is 0, while a single grade is kept). A chunk's reward goes to the
    tokens that were written last in the block that holds the chunk's last token; the last chunk's
    goes to the tokens of the response's last step. Without blocks, as in dLLM-RL's reward for
    pictures, it goes to the tokens written last in the chunk. Rewards of one token are added up.

    Args:
        judge: forms the opinions.
        reward_chunk_length: tokens per chunk.
        k_sample: opinions per chunk.
        block_size: positions per block of the decoder, counted from the sequence's first token;
            ``None`` uses the chunks instead of blocks.
    """

    name = "process"
    needs_verdict = True
    after_filters = True

    def __init__(
        self,
        judge: Judge,
        *,
        reward_chunk_length: int = 200,
        k_sample: int = 3,
        block_size: int | None = None,
    ) -> None:
        at_least(
            1,
            of="ProcessReward.",
            reward_chunk_length=reward_chunk_length,
            k_sample=k_sample,
            block_size=block_size,
        )
        self.judge = checked_component(judge, Judge, option="judge")
        self.reward_chunk_length = reward_chunk_length
        self.k_sample = k_sample
        self.block_size = block_size

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        # All questions of the group come first: grades of a chunk are compared over responses.
        ends = [self._ends(rollout) for rollout in group]
        pictures = tuple(picture_to_text(picture.decoded()) for picture in group[0].example.images)
        asked = [(row, part) for row, own in enumerate(ends) for part in range(len(own))]
        questions = [_question(group[row], part, ends[row][part], pictures) for row, part in asked]
        grades: dict[tuple[int, int], tuple[Grade, bool]] = {}
        for (row, part), opinions in zip(asked, self._ask(questions), strict=True):
            grades[row, part] = _settle(opinions, is_correct=group[row].is_correct)
        numbers = _standardise({key: float(grade) for key, (grade, _) in grades.items()})
        scores = []
        for row, rollout in enumerate(group):
            rewards = np.zeros(rollout.trajectory.num_generated, dtype=np.float32)
            for part in range(len(ends[row])):
                first, last = self._final_positions(rollout, part, ends[row])
                rewards[_written_last(rollout, first, last)] += np.float32(numbers[row, part])
            own = [grades[row, part] for part in range(len(ends[row]))]
            value, agreement = np.mean(own, axis=0).tolist() if own else (0.0, 1.0)
            parts = {"process": value, "process_agreement": agreement}
            scores.append(RewardScore(total=0.0, token_rewards=rewards, parts=parts))
        return scores

    def _ends(self, rollout: Rollout) -> list[int]:
        """Returns where each chunk ends: the position after its last token."""
        length, chunk = rollout.num_tokens, self.reward_chunk_length
        return [min(first + chunk, length) for first in range(0, length, chunk)]

    def _ask(self, questions: Sequence[StepQuestion]) -> list[list[Grade | None]]:
        asked = product(questions, range(self.k_sample))
        # The first error ends this: questions that were not asked yet are cancelled.
        found = self._pool.map(lambda one: self.judge.grade(*one), asked)
        return [[next(found) for _ in range(self.k_sample)] for _ in questions]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_REQUESTS, thread_name_prefix="judge")

    def _final_positions(self, rollout: Rollout, part: int, ends: Sequence[int]) -> tuple[int, int]:
        """Returns the range of positions of which those that were written last are paid."""
        end, size = ends[part], self.block_size
        if size is None:
            return part * self.reward_chunk_length, end
        if part == len(ends) - 1:
            return 0, end
        # The block that holds the chunk's last token; blocks are counted from the prompt's start.
        offset = rollout.trajectory.num_prompt
        begin = (offset + end - 1) // size * size - offset
        return max(begin, 0), min(begin + size, rollout.num_tokens)


def _settle(opinions: Sequence[Grade | None], *, is_correct: bool) -> tuple[Grade, bool]:
    """Returns the common opinion, or the outcome if there is none, and whether there is one."""
    # Where the judge contradicts itself its grade is noise, and the outcome at least is right.
    first = opinions[0]
    if first is not None and all(opinion == first for opinion in opinions):
        return first, True
    return (1 if is_correct else -1), False


def _standardise(grades: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Standardises the grades of each chunk number over the responses that have such a chunk."""
    numbers: dict[tuple[int, int], float] = {}
    for part in {part for _, part in grades}:
        keys = [key for key in grades if key[1] == part]
        values = np.array([grades[key] for key in keys], dtype=np.float64)
        if len(keys) > 1:  # one alone has nothing to be compared with
            values = (values - values.mean()) / (values.std() or 1.0)
        numbers.update(zip(keys, values.tolist(), strict=True))
    return numbers


def _written_last(rollout: Rollout, first: int, last: int) -> NDArray[np.int64]:
    """Returns those of the positions ``first:last`` that were written last."""
    # The step that completes a chunk earns its reward: whatever came before led to it, and gets its
    # share when rewards are carried back along the steps.
    steps = rollout.trajectory.commit_step[first:last]
    return first + np.flatnonzero((steps >= 0) & (steps == steps.max(initial=-1)))


def _question(rollout: Rollout, part: int, end: int, pictures: tuple[str, ...]) -> StepQuestion:
    start = rollout.example.answer_start
    return StepQuestion(
        uid=rollout.trajectory.uid,
        part=part,
        problem=rollout.example.question,
        pictures=pictures,
        truth=true_answer(rollout.example),
        is_correct=rollout.is_correct,
        response=start + rollout.text,
        shown=start + rollout.decode(rollout.trajectory.tokens[:end].tolist()),
    )


def true_answer(example: PromptExample) -> str:
    """Returns the ``answer`` of a reference, else its ``solution``, else an empty text."""
    given = (example.reference.get(key) for key in ("answer", "solution"))
    return next((str(value) for value in given if value not in (None, "")), "")
