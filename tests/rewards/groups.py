"""Rollouts made by hand."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_dlm.grading import SandboxError, Verdict
from lit_dlm.rewards import Rollout
from lit_dlm.rewards.judge import Grade, Judge, StepQuestion
from lit_dlm.tasks import PromptExample
from lit_dlm.trajectories.record import Trajectory

SUM = PromptExample(uid="sums/train/0", task="sums", text="3+4?", reference={"answer": "7"})


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def rollout(
    text: str = "",
    *,
    example: PromptExample = SUM,
    number: int = 0,
    steps: Sequence[int] = (0, 1, 2),
    num_prompt: int = 2,
    **fields: Any,
) -> Rollout:
    """One response; token ``i`` of it has the id ``i``, and ``steps`` says which step wrote it."""
    trajectory = Trajectory(
        uid=f"{example.uid}#{number}",
        prompt_ids=np.zeros(num_prompt, dtype=np.int32),
        tokens=np.arange(len(steps), dtype=np.int32),
        commit_step=np.array(steps, dtype=np.int32),
        num_steps=max(steps, default=-1) + 1,
        mask_id=999,
        vocab_size=999,
    )
    fields = {"is_overlong": False, "num_tokens": len(steps), "decode": decode, **fields}
    return Rollout(trajectory=trajectory, example=example, text=text, **fields)


def right(**fields: Any) -> Rollout:
    return rollout("7", verdict=Verdict(status="right", answer="7"), **fields)


def wrong(**fields: Any) -> Rollout:
    return rollout("8", verdict=Verdict(status="wrong", answer="8"), **fields)


class Sums:
    name, split = "sums", "train"
    runs_code, is_graded = False, True

    def __init__(self, **changes: bool) -> None:
        self.graded: list[str] = []
        self.threads: set[str] = set()
        vars(self).update(changes)

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        self.graded.append(completion)
        self.threads.add(threading.current_thread().name)
        if completion == "broken":
            raise ValueError("the reference holds no number")
        if completion == "no sandbox":
            raise SandboxError("no process can be started")
        is_right = completion == example.reference["answer"]
        return Verdict(status="right" if is_right else "wrong", answer=completion)


class Table(Judge):
    """Opinions by (sample number, part); agreeing 1 where the table says nothing."""

    def __init__(self, **opinions: list[Grade | None]) -> None:
        self.opinions = opinions
        self.questions: list[StepQuestion] = []

    def grade(self, question: StepQuestion, sample: int) -> Grade | None:
        self.questions.append(question)
        key = f"r{question.uid.rpartition('#')[2]}p{question.part}"
        return self.opinions.get(key, [1, 1, 1])[sample]
