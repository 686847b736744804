"""Samples of EvalPlus: what is written, and that its own verdicts on them are ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.reports.results import ResultFolder
from lit_dlm.tasks import HumanEvalPlus
from tests.e2e.runs import SHARED, fails, run
from tests.reports.rows import row

MINI = SHARED / "humaneval" / "HumanEvalPlus-Mini.jsonl.gz"


def write_results(
    run_dir: Path, task: HumanEvalPlus, completions: dict[str, str]
) -> dict[str, bool]:
    """Graded results of these completions; returns which are right."""
    folder = ResultFolder(run_dir / "results")
    folder.claim(task.name, "mine", {"any": 1})
    rows = []
    for example in task.examples():
        verdict = task.grade(example, completions[example.uid])
        graded = {"correct": verdict.is_correct, "verdict": verdict.status}
        rows.append(
            row(example.uid, task=task.name, method="mine", answer=verdict.answer, **graded)
        )
    folder.append(rows)
    return {one.uid: one.correct for one in rows}


def answers(task: HumanEvalPlus) -> dict[str, str]:
    """Right solutions, those of the next problem, ones that lost a line, ones that are no code."""
    examples = list(task.examples())
    texts = [task.reference_completion(example) for example in examples]
    found = {}
    for number, (example, text) in enumerate(zip(examples, texts, strict=True)):
        body = text.rstrip("`\n").rpartition("\n")[0]
        kinds = [text, texts[number - 1], f"{body}\n```", "I do not know."]
        found[example.uid] = kinds[(0, 2, 0, 1, 2, 3)[number % 6]]
    return found


@pytest.mark.slow
def test_evalplus_agrees_on_what_is_exported(tmp_path: Path):
    """Its own check of twelve problems of HumanEval+ Mini, with answers right and wrong."""
    evaluate = pytest.importorskip("evalplus.evaluate", reason="extra 'code' is not installed")
    if not MINI.is_file():
        pytest.skip("the data of HumanEval+ are absent")
    task = HumanEvalPlus(str(MINI), limit=12, allow_code_execution=True)
    ours = write_results(tmp_path, task, answers(task))
    assert 0 < sum(ours.values()) < 12
    run("evalplus", str(tmp_path))
    lines = (tmp_path / "evalplus" / "humaneval+-mine.jsonl").read_text().splitlines()
    samples = {line["task_id"]: line["solution"] for line in map(json.loads, lines)}
    theirs = {}
    for example in task.examples():
        problem: dict[str, Any] = {
            **example.reference,
            "prompt": "",
            "canonical_solution": example.reference["solution"],
        }
        expected: dict[str, Any] = {}
        for part in ("base", "plus"):
            expected[part], expected[f"{part}_time"] = evaluate.trusted_exec(
                problem["solution"],
                problem[f"{part}_input"],
                problem["entry_point"],
                record_time=True,
            )
        done = evaluate.check_correctness(
            "humaneval", 0, problem, samples[problem["task_id"]], expected, fast_check=True
        )
        theirs[example.uid] = all(done[part][0] == "pass" for part in ("base", "plus"))
    assert theirs == ours


def test_only_results_of_its_problems_are_samples(capsys: Any, tmp_path: Path):
    assert "expected results of humaneval" in fails(capsys, "evalplus", str(tmp_path))
