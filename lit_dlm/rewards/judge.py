"""Judges that grade a response part by part, and are asked several times about each part."""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from lit_dlm.config.components import Component
from lit_dlm.grading.answers import last_boxed
from lit_dlm.rewards.chat import ChatEndpoint, UnavailableError

logger = logging.getLogger(__name__)

Grade = Literal[1, -1]

# As in dLLM-RL; the longest reply includes the judge's thinking.
_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 10_000}

_INSTRUCTION = (
    "You check the working of a solution to a problem, part by part. You are given the problem, "
    "its true answer, the whole solution, whether the solution's final answer is right, and the "
    "solution up to the part that you check now. Decide whether the last part of that excerpt is "
    "sound and brings the solution closer to the true answer. Errors in earlier parts that this "
    "part neither repeats nor builds on do not count against it. End your reply with \\boxed{1} if "
    "the part is good and with \\boxed{-1} if it is not."
)


@dataclass(frozen=True, kw_only=True)
class StepQuestion:
    """One part of a response, to be judged."""

    uid: str
    part: int  # number of the part within the response, from 0
    problem: str
    pictures: tuple[str, ...] = ()  # ``data:`` URLs of PNG files
    truth: str  # the true answer or a reference solution; empty if there is none
    is_correct: bool  # the final answer is right
    response: str
    shown: str  # the response up to the end of the part


class Judge(Component):
    """Judges whether a part of a response is good; called from several threads."""

    @abstractmethod
    def grade(self, question: StepQuestion, sample: int) -> Grade | None:
        """Returns 1 or -1, or ``None`` if the reply says neither.

        Opinions with different ``sample`` numbers are independent; the same number gives the same.
        """


class HttpStepJudge(Judge):
    """A reasoning model behind an HTTP endpoint as the judge (dLLM-RL, section "process reward").

    It judges the last part alone; the release's question also counts errors in earlier parts.

    Args:
        timeout_s: seconds to wait for one reply.
        deadline_s: seconds for which requests are retried while the endpoint does not answer; keep
            it below the timeout of the process group (30 minutes by default), whose members wait.
        on_silence: what happens at the deadline: ``error`` ends the run, ``outcome`` returns no
            opinion, so that the outcome counts instead, and logs a warning.
        endpoint: further options of :class:`~lit_dlm.rewards.chat.ChatEndpoint`.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 600.0,
        deadline_s: float = 900.0,
        on_silence: Literal["error", "outcome"] = "error",
        **endpoint: Any,
    ) -> None:
        self.endpoint = ChatEndpoint(timeout_s=timeout_s, deadline_s=deadline_s, **endpoint)
        self.on_silence = on_silence

    def grade(self, question: StepQuestion, sample: int) -> Grade | None:
        # Each request has its own seed, so that servers that honour seeds repeat their replies.
        key = f"0/{question.uid}/{question.part}/{sample}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:4], "little") >> 1
        asked = write_question(question)
        try:
            reply = self.endpoint.ask(_INSTRUCTION, asked, **_SAMPLING, seed=seed)
        except ValueError as error:
            if isinstance(error, UnavailableError) and self.on_silence == "outcome":
                logger.warning("%s: %s; its outcome counts instead", question.uid, error)
                return None
            raise ValueError(f"{question.uid}: {error}") from error
        # A reply without a grade is no opinion, and its seed would give the same one again.
        return read_grade(reply)


def write_question(question: StepQuestion) -> str | list[dict[str, Any]]:
    """Writes the user turn for a judge: a text, after its pictures where there are any."""
    outcome = "right" if question.is_correct else "wrong"
    text = (
        f"Problem:\n{question.problem}\n\nTrue answer:\n{question.truth or 'not known'}\n\n"
        f"Whole solution (its final answer is {outcome}):\n{question.response}\n\n"
        f"Solution up to the end of the part to check:\n{question.shown}"
    )
    if not question.pictures:
        return text
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in question.pictures]
    return [*shown, {"type": "text", "text": text}]


def read_grade(reply: str) -> Grade | None:
    r"""Reads the last ``\boxed{1}`` or ``\boxed{-1}``; anything else is ``None``."""
    boxed = (last_boxed(reply) or "").replace(" ", "").replace("\N{MINUS SIGN}", "-")
    grades: dict[str, Grade] = {"1": 1, "+1": 1, "-1": -1}
    return grades.get(boxed)
