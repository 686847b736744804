"""Whole programs: finding them, and comparing what they print."""

from __future__ import annotations

import pytest

from lit_dlm.grading import SandboxLimits
from lit_dlm.grading.code import extract_program, grade_by_outputs

ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        (ADD, "a, b = map(int, input().split())\nprint(a + b)\n"),
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```\nor\n```\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\n```python\nprint(2\n```", "print(1)\n"),
        ("```bash\nls\n```\n```python\nprint(1)", "print(1)"),
    ],
)
def test_the_last_block_that_compiles_is_the_program(completion: str, code: str) -> None:
    found = extract_program(completion)
    assert (found.code, found.problem) == (code, "")


def test_what_is_no_program_is_told_apart() -> None:
    assert extract_program(" \n").problem == "the completion holds no code"
    assert (
        extract_program("```python\n\n```").code == "```python\n\n```"
    )  # the text is all there is
    found = extract_program("```python\nprint(\n```")
    assert found.is_syntax_error
    assert found.code == "print(\n"


@pytest.mark.parametrize(("inputs", "outputs"), [([], []), (["1"], []), (["1"], ["1", "2"])])
def test_tests_must_be_pairs(inputs: list[str], outputs: list[str]) -> None:
    with pytest.raises(ValueError, match="as many outputs as inputs, and at least one"):
        grade_by_outputs(ADD, inputs, outputs, allow_code_execution=True)


@pytest.mark.slow
def test_outputs_are_compared_word_by_word_and_the_share_is_kept() -> None:
    """Three of four inputs give the expected words; white space does not matter."""
    inputs, outputs = ["1 2", "3 4", "5 5", "0 0"], ["3", " 7\n\n", "11", "0\n"]
    verdict = grade_by_outputs(ADD, inputs, outputs, allow_code_execution=True)
    assert (verdict.status, verdict.score) == ("wrong", 0.75)
    assert verdict.detail == "test 3 of 4: another output was expected"
    right = grade_by_outputs(ADD, inputs[:2], outputs[:2], allow_code_execution=True)
    assert (right.status, right.score, right.detail) == ("right", 1.0, "")


@pytest.mark.slow
def test_a_program_that_hangs_twice_is_not_started_again() -> None:
    """Hangs on inputs 1 and 2 of four, so 3 and 4, which it could answer, are not run."""
    code = "n = int(input())\nwhile n < 3: pass\nprint(n)"
    limits = SandboxLimits(wall_seconds=0.3, cpu_seconds=1.0)
    numbers = ["1", "2", "3", "4"]
    verdict = grade_by_outputs(code, numbers, numbers, limits=limits, allow_code_execution=True)
    assert (verdict.status, verdict.score) == ("timeout", 0.0)
    assert verdict.detail.startswith("test 1 of 4: ")
