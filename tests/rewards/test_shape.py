"""Format and length."""

from __future__ import annotations

import pytest

from lit_dlm.rewards import FormatReward, LengthPenalty
from lit_dlm.tasks import PromptExample
from tests.rewards.groups import rollout

FUNCTION = PromptExample(uid="c/0", task="c", text="", reference={"entry_point": "f"})
PROGRAM = PromptExample(uid="c/1", task="c", text="", reference={"test_method": "stdio"})
GOOD = "So:\n```python\ndef f(x):\n    return x\n```"


@pytest.mark.parametrize(
    ("requires", "example", "text", "holds"),
    [
        ("boxed", FUNCTION, r"so \boxed{7}", True),
        ("boxed", FUNCTION, r"so \boxed{}", False),
        ("boxed", FUNCTION, r"so \boxed{7", False),
        ("marked", FUNCTION, "so\n#### 7", True),
        ("marked", FUNCTION, "so\n####", False),
        ("fenced", FUNCTION, GOOD, True),
        ("fenced", FUNCTION, "```python\n```", False),
        ("fenced", FUNCTION, "```bash\nls\n```", False),
        ("parses", FUNCTION, GOOD, True),
        ("parses", FUNCTION, "```python\ndef f(x: return\n```", False),
        ("parses", FUNCTION, "", False),
        ("entry_point", FUNCTION, GOOD, True),
        ("entry_point", FUNCTION, GOOD.replace("def f", "def g"), False),
        ("entry_point", PROGRAM, "```python\nprint(1)\n```", True),
        ("entry_point", PROGRAM, "```python\nprint(1\n```", False),
    ],
)
def test_form(requires: str, example: PromptExample, text: str, holds: bool) -> None:
    (score,) = FormatReward(requires).score([rollout(text, example=example)])  # type: ignore[arg-type]
    assert score.total == float(holds)


def test_a_prefix_that_the_problem_gives_counts_as_the_beginning_of_the_code() -> None:
    example = PromptExample(
        uid="c/2", task="c", text="", reference={"entry_point": "f", "stub": "def f(x):\n"}
    )
    group = [rollout("    return x", example=example)]
    assert FormatReward("entry_point").score(group)[0].total == 1


def test_long_responses_pay_linearly() -> None:
    """Free to 4, full price from 8 on: 5 costs 1/4, 6 a half."""
    group = [rollout(steps=range(10), length=n) for n in (0, 4, 5, 6, 8)]
    group.append(rollout(steps=range(10)))
    scores = LengthPenalty(free=4, limit=8).score(group)
    assert [score.total for score in scores] == [0, 0, -0.25, -0.5, -1, -1]


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="requires must be one of boxed, marked"):
        FormatReward("pretty")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 0 <= free < limit, got free 8, limit 8"):
        LengthPenalty(free=8, limit=8)
