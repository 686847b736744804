"""Code problems in the JSON form of dLLM-RL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.tasks import CodeTests

FUNCTION: dict[str, Any] = {
    "question": "Square a number.",
    "test_method": "function",
    "test_time_limit": 1,
    "test_list": ["assert square(2) == 4", "assert square(max(3, 1)) == 9"],
    "prefix": "import math\n",
    "solution": "def square(x):\n    return math.prod([x, x])",
}
STDIO: dict[str, Any] = {
    "question": "Add two numbers.",
    "test_method": "stdio",
    "test_time_limit": 1,
    "test_input": ["1 2\n", "3 4\n"],
    "test_output": ["3\n", "7\n"],
    "solution": "print(sum(map(int, input().split())))",
}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text(json.dumps(list(rows)))
    return str(path)


def test_both_methods_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "code.json", FUNCTION, STDIO)
    task = CodeTests(path, split="train", name="prime")
    function, program = task.examples()
    assert (task.name, function.uid, function.task) == ("prime", "prime/train/00000", "prime")
    assert function.reference["entry_point"] == "square"
    assert function.reference["test_list"] == FUNCTION["test_list"]
    assert function.text.startswith("Square a number.\n\nAnswer with")
    assert "standard input" in program.text
    assert program.reference["test_input"] == STDIO["test_input"]
    assert (
        task.extract(function, "def square(x): return x")
        == "import math\n\n\ndef square(x): return x"
    )
    assert task.extract(program, "```python\nprint(3)\n```") == "print(3)\n"
    assert len(CodeTests(path, limit=1).examples()) == 1


@pytest.mark.parametrize(
    ("tests", "name"),
    [
        (["assert f(2) == 4"], "f"),
        (["assert sorted(f(g(2))) == [1]", "assert f(1) == 2"], "f"),
        (["p = Pair(1, 2)\nassert longest([p]) == 1", "assert longest([]) == 0"], "longest"),
        (["import math\nassert math.isclose(area(1), 3.1)"], "area"),
        (["from copy import copy\nassert copy(select([1])) == [1]"], "select"),
        (["assert Solution().twoSum([1, 2], 3) == [0, 1]"], "Solution"),
        (["assert [f(n) for n in range(3)] == [0, 1, 4]"], "f"),
    ],
)
def test_the_entry_point_is_what_most_tests_call(
    tmp_path: Path, tests: list[str], name: str
) -> None:
    path = write(tmp_path / "code.json", {**FUNCTION, "test_list": tests})
    assert CodeTests(path).examples()[0].reference["entry_point"] == name


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**FUNCTION, "test_method": "pytest"}, "'test_method' must be function or stdio, got 'p"),
        ({**FUNCTION, "test_list": []}, "'test_list' must be a list of at least one text"),
        ({**FUNCTION, "test_list": ["assert f("]}, "'assert f.' does not parse"),
        ({**FUNCTION, "test_list": ["assert len([])"]}, "call no function that an answer could"),
        ({**FUNCTION, "test_time_limit": 0}, "'test_time_limit' must be a number of seconds"),
        ({**STDIO, "test_output": ["3"]}, "must be equally long"),
        ({**STDIO, "test_input": "1 2"}, "'test_input' must be a list"),
        ({"question": "?"}, "'test_method' is missing"),
        ({**STDIO, "question": None}, "'question' must be a text, but it is NoneType"),
    ],
)
def test_bad_rows_name_file_and_field(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"code\.json, item 2.*{message}"):
        CodeTests(write(tmp_path / "code.json", STDIO, row))


@pytest.mark.slow
def test_a_prefix_may_be_the_header_of_the_function(tmp_path: Path) -> None:
    row = {**FUNCTION, "prefix": "def square(x):\n"}
    task = CodeTests(write(tmp_path / "code.json", row), allow_code_execution=True)
    (example,) = task.examples()
    statuses = [
        task.grade(example, f"```python\n{code}\n```").status
        for code in ("return x * x", "def square(x):\n    return x * x", "return x + x")
    ]
    assert statuses == ["right", "right", "wrong"]


def test_a_row_without_a_solution_has_no_reference(tmp_path: Path) -> None:
    bare = CodeTests(write(tmp_path / "bare.json", {**FUNCTION, "solution": None}))
    with pytest.raises(ValueError, match="has no field 'solution'"):
        bare.reference_completion(bare.examples()[0])


@pytest.mark.slow
def test_solutions_pass_and_others_get_the_share_of_tests(tmp_path: Path) -> None:
    """Doubling squares 2 but not 3; printing 7 answers the second input only."""
    task = CodeTests(write(tmp_path / "c.json", FUNCTION, STDIO), allow_code_execution=True)
    for example, other in zip(
        task.examples(), ("def square(x):\n    return x + x", "print(7)"), strict=True
    ):
        verdict = task.grade(example, task.reference_completion(example))
        assert (verdict.status, verdict.score) == ("right", 1.0)
        verdict = task.grade(example, other)
        assert (verdict.status, verdict.score) == ("wrong", 0.5)
