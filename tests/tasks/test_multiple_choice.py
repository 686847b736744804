"""Lettered options: the three forms of rows, the letters of completions, worked examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lit_dlm.grading.answers import extract_choice
from lit_dlm.tasks import (
    GPQA,
    MATH,
    MMMU,
    MMLUPro,
    MultipleChoice,
    PromptExample,
    SEEDBench,
)
from tests.e2e.runs import write_jsonl

PRO = {"question": "2 + 2?", "options": ["1", "4", "5"], "answer": "B", "answer_index": 1}
OLD = {"question": "2 + 2?", "choices": ["4", "5"], "answer": 0}
MAIN = {
    "Question": "2 + 2?\n",
    "Correct Answer": "4\n",
    **{f"Incorrect Answer {n}": str(n) for n in (1, 2, 3)},
}


def only(path: Path, row: dict[str, Any], kind: type[MultipleChoice], **options: Any) -> Any:
    task = kind(write_jsonl(path / "rows.jsonl", [row]), **options)
    return task, task.examples()[0]


def test_rows_of_mmlu_say_which_option_is_right(tmp_path: Path):
    task, example = only(tmp_path, PRO, MMLUPro)
    assert example.uid == "mmlu_pro/test/00000"
    assert example.text.startswith("2 + 2?\n\n(A) 1\n(B) 4\n(C) 5\n\nThink step by step.")
    assert task.grade(example, "So the answer is (B).").is_correct
    assert task.grade(example, "The answer is A").detail == "expected B"
    assert task.grade(example, "The answer is D").status == "no_answer"
    assert task.grade(example, task.reference_completion(example)).is_correct
    _, example = only(tmp_path, OLD, MultipleChoice, name="mmlu")
    assert example.reference == {"answer": "A", "num_options": 2}


def test_the_options_of_gpqa_are_shuffled_by_the_uid_alone(tmp_path: Path):
    def letters(count: int) -> list[str]:
        path = write_jsonl(tmp_path / "rows.jsonl", [MAIN] * count)
        return [example.reference["answer"] for example in GPQA(path).examples()]

    found = letters(40)
    assert set(found) == set("ABCD")
    assert letters(12) == found[:12]
    _, example = only(tmp_path, MAIN, GPQA)
    assert f"({example.reference['answer']}) 4\n" in example.text
    assert all(f") {n}\n" in example.text for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("The answer is (C).", "C"),
        ("**Answer: B**", "B"),
        ("Answer: A\nNo, the answer is (B).", "B"),
        ("The answer is (A), so \\boxed{\\text{(D)}}", "D"),
        ("I think\nC", "C"),
        ("<think>It is no D.</think> C", "C"),
        ("A nice thing", None),
        ("The answer is Adam", None),
        ("The answer is (E)", None),
        ("", None),
    ],
)
def test_letters_of_completions(completion: str, letter: str | None):
    assert extract_choice(completion, 4) == letter


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": "ab"}, "line 1: expected a list of texts in 'options' or 'choices'"),
        ({"options": ["a"]}, "line 1: expected 2 to 26 options and the number of one, got 1 and 1"),
        ({"answer_index": 3}, "expected 2 to 26 options and the number of one, got 3 and 3"),
        ({"answer_index": "no"}, "expected a letter or a number in 'answer_index' or 'answer'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        only(tmp_path, {**PRO, **change}, MMLUPro)


def test_worked_examples_stand_in_front_and_are_recorded(tmp_path: Path):
    """Those of the split train of a folder, each with its answer; settings tell them apart."""
    write_jsonl(tmp_path / "test.jsonl", [PRO])
    write_jsonl(tmp_path / "train.jsonl", [{**OLD, "question": "{{ 1 + 3 }}?"}, OLD])
    plain = MMLUPro(str(tmp_path)).examples()[0]
    task = MMLUPro(str(tmp_path), num_shots=1)
    example: PromptExample = task.examples()[0]
    shot = "{{ 1 + 3 }}?\n\n(A) 4\n(B) 5\n\nThink step by step. End with a line that reads: "
    assert example.text.startswith(shot)
    assert example.text.endswith(f"\n\nThe answer is (A).\n\n{plain.text}")
    assert task.template != MMLUPro(str(tmp_path), num_shots=2).template
    assert task.template is not None
    with pytest.raises(ValueError, match="num_shots: expected 0 to 2"):
        MMLUPro(str(tmp_path), num_shots=3)
    with pytest.raises(ValueError, match="shots_path: expected other problems than those"):
        MMLUPro(str(tmp_path / "test.jsonl"), num_shots=1)


def test_aime_is_a_file_of_math_with_whole_numbers(tmp_path: Path):
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"problem": "1 + 32?", "answer": a} for a in (33, "033")]
    )
    task = MATH(path, name="aime24")
    for example in task.examples():
        assert task.grade(example, "So \\boxed{33}.").is_correct
        assert not task.grade(example, "So \\boxed{34}.").is_correct


def _picture(path: Path, side: int) -> str:
    Image.new("RGB", (side, side), "red").save(path)
    return path.name


def test_questions_of_seed_bench(tmp_path: Path):
    image = _picture(tmp_path / "a.png", 20)
    choices = {f"choice_{letter}": f"{letter} towels" for letter in "abcd"}
    task, example = only(
        tmp_path, {"question": "How many?", "answer": "C", "image": [image], **choices}, SEEDBench
    )
    assert [one.size for one in example.images] == [(20, 20)]
    assert "\n(C) c towels\n" in example.text
    assert task.grade(example, "\\boxed{C}").is_correct
    row = {"question": "Which? A.One B.Two", "ground_truth_answer": "B", "image": image}
    task, example = only(tmp_path, row, SEEDBench, template="dllm-rl-math")
    assert example.text.endswith("This is the problem:\nWhich? A.One B.Two")
    assert task.grade(example, "so \\boxed{B}").is_correct
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: .*no\.png: .*no such file"):
        only(tmp_path, {**row, "image": "no.png"}, SEEDBench)
    with pytest.raises(ValueError, match="field 'images' must be a list of paths"):
        only(tmp_path, {**row, "image": 7}, SEEDBench)


def test_questions_of_mmmu_place_their_pictures(tmp_path: Path):
    images = {f"image_{n}": _picture(tmp_path / f"{n}.png", 20 + n) for n in (1, 2)}
    row = {
        "question": "Is <image 2> like <image 1>?",
        "options": "['yes', 'as <image 1>']",
        "answer": "B",
        "question_type": "multiple-choice",
        "image_3": None,
        **images,
    }
    task = MMMU(write_jsonl(tmp_path / "r.jsonl", [row, {**row, "question_type": "open"}]))
    (example,) = task.examples()
    assert example.text.startswith("Is <image> like <image>?\n(A) yes\n(B) as <image>\n")
    assert [one.size[0] for one in example.images] == [22, 21, 21]
    assert example.reference["answer"] == "B"
