"""The result type of all graders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lit_dlm.system.options import one_of

Status = Literal[
    "right", "wrong", "no_answer", "syntax_error", "runtime_error", "timeout", "ungraded"
]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A grader's judgement of one completion."""

    status: Status  # right is the only status that counts as correct; ungraded was not graded
    answer: str | None = None
    detail: str = ""  # one line: the failing assertion, the exception, the limit that was hit
    score: float | None = None  # partial credit in 0..1; None means 1 if right else 0

    def __post_init__(self) -> None:
        one_of(*get_args(Status), of="Verdict.", status=self.status)
        # What a candidate raised or returned may hold halves of surrogate pairs, unlike UTF-8.
        for name in ("answer", "detail"):
            text = getattr(self, name)
            if text is not None:
                object.__setattr__(self, name, text.encode("utf-8", "replace").decode())

    @property
    def is_correct(self) -> bool:
        return self.status == "right"
