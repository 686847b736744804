"""Finding code in completions, and grading it: functions by tests, programs by what they print."""

import pytest

from lit_dlm.grading import SandboxLimits
from lit_dlm.grading.child.extraction import fenced_blocks
from lit_dlm.grading.code import extract_code, grade_by_outputs
from tests.grading.hostile import grade_by_tests

STUB = 'import math\n\ndef helper(x):\n    return x\n\ndef f(x):\n    """Squares x."""\n'


def _runs(completion: str) -> object:
    found = extract_code(completion, "f", stub=STUB)
    assert not found.reason, found
    namespace: dict = {}
    exec(found.code, namespace)
    return namespace["f"](3)


SQUARE = "def f(x):\n    return x * x"
DOCUMENTED = 'def f(x):\n  """Squares.\n\n  ```{}\n  f(2)\n  ```\n  """\n  return x * x'
USES_TWICE = "def f(x):\n    return twice(x) * x // 2"
TWICE = "import math\n\ndef twice(x):\n    return math.floor(2 * x)"
TWICE_TWO = "def twice(x):\n    return two() * x"
TWO = "def two():\n    return 2"


@pytest.mark.parametrize(
    "completion",
    [
        *(
            f"Sure:\n```{tag}\n{SQUARE}\n```\nDone."
            for tag in ("python", "py", "Python", "python3", "")
        ),
        "    return x * x\n",
        "    return x * x",
        "\n    return x * x\n\nprint('example', f(2))\n",
        "return x * x",
        "y = x\nreturn y * x",
        "y = x\n    return y * x",
        "```python\n    return x * x\n```",
        "def f(x):\n    return helper(x) * x\n\nThis squares x.",
        f"```python\n{SQUARE}",
        f"~~~\n{SQUARE}\n~~~",
        f"First try:\n```python\ndef f(x):\n    return 0\n```\nBetter:\n```py\n{SQUARE}\n```",
        f"```python\n{SQUARE}\n```\nUse it:\n```python\nprint(f(2))\n```",
        f"```python\n{SQUARE}\n```\n```bash\npython f.py\n```",
        "  ```python\n  def f(x):\n      return int(math.pow(x, 2))\n  ```",
        "f = lambda x: x * x",
        "    return x * x\nEnjoy! It's done.\nBye.",
        f"```python\nfrom __future__ import annotations\n{SQUARE}\n```",
        f"{SQUARE}\n\nExample:\n```\n>>> f(3)\n9\n```",
        "    return x * x\n```\nThis squares x.",
        "    return x * x\n\nExample:\n```python\nprint(f(2))\n```",
        # Prose in front of code without fences.
        f"Here is the function:\n\n{SQUARE}",
        f"First import it:\n\nimport math\n\n{SQUARE}\n\nThis squares x.",
        "The answer:\n@staticmethod\ndef f(x):\n    return x * x",
        # Fences in a docstring, also of a language.
        f"```python\n{DOCUMENTED.format('')}\n```\nDone.",
        f"```python\n{DOCUMENTED.format('python')}\n```\nIt prints\n```\n9\n```",
        f"~~~\n{DOCUMENTED.format('python')}\n~~~",
        "```python\n    return x * x\n    ```\nDone.",  # where a docstring's would be
        # Marks of other prompts.
        f"[PYTHON]\n{SQUARE}\n[/PYTHON]\nThis squares x.",
        f"[BEGIN]\n{SQUARE}\n[DONE]\nThis squares x.",
        f"{SQUARE}\n[DONE]\n\nWrite another.\n[BEGIN]\ndef g(x):\n    return 0\n[DONE]",
        f"Sure.\n[PYTHON]\n{SQUARE}",
        # A helper in another block, and its helper.
        f"```python\n{TWICE}\n```\nand\n```python\n{USES_TWICE}\n```",
        f"```python\n{USES_TWICE}\n```\nwhere\n```python\n{TWICE}\n```",
        f"```python\n{TWO}\n```\n```python\n{TWICE_TWO}\n```\n```python\n{USES_TWICE}\n```",
        f"```python\n{USES_TWICE}\n```\n```python\n{TWICE_TWO}\n```\n```python\n{TWO}\n```",
        "```python\nclass Twice:\n    n = 2\n```\n```python\ndef f(x):\n"
        "    return Twice().n * x * x // 2\n```",
        # What another block does, or defines once more, does not count.
        f"```python\n{SQUARE}\n```\nTest:\n```python\ndef check():\n    1 / 0\ncheck()\n```",
        "```python\ndef g(x):\n    return 0\n```\n```python\ndef g(x):\n    return x\n\n"
        "def f(x):\n    return g(x) * x\n```",
    ],
)
def test_code_is_found_however_it_is_written(completion):
    assert _runs(completion) == 9


def test_blocks_of_other_languages_are_left_out():
    text = "```js\nx\n```\n```\na\n```\n```python\nb\n```"
    assert fenced_blocks(text) == ["a\n", "b\n"]


ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
DOC = 'def g():\n    """Prints.\n\n    ```python\n    g()\n    ```\n    """\n    print(1)\ng()'
NOTHING, BROKEN = "the completion holds no code", "the code does not parse"


