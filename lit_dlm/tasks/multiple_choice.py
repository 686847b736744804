"""Questions with lettered options, some of them about pictures.

GPQA (arXiv 2311.12022), MMLU-Pro (arXiv 2406.01574), MMLU; SEED-Bench (arXiv 2307.16125) and MMMU
(arXiv 2311.16502).
"""

from __future__ import annotations

import ast
import random
import re
from contextlib import suppress
from dataclasses import replace
from string import ascii_uppercase
from typing import Any

from lit_dlm.grading import Verdict
from lit_dlm.grading.answers import extract_choice, judged
from lit_dlm.tasks.base import DatasetTask, PromptExample
from lit_dlm.tasks.sources import Row
from lit_dlm.vision.pictures import IMAGE_MARK

_LONGEST_OPTIONS = 100_000  # characters; parsing takes hundreds of bytes for each
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


class MultipleChoice(DatasetTask):
    """Questions whose answer is the letter of an option; see :class:`DatasetTask`.

    A row has ``question``, a list ``options`` or ``choices``, and the letter or number (from 0) of
    the right one in ``answer_index`` or ``answer`` (MMLU-Pro, MMLU); or GPQA's fields ``Question``,
    ``Correct Answer`` and ``Incorrect Answer 1`` to ``3``, in an order that is drawn from the uid.
    Templates are also given ``options``, texts such as ``(A) 4 m/s``.
    """

    name = "multiple_choice"
    own_template = (
        "{{ question }}\n\n{{ options | join('\n') }}\n\n"
        "Think step by step. End with a line that reads: The answer is (X), where X is the letter "
        "of the right option."
    )

    def _example(self, row: Row) -> PromptExample:
        key = f"{row.index:05d}"
        options, right = self._options(row, key)
        is_one = 2 <= len(options) <= len(ascii_uppercase) and 0 <= right < len(options)
        row.expect(is_one, "2 to 26 options and the number of one", (len(options), right))
        lettered = [f"({ascii_uppercase[i]}) {text}" for i, text in enumerate(options)]
        question = row.text("Question" if "Question" in row.fields else "question").strip()
        reference = {"answer": ascii_uppercase[right], "num_options": len(options)}
        return self._prompt(row, key, question, reference, options=lettered)

    def _options(self, row: Row, key: str) -> tuple[list[str], int]:
        fields = row.fields
        if "Correct Answer" in fields:
            texts = [row.text(name).strip() for name in ("Correct Answer", *_WRONG)]
            # By the uid alone: runs of other limits or subsets show a question in the same order,
            # and results stay paired. In the file, the right one always comes first.
            order = list(range(len(texts)))
            # Imported here: torch takes seconds to import, and tasks are made before it is needed.
            from lit_dlm.tensors.sampling import sample_seed

            random.Random(sample_seed(0, f"{self.name}/{key}")).shuffle(order)
            return [texts[number] for number in order], order.index(0)
        # MMLU-Pro has both, a number and a letter; MMLU a number alone, under the letter's name.
        given: Any = fields.get("options", fields.get("choices"))
        has_texts = isinstance(given, list) and all(isinstance(text, str) for text in given)
        row.expect(has_texts, "a list of texts in 'options' or 'choices'", given)
        answer: Any = fields.get("answer_index", fields.get("answer"))
        if isinstance(answer, str) and len(answer) == 1 and answer in ascii_uppercase:
            return given, ascii_uppercase.index(answer)
        is_number = isinstance(answer, int) and not isinstance(answer, bool)
        row.expect(is_number, "a letter or a number in 'answer_index' or 'answer'", answer)
        return given, answer

    def reference_completion(self, example: PromptExample) -> str:
        return f"The answer is ({example.reference['answer']})."

    def extract(self, example: PromptExample, completion: str) -> str | None:
        return extract_choice(completion, example.reference["num_options"])

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        answer, wanted = self.extract(example, completion), example.reference["answer"]
        return judged(answer, answer == wanted, expected=wanted, missing="no letter of an option")


class GPQA(MultipleChoice):
    """The 448 questions of GPQA's main set (split train); see :class:`MultipleChoice`."""

    name = "gpqa"
    hub_id = "Idavidrein/gpqa"
    hub_config = "gpqa_main"
    split = "train"


class MMLUPro(MultipleChoice):
    """The 12,032 questions of MMLU-Pro; see :class:`MultipleChoice`."""

    name = "mmlu_pro"
    hub_id = "TIGER-Lab/MMLU-Pro"


class SEEDBench(MultipleChoice):
    """Questions about pictures with four options; see :class:`MultipleChoice`.

    Rows are those of SEED-Bench (``choice_a`` to ``choice_d``, ``answer``, ``image``), or those of
    dLLM-RL (the options within ``question``, ``ground_truth_answer``, ``image``).
    """

    name = "seed_bench"
    own_template = (
        "{{ question }}\n{{ options | join('\n') }}\n"
        "Put the letter of the right option in \\boxed{}."
    )

    def _example(self, row: Row) -> PromptExample:
        if "ground_truth_answer" not in row.fields:
            return super()._example(row)
        reference = {"answer": row.text("ground_truth_answer").strip(), "num_options": 4}
        return self._prompt(
            row, f"{row.index:05d}", row.text("question").strip(), reference, options=[]
        )

    def _options(self, row: Row, key: str) -> tuple[list[str], int]:
        given = [row.text(f"choice_{letter}") for letter in "abcd"]
        return given, "ABCD".find(row.text("answer").strip())


class MMMU(MultipleChoice):
    """Questions of MMMU with options, by default of mathematics; see :class:`MultipleChoice`.

    A row has ``question``, ``options`` (a list written as a text), ``answer`` and up to seven
    pictures as ``image_1`` and so on, whose places in the texts are marked ``<image 1>``. Open
    questions are left out.
    """

    name = "mmmu"
    hub_id = "MMMU/MMMU"
    hub_config = "Math"
    split = "validation"
    own_template = SEEDBench.own_template

    def _usable(self, rows: list[Row], split: str) -> list[Row]:
        return [row for row in rows if row.fields.get("question_type") != "open"]

    def _example(self, row: Row) -> PromptExample:
        written = row.text("options")
        options: Any = None
        # A Python literal in the release, not JSON: texts are in single quotes.
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            options = ast.literal_eval(written) if len(written) <= _LONGEST_OPTIONS else None
        row.expect(isinstance(options, list), "a list in field 'options'", written)
        texts = [row.text("question"), *map(str, options)]
        # In the order of the marks, which need not be that of the numbers, and as often as marked.
        named = [int(number) for text in texts for number in re.findall(r"<image (\d)>", text)]
        texts = [re.sub(r"<image \d>", IMAGE_MARK, text) for text in texts]
        pictures = [row.fields.get(f"image_{number}") for number in named]
        fields = {**row.fields, "question": texts[0], "options": texts[1:], "images": pictures}
        return super()._example(replace(row, fields=fields))
