"""Base classes of tasks: prompts, templates, answer extraction and grading of a benchmark."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lit_dlm.config.components import Component, checked_component
from lit_dlm.grading import IsolationLevel, SandboxLimits, Verdict, isolation_level
from lit_dlm.grading.answers import GRADERS
from lit_dlm.grading.child.extraction import whole_part
from lit_dlm.grading.code import ExtractedCode, extract_code, python_block, ungradable
from lit_dlm.grading.sandbox import require_permission, run_python_check
from lit_dlm.system.options import at_least, refuse, within
from lit_dlm.tasks.sources import Row, read_rows
from lit_dlm.vision.pictures import Picture


@dataclass(frozen=True, kw_only=True)
class PromptExample:
    """One problem. ``uid`` is stable and is the key of the sample everywhere."""

    uid: str
    """``{task}/{split}/{name}``, for example ``gsm8k/test/00012``; never depends on a limit. The
    second of several responses to a prompt has ``gsm8k/test/00012#1``, and so on."""
    task: str
    text: str
    """The user turn, before any chat template."""
    history: list[dict[str, str]] = field(default_factory=list)
    """Earlier turns, each with ``role`` and ``content``."""
    answer_start: str = ""
    """Text that the answer begins with, put after the chat template; the model continues it. It is
    not part of the completion, but graders of code put it in front."""
    reference: dict[str, Any] = field(default_factory=dict)
    """What grading needs (JSON types only); ``ungraded`` may tell why it is impossible."""
    images: tuple[Picture, ...] = ()
    response: int = 0
    """Number of the response, from 0, among several to one prompt."""

    @property
    def prompt_uid(self) -> str:
        return self.uid.removesuffix(f"#{self.response}") if self.response else self.uid

    @property
    def turns(self) -> list[dict[str, str]]:
        """The earlier turns and the user turn, before any chat template."""
        return [*self.history, {"role": "user", "content": self.text}]

    @property
    def question(self) -> str:
        """The user turn behind the earlier turns, if there are any, as one text for judges."""
        spoken = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in self.turns)
        return spoken if self.history else self.text

    @property
    def digest(self) -> str:
        """Of what the model sees and what grading compares with."""
        # Not the uid: whoever edits a problem keeps its number, and results of both would mix.
        parts = [self.text, self.history, self.answer_start, self.reference]
        parts += [picture.digest for picture in self.images]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def responses(self, count: int) -> list[PromptExample]:
        """Returns the problem ``count`` times, with different uids and so different seeds."""
        # The first keeps the uid alone: results of one response stay valid beside those of several.
        others = range(1, count)
        return [self, *(replace(self, uid=f"{self.uid}#{n}", response=n) for n in others)]


class Task(Component):
    """A benchmark or a source of prompts."""

    name: str
    split: str = "test"
    runs_code: bool = False
    """Whether grading executes model-written code (then ``allow_code_execution`` is required)."""
    is_graded: bool = True
    """Whether completions can be judged; plain prompts cannot."""
    is_soft: bool = False
    """Whether its accuracy is the mean of the verdicts' scores, not the share of right answers."""
    template: str | None = None
    """Text of the template given in place of the task's own (:mod:`lit_dlm.tasks.base`)."""

    @abstractmethod
    def examples(self) -> Sequence[PromptExample]:
        """All problems of the split in a stable order, after ``limit``."""

    @abstractmethod
    def reference_completion(self, example: PromptExample) -> str:
        """A completion that grades as right (used for self-checks and supervised training)."""

    @abstractmethod
    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The answer inside a completion, or ``None`` when there is none."""

    @abstractmethod
    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Grades one completion (text after the prompt, cut at the first end of text)."""


