"""Finding code in completions, and grading it: functions by tests, programs by what they print."""

from __future__ import annotations

import time

import pytest

from lit_dlm.grading import SandboxLimits
from lit_dlm.grading.child.extraction import fenced_blocks
from lit_dlm.grading.code import extract_code, extract_program, grade_by_outputs, grade_by_tests

STUB = 'import math\n\ndef helper(x):\n    return x\n\ndef f(x):\n    """Squares x."""\n'


def _runs(completion: str, stub: str = STUB) -> object:
    found = extract_code(completion, "f", stub=stub)
    assert not found.problem, found
    namespace: dict = {}
    exec(found.code, namespace)
    return namespace["f"](3)


@pytest.mark.parametrize("tag", ["python", "py", "Python", "python3", ""])
def test_every_python_tag_counts_and_never_becomes_code(tag):
    assert _runs(f"Sure:\n```{tag}\ndef f(x):\n    return x * x\n```\nDone.") == 9


@pytest.mark.parametrize(
    "completion",
    [
        "    return x * x\n",
        "    return x * x",
        "\n    return x * x\n\nprint('example', f(2))\n",
        "return x * x",
        "y = x\nreturn y * x",
        "y = x\n    return y * x",
        "```python\n    return x * x\n```",
        "def f(x):\n    return helper(x) * x\n\nThis squares x.",
        "```python\ndef f(x):\n    return x * x",
        "~~~\ndef f(x):\n    return x * x\n~~~",
        "First try:\n```python\ndef f(x):\n    return 0\n```\nBetter:\n```py\ndef f(x):\n"
        "    return x * x\n```",
        "```python\ndef f(x):\n    return x * x\n```\nUse it:\n```python\nprint(f(2))\n```",
        "```python\ndef f(x):\n    return x * x\n```\n```bash\npython f.py\n```",
        "  ```python\n  def f(x):\n      return int(math.pow(x, 2))\n  ```",
        "f = lambda x: x * x",
        "    return x * x\nEnjoy! It's done.\nBye.",
    ],
)
def test_code_is_found_however_it_is_written(completion):
    assert _runs(completion) == 9


def test_blocks_of_other_languages_are_left_out():
    text = "```js\nx\n```\n```\na\n```\n```python\nb\n```"
    assert fenced_blocks(text) == ["a\n", "b\n"]


def test_missing_entry_point_and_syntax_errors_are_told_apart():
    found = extract_code("def g(x):\n    return x", "f")
    assert (found.problem, found.is_syntax_error) == ("no function 'f' is defined", False)
    found = extract_code("def f(x) return", "f")
    assert (found.problem, found.is_syntax_error) == ("the code does not parse", True)
    found = extract_code("  \n", "f", stub=STUB)
    assert (found.code, found.problem) == (None, "the completion holds no code")
    found = extract_code("I cannot do that.", "f", stub=STUB)
    assert found.is_syntax_error


METHOD = "import math\n\n\nclass Adder:\n    def add(self, a, b):\n        "


@pytest.mark.parametrize(
    ("stub", "check", "completion"),
    [
        ("def add(a, b):\n", "assert add(1, 2) == 3", "```\nreturn a + b\n```"),
        ("def add(a, b):\n", "assert add(1, 2) == 3", "    return a + b"),
        ("def add(a, b):", "assert add(1, 2) == 3", "def add(a, b):\n    return a + b"),
        ("import math\ndef add(a, b):\n", "assert add(1, 2) == 3", "return math.fsum([a, b])"),
        (METHOD, "assert Adder().add(1, 2) == 3", "return math.fsum([a, b])"),
        (METHOD, "assert Adder().add(1, 2) == 3", "    c = a\n    return c + b"),
    ],
)
def test_a_stub_may_end_within_a_definition(stub, check, completion):
    entry_point = check.split("(")[0].split()[-1]
    verdict = grade_by_tests(completion, check, entry_point, stub=stub, allow_code_execution=True)
    assert verdict.status == "right", verdict.detail


def test_the_stub_alone_is_no_answer():
    """The stub defines ``f``; prose after it must not inherit that."""
    for completion in ("print('hello')", "x = 3", "def g(): pass"):
        found = extract_code(completion, "f", stub=STUB)
        if not found.problem:
            namespace: dict = {}
            exec(found.code, namespace)
            assert namespace["f"](3) is None


def test_extraction_stays_fast_on_long_nonsense():
    started = time.perf_counter()
    extract_code("def f(x):\n    return x\n" + "word word\n" * 2000, "f", stub=STUB)
    extract_code("```python\n" * 5000, "f", stub=STUB)
    assert time.perf_counter() - started < 5


def test_grades_say_what_happened():
    def grade(completion: str) -> str:
        return grade_by_tests(
            completion, "assert f(3) == 9", "f", stub=STUB, allow_code_execution=True
        ).status

    assert grade("```\ndef f(x):\n    return x * x\n```") == "right"
    assert grade("    pass\n") == "wrong"
    assert grade("    return undefined\n") == "runtime_error"
    assert grade("def f(x): return (") == "syntax_error"
    assert grade("") == "no_answer"


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
