"""MBPP and MBPP+: splits, prompts, canonical solutions, special rules."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lit_dlm.grading import SandboxLimits
from lit_dlm.tasks.base import Task
from lit_dlm.tasks.mbpp import MBPP, MBPPPlus

FOLDER = Path(__file__).parents[2].parent / "shared" / "data" / "mbpp"
pytestmark = [
    pytest.mark.skipif(not FOLDER.exists(), reason="no MBPP files here"),
    pytest.mark.slow,  # graded code runs in processes of its own
    # Some solutions write regular expressions as plain strings.
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),
]
PLAIN = str(FOLDER / "mbpp.jsonl.gz")
PLUS = str(FOLDER / "MbppPlus.jsonl.gz")


def _by_number(task):
    return {int(e.uid[-5:]): e for e in task.examples()}


def _grade_references(task, numbers):
    examples = _by_number(task)
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda n: task.grade(examples[n], task.reference_completion(examples[n])), numbers
            )
        )


@pytest.mark.parametrize(
    ("split", "count"), [("test", 500), ("train", 374), ("validation", 90), ("prompt", 10)]
)
def test_official_splits_by_id(split, count):
    """11..510 = 500, 601..974 = 374, 511..600 = 90, 1..10 = 10."""
    task = MBPP(PLAIN, split=split)
    assert len(task.examples()) == count
    assert isinstance(task, Task)


def test_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="split: expected prompt, test, validation, train"):
        MBPP(PLAIN, split="dev")


def test_prompt_shows_the_tests():
    example = _by_number(MBPP(PLAIN))[11]
    assert example.uid == "mbpp/test/00011"
    assert "assert remove_Occ" in example.text


def test_partial_credit_counts_assertions():
    task = MBPP(PLAIN, split="prompt", allow_code_execution=True)
    example = _by_number(task)[3]  # is_not_prime: tests want False, True, True
    verdict = task.grade(example, "```python\ndef is_not_prime(n):\n    return True\n```")
    assert (verdict.status, round(verdict.score * 4) / 4) == ("wrong", 0.75)


@pytest.mark.parametrize("split", ["test", "train", "validation", "prompt"])
def test_all_canonical_solutions_are_right(split):
    """Problem 123 takes 7 s on a machine that does nothing else; the limit of users is 20 s."""
    limits = SandboxLimits(wall_seconds=300.0, cpu_seconds=300.0)
    task = MBPP(PLAIN, split=split, allow_code_execution=True, limits=limits)
    numbers = list(_by_number(task))
    verdicts = _grade_references(task, numbers)
    assert [n for n, v in zip(numbers, verdicts, strict=True) if not v.is_correct] == []


class TestPlus:
    @pytest.fixture(scope="class")
    @staticmethod
    def task():
        pytest.importorskip("evalplus", reason="the extra 'code' is not installed")
        return MBPPPlus(PLUS, allow_code_execution=True)

    def test_retyped_inputs_and_special_rules_pass_canonical_solutions(self, task):
        """2 compares sets, 6 ints, 16 presence of a match, 124 complex, 252 complex text, 793 no
        added inputs, 115 sets."""
        numbers = [n for n in (2, 6, 16, 115, 124, 252, 793) if n in _by_number(task)]
        assert len(numbers) >= 5
        verdicts = _grade_references(task, numbers)
        assert [(n, v.status) for n, v in zip(numbers, verdicts, strict=True)] == [
            (n, "right") for n in numbers
        ]

    def test_order_does_not_matter_where_sets_are_compared(self, task):
        problem = task.problem(_by_number(task)[2])
        assert problem.rule == "same_set"
        assert isinstance(problem.base_inputs[0][0], tuple)

    def test_wrong_code_is_wrong(self, task):
        example = _by_number(task)[6]
        code = f"```python\ndef {example.reference['entry_point']}(a, b):\n    return True\n```"
        assert task.grade(example, code).status == "wrong"

    def test_prompt_is_plain_text(self, task):
        text = _by_number(task)[2].text
        assert text.startswith("Write a function")
        assert '"""' not in text


def test_plus_says_what_is_missing(monkeypatch):
    with pytest.raises(ValueError, match=r"'mbpp\+' needs a local file"):
        MBPPPlus()
    task = MBPPPlus(PLUS, limit=1, allow_code_execution=True)
    for module in ("evalplus.data.mbpp", "evalplus.eval._special_oracle"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    with pytest.raises(ValueError, match=r"needs the package evalplus 0\.3\.1: pip install"):
        task.problem(task.examples()[0])
