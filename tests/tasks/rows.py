"""Tasks from rows that a test writes down, and from the data sets that lie beside the checkout."""

import base64
import json
import pickle
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.grading import Verdict
from lit_dlm.tasks import PromptExample, Task
from tests.e2e.runs import write_jsonl

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="no data sets here")


def task_of(kind: Any, folder: Path, *rows: dict[str, Any], **options: Any) -> Any:
    return kind(write_jsonl(folder / "rows.jsonl", list(rows)), **options)


def only(kind: Any, folder: Path, row: dict[str, Any], **options: Any) -> tuple[Any, PromptExample]:
    """A task of one row, and its example."""
    task = task_of(kind, folder, row, **options)
    (example,) = task.examples()
    return task, example


def grades(task: Task, pairs: Iterable[tuple[PromptExample, str]]) -> list[Verdict]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda pair: task.grade(*pair), pairs))


def references(task: Task) -> list[tuple[PromptExample, str]]:
    return [(example, task.reference_completion(example)) for example in task.examples()]


USER, SAYS = {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Add."}
PRO = {"question": "2 + 2?", "options": ["1", "4", "5"], "answer": "B", "answer_index": 1}
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
ADD = "def add(a, b):\n    return a + b"
SENTENCE = {"task_id": 11, "text": "Add.", "code": ADD}
SENTENCE |= {"test_list": [f"assert add({n}, 0) == {n}" for n in range(3)]}
PLUS = {"task_id": "Mbpp/11", "prompt": '"""\nAdd.\n"""', "entry_point": "add"}
PLUS |= {"canonical_solution": ADD, "base_input": [[1, 2]], "plus_input": [[3, 4]], "atol": 0}


def packed(tests: list[dict[str, str]]) -> str:
    """As in code_generation_lite."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def contest_test(given: str, wanted: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": wanted, "testtype": kind}


PROGRAM = {
    "question_content": "Print the sum of two numbers.",
    "starter_code": "",
    "public_test_cases": json.dumps([contest_test("1 2\n", "3\n")]),
    "private_test_cases": packed([contest_test("5 7\n", "12\n"), contest_test("0 0\n", "0\n")]),
}
