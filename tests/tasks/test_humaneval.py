"""HumanEval and HumanEval+: prompts, canonical solutions, stubs, agreement with evalplus."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lit_dlm.grading import SandboxLimits
from lit_dlm.tasks.base import Task
from lit_dlm.tasks.humaneval import HumanEval, HumanEvalPlus

FOLDER = Path(__file__).parents[2].parent / "shared" / "data" / "humaneval"
pytestmark = [
    pytest.mark.skipif(not FOLDER.exists(), reason="no HumanEval files here"),
    pytest.mark.slow,  # graded code runs in processes of its own
]

PLAIN = str(FOLDER / "HumanEval.jsonl.gz")
MINI = str(FOLDER / "HumanEvalPlus-Mini.jsonl.gz")


@pytest.fixture(scope="module")
def plain():
    limits = SandboxLimits(wall_seconds=120.0)  # of processor time as much as ever
    return HumanEval(PLAIN, allow_code_execution=True, limits=limits)


@pytest.fixture(scope="module")
def mini():
    return HumanEvalPlus(MINI, allow_code_execution=True)


def _grade(task, pairs):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda pair: task.grade(*pair), pairs))


def test_prompt_shows_the_stub_and_no_test(plain):
    example = plain.examples()[0]
    assert isinstance(plain, Task)
    assert example.uid == "humaneval/test/00000"
    assert "def has_close_elements" in example.text
    assert "check(" not in example.text
    shown = HumanEval(PLAIN, template="tracelock-code", limit=1).examples()[0]
    assert "def check(candidate)" in shown.text
    assert "function `has_close_elements` exactly" in shown.text


def test_all_canonical_solutions_are_right_and_all_stubs_wrong(plain):
    examples = plain.examples()
    right = _grade(plain, [(e, plain.reference_completion(e)) for e in examples])
    assert sum(v.is_correct for v in right) == 164
    raw = _grade(plain, [(e, e.reference["solution"]) for e in examples])
    assert sum(v.is_correct for v in raw) == 164
    stubs = _grade(plain, [(e, "    pass\n") for e in examples])
    assert sum(v.is_correct for v in stubs) == 0


def test_a_helper_of_the_prompt_cannot_be_replaced(plain):
    """HumanEval/32's test checks ``poly(coeffs, solution)``: a forged ``poly`` must not count."""
    example = plain.examples()[32]
    forged = (
        "```python\ndef poly(xs, x):\n    return 0.0\n\ndef find_zero(xs):\n    return 0.0\n```"
    )
    assert not plain.grade(example, forged).is_correct


def test_plus_agrees_with_evalplus_but_for_its_known_defect(mini):
    """Canonical solutions pass; evalplus 0.3.1 itself can never pass HumanEval/32."""
    examples = [mini.examples()[i] for i in (0, 2, 4, 32, 95)]
    verdicts = _grade(mini, [(e, mini.reference_completion(e)) for e in examples])
    assert [v.status for v in verdicts] == ["right"] * 5
    assert verdicts[0].score == 1.0


def test_plus_finds_what_the_base_tests_miss(mini):
    """``numbers`` sorted, but compared with ``<=``: only an added test tells."""
    example = mini.examples()[0]
    code = example.reference["solution"].replace("< threshold", "<= threshold")
    assert "<= threshold" in code
    verdict = mini.grade(example, code)
    assert verdict.status == "wrong"
    assert verdict.detail.startswith("plus input")


def test_any_root_counts_for_find_zero(mini):
    rules = {e.reference["entry_point"]: mini.problem(e).rule for e in mini.examples()}
    assert rules.pop("find_zero") == "root"
    assert set(rules.values()) == {"close"}


def test_plus_needs_its_own_file():
    with pytest.raises(ValueError, match=r"'humaneval\+' needs a local file"):
        HumanEvalPlus()
    with pytest.raises(ValueError, match="line 1: field 'base_input' must be a list"):
        HumanEvalPlus(PLAIN)


def test_evalplus_gives_the_same_verdicts(mini, monkeypatch):
    """The library's own check, in its own process, on canonical and slightly wrong solutions."""
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", MINI)
    evaluation = pytest.importorskip("evalplus.eval", reason="the extra 'code' is not installed")
    trusted_exec = pytest.importorskip("evalplus.gen.util").trusted_exec
    for index, change in ((0, ("<", "<=")), (2, ("number -", "number +")), (53, ("+", "-"))):
        example = mini.examples()[index]
        reference = example.reference
        inputs = reference["base_input"] + reference["plus_input"]
        stub, canonical = reference["stub"], reference["solution"]
        body = canonical.removeprefix(stub)
        assert change[0] in body
        entry_point = reference["entry_point"]
        expected, spent = trusted_exec(canonical, inputs, entry_point, record_time=True)
        for code in (canonical, stub + body.replace(*change)):
            status, _ = evaluation.untrusted_check(
                "humaneval", code, inputs, entry_point, expected, reference["atol"], spent
            )
            ours = mini.grade(example, f"```python\n{code}\n```")
            assert ours.is_correct == (status == "pass"), (reference["task_id"], status, ours)
