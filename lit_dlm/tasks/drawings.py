"""Prompts that ask for a picture, which a scorer judges."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lit_dlm.config.components import Component
from lit_dlm.grading.verdict import Status, Verdict
from lit_dlm.tasks.base import PromptExample
from lit_dlm.tasks.prompts_file import PromptsFile
from lit_dlm.vision.pictures import Picture, picture_from_text


class PictureScorer(Component):
    """Judges drawn pictures; given by class path."""

    @abstractmethod
    def score(self, picture: Picture, example: PromptExample) -> float:
        """Returns how well a picture fits its prompt, 0 to 1."""


class DrawingPrompts(PromptsFile):
    """Your own prompts that ask for pictures; the accuracy is the pictures' mean score.

    Args:
        path: see :class:`~lit_dlm.tasks.prompts_file.PromptsFile`.
        scorer: judges the pictures. ``Graded`` with ``credit: fraction`` uses the score as a
            reward.
    """

    name = "drawings"

    def __init__(self, path: str, *, scorer: PictureScorer, **options: Any) -> None:
        self.scorer = scorer
        super().__init__(path, **options)
        # Behind it, as the base has no grading of texts to say so.
        self.is_graded = self.is_soft = True

    def extract(self, example: PromptExample, completion: str) -> str | None:
        picture = picture_from_text(completion)
        return None if picture is None else f"{self.scorer.score(picture, example):.4f}"

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        answer = self.extract(example, completion)
        # A score of 0, not none: the mean counts texts in place of pictures.
        if answer is None:
            return Verdict(status="no_answer", detail="the response is no picture", score=0.0)
        status: Status = "right" if float(answer) >= 0.5 else "wrong"
        return Verdict(status=status, answer=answer, score=float(answer))