class DatasetTask(Task):
    """A task whose problems are the rows of a data set.

    Args:
        path: a local file or folder, or a hub id; the task's own data set by default.
        name: of the task in results and uids, to tell several files apart.
        split: the split to read, part of every uid; that of the benchmark by default.
        limit: most examples to take.
        seed: seed of a shuffle before the limit; by default the file's order is kept.
        template: how a row becomes a prompt: a shipped name, a file or a Jinja text
            (:mod:`lit_dlm.tasks.base`); the task's own by default.
        num_shots: worked examples in front of every prompt, in the same user turn: the first
            prompts of ``shots_path``, each followed by its reference completion.
        shots_path: where they come from; by default the split ``train`` of the task's own source.
    """

    hub_id: str | None = None
    hub_config: str | None = None
    required_fields: tuple[str, ...] = ()
    wanted_source = "a local file or a hub id"  # what an error asks for where there is none
    own_template = "{{ question }}"
    grading = "none"  # how a completion is compared with the answer of the reference, see GRADERS

    def __init__(
        self,
        path: str | None = None,
        *,
        name: str | None = None,
        split: str | None = None,
        limit: int | None = None,
        seed: int | None = None,
        template: str | None = None,
        num_shots: int = 0,
        shots_path: str | None = None,
    ) -> None:
        self.name = name or self.name
        self.split = split or self.split
        self._template = PromptTemplate(template, default=self.own_template)
        self.template = self._template.given
        self._shots = ""
        source = path or self.hub_id
        if source is None:
            raise ValueError(f"path: expected {self.wanted_source} for {self.name!r}, got none")
        if num_shots:
            shots = self._worked_examples(num_shots, shots_path or source, prompts=source)
            # For results, which record it; it is never rendered, since rows may hold any Jinja.
            self.template = f"{{% raw %}}{shots}{{% endraw %}}{self.template or self.own_template}"
            self._shots = re.sub("\r\n?", "\n", shots)  # line ends as Jinja writes them
        at_least(1, limit=limit)
        rows = self._rows(source, self.split, option="path")
        # Rows, which have their numbers, and not examples: a uid names the same problem always.
        if seed is not None:
            random.Random(seed).shuffle(rows)
        self._examples = [self._example(row) for row in rows[:limit]]

    def _rows(self, source: str, split: str, *, option: str) -> list[Row]:
        required = self.required_fields
        rows = read_rows(
            source, config=self.hub_config, split=split, required=required, option=option
        )
        return self._usable(rows, split)

    def _worked_examples(self, count: int, source: str, *, prompts: str) -> str:
        """Returns worked examples as one text; ``prompts`` is the source of the task's own."""
        # A file has no splits: its first rows would be both worked out and asked for.
        is_split = self.split != "train" and not Path(source).expanduser().is_file()
        if source == prompts and not is_split:
            raise ValueError(f"shots_path: expected other problems than those of {self.name!r}")
        rows = self._rows(source, "train", option="shots_path")
        within(f"[0, {len(rows)}]", num_shots=count)
        shots = [self._example(row) for row in rows[:count]]
        if any(one.images for one in shots):
            raise ValueError(f"num_shots: expected 0 where problems have pictures, got {count}")
        return "".join(f"{one.text}\n\n{self.reference_completion(one)}\n\n" for one in shots)

    def _usable(self, rows: list[Row], split: str) -> list[Row]:
        return rows

    @abstractmethod
    def _example(self, row: Row) -> PromptExample:
        """Returns the problem of a row."""

    def _prompt(
        self, row: Row, key: str, question: str, reference: dict[str, Any], **fields: Any
    ) -> PromptExample:
        """Makes a problem; its template sees the question, ``fields`` and the row's own fields."""
        # The row's fields come first, so that ``question`` is the task's own reading of them.
        rendered = self._template.render({**row.fields, "question": question, **fields})
        return PromptExample(
            uid=f"{self.name}/{self.split}/{key}",
            task=self.name,
            reference=reference,
            images=row.pictures(),
            **{**rendered, "text": self._shots + rendered["text"]},
        )

    def examples(self) -> Sequence[PromptExample]:
        return self._examples

    def reference_completion(self, example: PromptExample) -> str:
        return str(example.reference["answer"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        return GRADERS[self.grading].extract(completion)

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        grader = GRADERS[self.grading]
        if grader.grade is None:  # runs ask ``is_graded`` first; rewards of a user may not
            raise ValueError(f"{example.uid}: the task {self.name!r} has no grader")
        return grader.grade(completion, example.reference["answer"])


class CodeTask(DatasetTask):
    """Problems that are answered by Python code and graded by running their tests.

    The ``reference`` of an example holds the ``entry_point`` that is tested, its tests as
    ``check``, code put in front of the answer as ``stub``, and a ``solution``, perhaps empty.

    Args:
        path: a local file or folder, or a hub id.
        allow_code_execution: must be true to grade, which runs model-written code in the sandbox.
    """

    runs_code = True
    limits = SandboxLimits()  # what one sample may use

    def __init__(
        self, path: str | None = None, *, allow_code_execution: bool = False, **options: Any
    ) -> None:
        self.allow_code_execution = allow_code_execution
        super().__init__(path, **options)

    def reference_completion(self, example: PromptExample) -> str:
        if not example.reference["solution"]:
            raise ValueError(f"{example.uid}: the row has no field 'solution'")
        return python_block(example.reference["solution"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """Returns the module to run: the stub and the code of the completion."""
        return self._extracted(example, completion).code

    @staticmethod
    def _extracted(example: PromptExample, completion: str) -> ExtractedCode:
        reference = example.reference
        answer = example.answer_start + completion
        return extract_code(answer, reference["entry_point"], stub=reference["stub"])

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        extracted = self._extracted(example, completion)
        if (verdict := ungradable(extracted)) is not None:
            return verdict
        assert extracted.code is not None
        return self._graded(example, extracted.code)

    def _graded(self, example: PromptExample, code: str) -> Verdict:
        return run_python_check(
            code,
            example.reference["check"],
            example.reference["entry_point"],
            limits=self._limits_of(example),
            allow_code_execution=self.allow_code_execution,
            # HumanEval's tests call helpers of the stub; those of the candidate could be forged.
            preamble=whole_part(example.reference["stub"]),
        )

    def _limits_of(self, example: PromptExample) -> SandboxLimits:
        return self.limits


def tasks_by_name(tasks: Sequence[Task], *, option: str = "tasks") -> dict[str, Task]:
    """Returns the tasks of a run by name; ``option`` is the name of the setting, for errors."""
    by_name: dict[str, Task] = {}
    for task in tasks:
        checked_component(task, Task, option=option)
        if task.name in by_name:
            both = [f"{type(t).__name__} of split {t.split!r}" for t in (by_name[task.name], task)]
            twice = f"{task.name!r} twice ({' and '.join(both)})"
            raise ValueError(f"{option}: expected different names, got {twice}")
        by_name[task.name] = task
    return by_name


def require_code_execution(
    tasks: Iterable[Task], *, isolation: IsolationLevel = "landlock"
) -> IsolationLevel | None:
    """Refuses tasks whose code could not run in ``isolation`` at least; returns what it runs in."""
    running = [task for task in tasks if task.runs_code]
    for task in running:
        require_permission(getattr(task, "allow_code_execution", False), of=task.name)
    if not running:
        return None
    level = isolation_level()
    if isolation == "namespaces" and level != isolation:
        got = f"{level}, which is all that this machine gives ('lit-dlm doctor' says why)"
        way_out = f"or set require_isolation: {level} (SECURITY.md)"
        hint = f"; install bubblewrap, allow user namespaces, {way_out}"
        refuse("require_isolation", "namespaces", got, hint)
    return level


def check_uids(examples: Mapping[str, Sequence[PromptExample]]) -> None:
    """Refuses two prompts with one uid, whose results would be mixed up, and other tasks' names."""
    origins: dict[str, str] = {}
    for name, group in examples.items():
        for row, example in enumerate(group):
            origin = f"row {row} of task {name!r}"
            other = origins.setdefault(example.uid, origin)
            problem = ""
            if example.task != name:
                problem = f"task {name!r}, got {example.task!r} in {origin}"
            elif other != origin:
                problem = f"uids once, got {example.uid!r} for {other} and {origin}"
            if problem:
                raise ValueError(f"tasks: expected {problem}")


@cache
def shipped_templates(kind: Literal["prompt", "chat"]) -> dict[str, str]:
    """Returns the templates of releases by name: those of user turns, or chat templates."""
    path = files("lit_dlm") / "assets" / "templates.yaml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))[kind])


def template_text(given: str, *, kind: Literal["prompt", "chat"], option: str = "template") -> str:
    """Returns the text of a shipped name or file, or a given text (with ``{{`` or ``{%``)."""
    shipped = shipped_templates(kind)
    if given in shipped:
        return shipped[given]
    if "{{" in given or "{%" in given:
        return given
    path = Path(given).expanduser()
    if not os.path.isfile(path):  # no error where the name is too long
        texts = "a text with fields such as {{ question }}"
        refuse(option, f"a file, {texts}, or one of {', '.join(shipped)}", repr(given))
    return path.read_text(encoding="utf-8")


class PromptTemplate:
    """Makes the user turn of a problem, and the start of its answer where the template has one."""

    def __init__(self, given: str | None, *, default: str = "{{ question }}") -> None:
        self.given = None if given is None else template_text(given, kind="prompt")
        """The text given in place of the default, if any: recorded with results."""
        # Templates come with configurations of strangers: as chat templates in transformers, they
        # read their fields and do nothing else. An unknown field is an error, not an empty text.
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True
        )
        try:
            self._template = environment.from_string(self.given or default)
        except TemplateError as error:
            raise ValueError(f"template: {error} in {given!r}") from None

    def render(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        # As a module and not as a text, since a template may also set ``answer_start``.
        try:
            filled = self._template.make_module(dict(fields))
        except TemplateError as error:
            raise ValueError(f"template: {error} (there are: {', '.join(fields)})") from None
        return {"text": str(filled), "answer_start": str(getattr(filled, "answer_start", ""))}