@pytest.mark.parametrize(
    ("completion", "entry_point", "code", "reason"),
    [
        (ADD, None, "a, b = map(int, input().split())\nprint(a + b)\n", ""),
        ("print(1)", None, "print(1)", ""),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", None, "print(1)\n", ""),
        ("```\nprint(1)\n```\nor\n```\nprint(2)\n```", None, "print(2)\n", ""),
        ("So: ```python\nprint(1)```", None, "print(1)", ""),
        ("- So:\n  ```python\n  n = 1\n  print(n)\n  ```", None, "n = 1\nprint(n)\n", ""),
        ("```python\nprint(1)\n```\n```python\nprint(2\n```", None, "print(1)\n", ""),
        ("```bash\nls\n```\n```python\nprint(1)", None, "print(1)", ""),
        (
            "It reads a number:\n\nn = int(input())\nprint(n)",
            None,
            "n = int(input())\nprint(n)",
            "",
        ),
        ("[PYTHON]\nprint(1)\n[/PYTHON]\nDone.", None, "print(1)\n", ""),
        (f"```python\n{DOC}\n```", None, f"{DOC}\n", ""),
        (
            "```python\ndef g(): pass\n```\n```python\ng()\n```",
            None,
            "def g(): pass\n\n\ng()\n",
            "",
        ),
        ("I cannot do that:\nimport os ...", None, "I cannot do that:\nimport os ...", BROKEN),
        (" \n", None, None, NOTHING),
        ("```python\n\n```", None, "```python\n\n```", BROKEN),  # the text is all there is
        ("```python\nprint(\n```", None, "print(\n", BROKEN),
        ("def g(x):\n    return x", "f", "def g(x):\n    return x", "no function 'f' is defined"),
        ("def f(x) return", "f", "def f(x) return", BROKEN),
        ("I cannot do that.", "f", "I cannot do that.", BROKEN),
        ("  \n", "f", None, NOTHING),
    ],
)
def test_the_last_block_that_compiles_is_the_code_or_the_reason_is_given(
    completion: str, entry_point: str | None, code: str | None, reason: str
) -> None:
    found = extract_code(completion, entry_point)
    assert (found.code, found.reason) == (code, reason)
    assert found.is_syntax_error is (reason == BROKEN)


METHOD = "import math\n\n\nclass Adder:\n    def add(self, a, b):\n        "
ADDS, ADDER = "assert add(1, 2) == 3", "assert Adder().add(1, 2) == 3"


def test_a_program_may_print_as_much_as_is_expected():
    program = "for _ in range(100_000):\n    print(123456789012)"
    expected = "123456789012\n" * 100_000
    verdict = grade_by_outputs(program, [""], [expected], allow_code_execution=True)
    assert verdict.is_correct


@pytest.mark.parametrize(
    ("stub", "check", "completion", "status"),
    [
        (STUB, "assert f(3) == 9", f"```\n{SQUARE}\n```", "right"),
        (STUB, "assert f(3) == 9", "    pass\n", "wrong"),
        (STUB, "assert f(3) == 9", "    return undefined\n", "runtime_error"),
        (STUB, "assert f(3) == 9", "def f(x): return (", "syntax_error"),
        (STUB, "assert f(3) == 9", "", "no_answer"),
        # A stub may end within a definition.
        ("def add(a, b):\n", ADDS, "```\nreturn a + b\n```", "right"),
        ("def add(a, b):\n", ADDS, "    return a + b", "right"),
        ("def add(a, b):", ADDS, "def add(a, b):\n    return a + b", "right"),
        ("import math\ndef add(a, b):\n", ADDS, "return math.fsum([a, b])", "right"),
        (METHOD, ADDER, "return math.fsum([a, b])", "right"),
        (METHOD, ADDER, "    c = a\n    return c + b", "right"),
    ],
)
def test_grades_by_tests_and_a_stub(stub: str, check: str, completion: str, status: str) -> None:
    entry_point = check.split("(")[0].split()[-1]
    verdict = grade_by_tests(completion, check, entry_point, stub=stub)
    assert verdict.status == status, verdict.detail


def test_the_stub_alone_is_no_answer():
    """The stub defines ``f``; prose after it must not inherit that."""
    assert _runs("print('hello')") is _runs("x = 3") is _runs("def g(): pass") is None


def test_long_nonsense_is_parsed_in_bounded_time() -> None:
    found = extract_code(f"{SQUARE}\n" + "word word\n" * 2000, "f", stub=STUB)
    assert "bounded" not in found.reason
    assert "bounded" not in extract_code("```python\n" * 5000, "f", stub=STUB).reason


@pytest.mark.slow
def test_outputs_are_compared_word_by_word_and_the_share_is_kept() -> None:
    """Three of four inputs give the expected words; white space does not matter."""
    inputs, outputs = ["1 2", "3 4", "5 5", "0 0"], ["3", " 7\n\n", "11", "0\n"]
    code = extract_code(ADD).code or ""
    verdict = grade_by_outputs(code, inputs, outputs, allow_code_execution=True)
    assert (verdict.status, verdict.score) == ("wrong", 0.75)
    assert verdict.detail == "test 3 of 4: another output was expected"
    right = grade_by_outputs(code, inputs[:2], outputs[:2], allow_code_execution=True)
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
