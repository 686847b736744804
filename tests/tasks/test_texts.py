"""Tasks whose completions are compared as texts, numbers, formulas or letters."""

import logging
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lit_dlm import tasks
from lit_dlm.grading import answers
from lit_dlm.grading.answers import extract_choice
from lit_dlm.tasks.base import tasks_by_name
from lit_dlm.vision.pictures import Picture, picture_from_text, picture_to_text
from tests.e2e.runs import write_jsonl
from tests.tasks.rows import (
    DATA,
    PRO,
    SAYS,
    SENTENCE,
    SYSTEM,
    USER,
    needs_data,
    only,
    references,
    task_of,
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first comparison takes seconds on a busy machine."""
    monkeypatch.setattr(answers, "MATH_SECONDS", 100.0)


def test_prompts_of_alpaca_show_an_input_where_there_is_one(tmp_path: Path):
    row = {"instruction": "Translate. ", "input": " Hund\n", "output": "dog"}
    empty = {"instruction": "Say hi.", "input": "", "output": "hi"}
    without = {"instruction": "Say ho.", "output": "ho"}
    task = task_of(tasks.Alpaca, tmp_path, row, empty, without)
    texts = [example.text for example in task.examples()]
    assert texts == ["Translate.\n\nInput:\nHund", "Say hi.", "Say ho."]
    assert references(task)[0][1] == "dog"
    assert not task.is_graded
    with pytest.raises(ValueError, match=r"alpaca/train/00000: .*has no grader"):
        task.grade(task.examples()[0], "hi")


SUMS = [
    {"question": "How many is 2 and 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "And 1000 more?", "answer": "So 1,005.\n#### 1,005"},
    {"question": "Three?", "answer": "#### 3"},
]


def test_gsm8k_asks_for_the_answer_line_and_takes_the_last_number(tmp_path: Path):
    task = task_of(tasks.GSM8K, tmp_path, *SUMS)
    first, second, _ = task.examples()
    assert first.uid == "gsm8k/test/00000"
    assert first.text.startswith("How many is 2 and 3?\n\n")
    assert ("#### <answer>" in first.text, "5" in first.text) == (True, False)
    assert task.reference_completion(first) == "2 + 3 = 5\n#### 5"
    assert task.grade(second, "#### $1005.00").is_correct
    assert task.extract(second, "is \\boxed{1{,}005}") == "1005"
    assert task.grade(second, "#### 1004").status == "wrong"
    assert task.grade(second, "many").status == "no_answer"
    # Uids do not depend on seed or limit.
    by_uid = {e.uid: e for e in task.examples()}
    shuffled = task_of(tasks.GSM8K, tmp_path, *SUMS, seed=1).examples()
    assert list(by_uid.values()) != shuffled
    assert all(by_uid[e.uid] == e for e in shuffled)
    assert task_of(tasks.GSM8K, tmp_path, *SUMS, seed=1, limit=2).examples() == shuffled[:2]


@needs_data
@pytest.mark.parametrize(
    ("kind", "path", "count"),
    [(tasks.GSM8K, "gsm8k", 1319), (tasks.MATH, "math/math500_test.jsonl.gz", 500)],
)
def test_all_reference_solutions_grade_as_right(kind: Any, path: str, count: int):
    task = kind(str(DATA / path))
    assert len(task.examples()) == count
    assert all(task.grade(*pair).is_correct for pair in references(task))


def test_math_takes_the_answer_field_or_the_box_and_leaves_rows_without_either(tmp_path, caplog):
    rows = [
        {"problem": "Half?", "answer": "\\frac{1}{2}", "solution": "\\boxed{\\frac{1}{2}}"},
        {"problem": "None?", "answer": "", "solution": "\\boxed{}"},
        {"problem": "Two?", "solution": "So \\boxed{2}."},
        {"problem": "Three?", "answer": 3},
        {"problem": "Three?", "answer": "003"},  # as in AIME
        {"question": "Third?", "ground_truth_answer": "\\frac{1}{3}"},  # dLLM-RL's names
    ]
    with caplog.at_level(logging.WARNING):
        task = task_of(tasks.MATH, tmp_path, *rows)
    assert "left out 1 of 6" in caplog.text
    half, *_, three, last = task.examples()
    assert [int(e.uid[-5:]) for e in task.examples()] == [0, 2, 3, 4, 5]
    golds = [e.reference["answer"] for e in task.examples()]
    assert golds[1:] == ["2", "3", "003", "\\frac{1}{3}"]
    assert "\\boxed{}" in half.text
    assert last.text.startswith("Third?")
    assert all(task.grade(*pair).is_correct for pair in references(task))
    assert task.grade(three, "So \\boxed{3}.").is_correct
    assert task.grade(half, "First \\boxed{7}, no: \\boxed{0.5}").is_correct
    assert task.grade(half, "\\boxed{2}").status == "wrong"
    assert task.grade(half, "one half").status == "no_answer"
    assert task.extract(half, "\\boxed{ x }") == "x"


def test_files_are_told_apart_by_name(tmp_path: Path):
    row = {"problem": "Three?", "answer": "3"}
    plain = task_of(tasks.MATH, tmp_path, row)
    more = task_of(tasks.MATH, tmp_path, row, name="more")
    found = [(one.uid, one.task) for task in (plain, more) for one in task.examples()]
    assert found == [("math/test/00000", "math"), ("more/test/00000", "more")]
    assert tasks_by_name([plain, more]) == {"math": plain, "more": more}
    message = r"val_tasks: .*'math' twice \(MATH of split 'test' and MATH of split 'dev'\)"
    with pytest.raises(ValueError, match=message):
        tasks_by_name([plain, task_of(tasks.MATH, tmp_path, row, split="dev")], option="val_tasks")


def test_prompts_pass_unchanged_and_need_no_answers(tmp_path: Path):
    row = {"id": "a", "prompt": "Say 2.\n", "answer": None}
    task, example = only(tasks.PromptsFile, tmp_path, row, name="mine")
    assert (example.uid, example.text, example.reference) == ("mine/test/a", "Say 2.\n", {})
    assert not task.is_graded
    assert task.extract(example, " yes ") == "yes"
    with pytest.raises(ValueError, match="the task 'mine' has no grader"):
        task.grade(example, "2")
    with pytest.raises(ValueError, match=r"mine/test/a: expected .*got grading: none"):
        task.reference_completion(example)
    # A chat that ends with the user is a prompt; turns before the last are its history.
    _, example = only(tasks.PromptsFile, tmp_path, {"messages": [SYSTEM, USER]})
    assert (example.text, example.history) == ("2+3", [SYSTEM])


@pytest.mark.parametrize(
    ("grading", "right", "wrong"),
    [
        ("exact", "2", "2."),
        ("numeric", "so 2.0", "3"),
        ("math", "\\boxed{4/2}", "\\boxed{3}"),
    ],
)
def test_gradings_of_prompts(tmp_path: Path, grading: str, right: str, wrong: str):
    row = {"id": "a", "prompt": "Say 2.\n", "answer": 2}
    task, example = only(tasks.PromptsFile, tmp_path, row, grading=grading)
    assert task.grade(example, right).is_correct
    assert not task.grade(example, wrong).is_correct
    assert task.grade(*references(task)[0]).is_correct


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+3", "answer": 5},
        {"question": "2+3", "response": "2+3 = 5", "answer": "5"},
        {"instruction": "2+3", "input": "", "output": "5"},
        {"messages": [USER, SAYS]},
        {"prompt": [USER], "completion": [SAYS]},
        {"prompt": [USER], "answer": 5},
        {"conversations": [{"from": "human", "value": "2+3"}, {"from": "gpt", "value": "5"}]},
    ],
)
def test_a_file_of_answered_prompts_is_one_of_prompts_too(tmp_path: Path, row: dict[str, Any]):
    """Without ids their numbers stand in the uids."""
    _, example = only(tasks.PromptsFile, tmp_path, row, grading="exact")
    assert (example.uid, example.text) == ("prompts/test/000000", "2+3")
    assert example.reference == {"answer": "5"}


class Redness:
    """The share of red in the first pixel."""

    def score(self, picture: Picture, example: tasks.PromptExample) -> float:
        assert example.text == "Draw red."
        return picture.decoded().getpixel((0, 0))[0] / 255


def test_a_scorer_judges_what_is_drawn(tmp_path: Path):
    task, example = only(tasks.DrawingPrompts, tmp_path, {"prompt": "Draw red."}, scorer=Redness())
    assert task.is_graded
    for red, score, status in ((204, 0.8, "right"), (51, 0.2, "wrong")):
        verdict = task.grade(example, picture_to_text(Image.new("RGB", (4, 4), (red, 0, 0))))
        assert (verdict.status, verdict.score) == (status, score)
    assert task.grade(example, "a red square").status == "no_answer"
    with pytest.raises(ValueError, match=r"drawings/test/000000: expected .*got grading: none"):
        task.reference_completion(example)


def test_only_pictures_are_pictures():
    image = Image.new("RGB", (5, 4), (1, 2, 3))
    text = picture_to_text(image)
    assert picture_from_text(text).decoded().tobytes() == image.tobytes()
    assert picture_from_text("data:image/png;base64,@") is picture_from_text("red") is None
    with pytest.raises(ValueError, match="the drawn picture: the picture is damaged"):
        picture_from_text(text[:-48]).decoded()


OLD = {"question": "2 + 2?", "choices": ["4", "5"], "answer": 0}
MAIN = {"Question": "2 + 2?\n", "Correct Answer": "4\n"}
MAIN |= {f"Incorrect Answer {n}": str(n) for n in (1, 2, 3)}


def test_rows_of_mmlu_say_which_option_is_right(tmp_path: Path):
    task, example = only(tasks.MMLUPro, tmp_path, PRO)
    assert example.uid == "mmlu_pro/test/00000"
    assert example.text.startswith("2 + 2?\n\n(A) 1\n(B) 4\n(C) 5\n\nThink step by step.")
    completions = ("So the answer is (B).", "The answer is A", "The answer is D")
    found = [task.grade(example, one) for one in completions]
    assert [one.status for one in found] == ["right", "wrong", "no_answer"]
    assert found[1].detail == "expected B"
    assert task.grade(*references(task)[0]).is_correct
    _, example = only(tasks.MultipleChoice, tmp_path, OLD, name="mmlu")
    assert example.reference == {"answer": "A", "num_options": 2}


def test_the_options_of_gpqa_are_shuffled_by_the_uid_alone(tmp_path: Path):
    def letters(count: int) -> list[str]:
        examples = task_of(tasks.GPQA, tmp_path, *[MAIN] * count).examples()
        return [example.reference["answer"] for example in examples]

    found = letters(40)
    assert set(found) == set("ABCD")
    assert letters(12) == found[:12]
    _, example = only(tasks.GPQA, tmp_path, MAIN)
    shown = (f"({example.reference['answer']}) 4\n", ") 1\n", ") 2\n", ") 3\n")
    assert all(option in example.text for option in shown)


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


def test_worked_examples_stand_in_front_and_are_recorded(tmp_path: Path):
    """Those of the split train of a folder, each with its answer; settings tell them apart."""
    write_jsonl(tmp_path / "test.jsonl", [PRO])
    write_jsonl(tmp_path / "train.jsonl", [{**OLD, "question": "{{ 1 + 3 }}?"}, OLD])
    plain = tasks.MMLUPro(str(tmp_path)).examples()[0]
    task = tasks.MMLUPro(str(tmp_path), num_shots=1)
    (example,) = task.examples()
    shot = "{{ 1 + 3 }}?\n\n(A) 4\n(B) 5\n\nThink step by step. End with a line that reads: "
    assert example.text.startswith(shot)
    assert example.text.endswith(f"\n\nThe answer is (A).\n\n{plain.text}")
    assert task.template not in (None, tasks.MMLUPro(str(tmp_path), num_shots=2).template)
    with pytest.raises(ValueError, match="num_shots: expected"):
        tasks.MMLUPro(str(tmp_path), num_shots=3)
    with pytest.raises(ValueError, match="shots_path: expected other"):
        tasks.MMLUPro(str(tmp_path / "test.jsonl"), num_shots=1)


@pytest.mark.parametrize(
    "question",
    [
        "{% endraw %}It is {{ answer }}.{% raw %}",
        "{% endraw %}{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}",
        "Jinja ends such a block with {% endraw %}.",
        "{%- endraw -%}",
        "{# Half a comment, {{ half a value",
    ],
)
def test_worked_examples_are_no_templates(tmp_path: Path, question: str):
    """Rows may hold any text; only their line ends become those that Jinja writes."""
    write_jsonl(tmp_path / "test.jsonl", [PRO])
    write_jsonl(tmp_path / "train.jsonl", [{**OLD, "question": f"{question}\r\n?"}])
    plain = tasks.MMLUPro(str(tmp_path)).examples()[0]
    (example,) = tasks.MMLUPro(str(tmp_path), num_shots=1).examples()
    shot = example.text.removesuffix(plain.text)
    assert shot.startswith(f"{question}\n?\n\n(A) 4\n(B) 5\n\nThink step by step. ")
    assert shot.endswith("\n\nThe answer is (A).\n\n")


def test_worked_examples_of_mbpp_are_of_its_own_split(tmp_path: Path):
    write_jsonl(tmp_path / "test.jsonl", [SENTENCE])
    write_jsonl(tmp_path / "train.jsonl", [SENTENCE | {"task_id": 601, "text": "Shown first."}])
    task = tasks.MBPP(str(tmp_path), num_shots=1, allow_code_execution=True)
    assert task.examples()[0].text.startswith("Shown first.")


def test_questions_of_seed_bench(tmp_path: Path):
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    choices = {f"choice_{letter}": f"{letter} towels" for letter in "abcd"}
    row = {"question": "How many?", "answer": "C", "image": ["a.png"], **choices}
    task, example = only(tasks.SEEDBench, tmp_path, row)
    assert [one.size for one in example.images] == [(20, 20)]
    assert "\n(C) c towels\n" in example.text
    shown = write_jsonl(tmp_path / "train.jsonl", [row])
    with pytest.raises(ValueError, match=r"num_shots: expected 0 .* pictures, got 1"):
        task_of(tasks.SEEDBench, tmp_path, row, num_shots=1, shots_path=shown)
    assert task.grade(example, "\\boxed{C}").is_correct
    row = {"question": "Which? A.One B.Two", "ground_truth_answer": "B", "image": "a.png"}
    task, example = only(tasks.SEEDBench, tmp_path, row, template="dllm-rl-math")
    assert example.text.endswith("This is the problem:\nWhich? A.One B.Two")
    assert task.grade(example, "so \\boxed{B}").is_correct


def test_questions_of_mmmu_place_their_pictures(tmp_path: Path):
    row = {"question": "Is <image 2> like <image 1>?", "options": "['yes', 'as <image 1>']"}
    row |= {"answer": "B", "question_type": "multiple-choice", "image_3": None}
    for n in (1, 2):
        Image.new("RGB", (20 + n, 20)).save(tmp_path / f"{n}.png")
        row[f"image_{n}"] = f"{n}.png"
    (example,) = task_of(tasks.MMMU, tmp_path, row, {**row, "question_type": "open"}).examples()
    assert example.text.startswith("Is <image> like <image>?\n(A) yes\n(B) as <image>\n")
    assert [one.size[0] for one in example.images] == [22, 21, 21]
    assert example.reference["answer"] == "B"
