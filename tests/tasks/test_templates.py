"""Prompts from templates: the release's texts to the letter, files and inline texts, errors."""

from pathlib import Path

import pytest

from lit_dlm import DecodeModule
from lit_dlm.backbones import HFBackbone
from lit_dlm.datamodules.supervised_sources import ModelFacts, TaskReferences
from lit_dlm.tasks import GSM8K, MATH, MBPP, CodeTests, HumanEval, SEEDBench
from lit_dlm.tasks.base import PromptTemplate, shipped_templates
from lit_dlm.toy import WordProblems
from tests.tasks.rows import FUNCTION, SENTENCE, STDIO, only, task_of

QUESTION = {"question": " 1+1? ", "answer": "#### 2"}
STUB = {
    "task_id": "HumanEval/0",
    "prompt": "def add(a, b):\n    pass\n",
    "entry_point": "add",
    "canonical_solution": "",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}


@pytest.mark.parametrize(
    ("task", "row", "template", "text", "start"),
    [
        (GSM8K, QUESTION, "tracelock-gsm8k",
         "1+1?\n\nSolve this math word problem step by step.\nShow your reasoning clearly.\n"
         "At the end, output the final answer on a new line in the format:\n#### <answer>", ""),
        (GSM8K, QUESTION, "tabom-gsm8k", "Q: 1+1?\nA:", ""),
        (MATH, {"problem": "1+1?", "answer": "2"}, "tabom-math",
         "Problem:\n1+1?\n\nSolution:", ""),
        (MATH, {"question": "1+1?", "ground_truth_answer": "2"}, "dllm-rl-math",
         "You need to put your final answer in \\boxed{}. This is the problem:\n1+1?", ""),
        (MATH, {"question": "1+1?", "ground_truth_answer": "2"}, "dllm-rl-math-trado",
         "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}.", ""),
        (SEEDBench, {"question": "How many?", "ground_truth_answer": "A"}, "dllm-rl-mmada-think",
         "\nYou should first think about the reasoning process in the mind and then provide the "
         "user with the answer. The reasoning process is enclosed within <think> </think> tags, "
         "i.e. <think> reasoning process here </think> answer here\nHow many?", ""),
        (HumanEval, STUB, "tracelock-code",
         "Write Python code that passes the given tests.\n\nProblem:\ndef add(a, b):\n    pass\n\n"
         "Unit tests:\ndef check(candidate):\n    assert candidate(1, 2) == 3\n\nRequirements:\n"
         "- Implement the function `add` exactly as specified.\n- Return only Python code.\n"
         "- Put the final code inside one ```python``` block.\n"
         "- Do not include explanations or extra text.\n", ""),
        (HumanEval, STUB, "tabom-humaneval",
         "Write a solution to the following problem and make sure that it passes the tests:\n"
         "```def add(a, b):\n    pass\n",
         "Here is the completed function:\n```python\ndef add(a, b):\n    pass\n\n"),
        (MBPP, SENTENCE, "tabom-mbpp",
         "You are an expert Python programmer, and here is your task: Add. Your code should pass "
         "these tests:\n\nassert add(0, 0) == 0\nassert add(1, 0) == 1\nassert add(2, 0) == 2",
         "Here is the completed function:\n```python\n"),
        (CodeTests, FUNCTION, "dllm-rl-code",
         "Square a number.\nPlace your code within a single Python code block ```python ```. Do "
         "not include more than one code block. ", "\nimport math"),
        (CodeTests, STDIO, "dllm-rl-code",
         "This is the problem:\nAdd two numbers.\nYou should put your code in ```python ```. Use "
         "input() to read input and print() to produce output in your script. ", ""),
        (CodeTests, STDIO, "dllm-rl-code-llada",
         "This is the problem:\nAdd two numbers.\n You should put your code in ```python ```. Use "
         "input() to read input and print() to produce output in your script. ", ""),
    ],
)  # fmt: skip
def test_a_shipped_template_gives_the_prompt_of_its_release(
    tmp_path: Path, task, row, template: str, text: str, start: str
):
    _, example = only(task, tmp_path, row, template=template)
    assert (example.text, example.answer_start) == (text, start)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dllm-rl-dream", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
         "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant"),
        ("dllm-rl-trado", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant"),
        ("dllm-rl-trado-thinking",
         "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant<think>"),
        ("dllm-rl-llada",
         "<|startoftext|><|start_header_id|>user<|end_header_id|>Hi<|eot_id|>"
         "<|startoftext|><|start_header_id|>assistant<|end_header_id|>"),
    ],
)  # fmt: skip
def test_a_shipped_chat_template_gives_the_prompt_of_its_release(name: str, text: str):
    module = DecodeModule(HFBackbone("tiny"), tokenizer="tiny", chat_template=name)
    turns = [{"role": "user", "content": "Hi"}]
    made = module.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert made == text


def test_a_template_is_a_file_or_a_text_as_well(tmp_path: Path):
    path = tmp_path / "mine.jinja"
    path.write_text("Solve: {{ question }}\n")
    from_file = WordProblems(num_examples=3, template=str(path))
    from_text = WordProblems(num_examples=3, template="Solve: {{ question }}\n")
    plain = WordProblems(num_examples=3)
    assert list(from_file.examples()) == list(from_text.examples())
    assert [e.text for e in from_file.examples()] == [
        f"Solve: {e.text}\n" for e in plain.examples()
    ]
    assert (plain.template, from_file.template) == (None, "Solve: {{ question }}\n")


def test_code_behind_a_given_start_is_graded_with_it(tmp_path: Path):
    """The completion is a body alone; only behind the shown stub does it define the function."""
    row = STUB | {"prompt": "def add(a, b):\n"}
    options = {"template": "tabom-humaneval", "allow_code_execution": True}
    task, example = only(HumanEval, tmp_path, row, **options)
    assert task.grade(example, "    return a + b\n```\nDone.").is_correct
    assert not task.grade(example, "    return a - b\n```\nDone.").is_correct


def test_references_are_refused_behind_a_given_start(tmp_path: Path):
    module = DecodeModule(HFBackbone("tiny"), tokenizer="tiny")
    facts = ModelFacts(tokenizer=module.tokenizer, spec=module.backbone.spec, vocab_size=64)
    source = TaskReferences([task_of(MBPP, tmp_path, SENTENCE, template="tabom-mbpp")])
    with pytest.raises(ValueError, match="mbpp/test/00011: the template of the task begins"):
        list(source.examples(facts))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("tabom-gsm8", "template: expected a file, .* tabom-gsm8k, "),
        ("Answer. " * 40, "template: expected a file, "),  # too long a name for one
        ("{{ question", "template: unexpected end"),
        ("{{ questoin }}", "'questoin' is undefined.*there are: question"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_is_no_template_is_refused_in_one_line(template: str, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        PromptTemplate(template).render({"question": "1+1?"})
    assert "\n" not in str(caught.value)


def test_every_shipped_template_parses():
    for name in shipped_templates("prompt"):
        PromptTemplate(name)
