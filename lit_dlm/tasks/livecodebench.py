"""LiveCodeBench (arXiv 2403.07974): problems of programming contests, from the release's files."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from dataclasses import replace
from typing import Any

from lit_dlm.grading import SandboxLimits, Verdict
from lit_dlm.grading.code import extract_code, python_block
from lit_dlm.tasks.base import PromptExample
from lit_dlm.tasks.code_tests import CodeTests
from lit_dlm.tasks.sources import Row, refusing

# What the release puts in front of answers, in its order, and its time limit for each test.
_MODULES = (
    "string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, "
    "functools, operator, io, sys, json"
)
_STARS = "\n".join(f"from {name} import *" for name in f"{_MODULES}, builtins, typing".split(", "))
_SECONDS = 6.0
_UNREADABLE = (binascii.Error, zlib.error, ValueError, TypeError, KeyError)


class LiveCodeBench(CodeTests):
    """Problems of LiveCodeBench's ``code_generation`` and ``code_generation_lite`` files.

    A problem without starter code is answered by a program, one with it by a class ``Solution`` or
    by its method as a plain function. Public and private tests count. Templates are also given
    ``starter_code``. A file is, for example, ``test6.jsonl`` of the release. Other than there,
    numbers in outputs are compared as text (the release accepts 1.0 for 1), and the program is the
    last block that is tagged as Python (there of any kind).
    """

    name = "livecodebench"
    by_line = True
    required_fields = ("question_content", "public_test_cases", "private_test_cases")
    own_prefix = f"{_STARS}\nimport {_MODULES}\nsys.setrecursionlimit(50000)\n"
    own_template = (
        "{{ question }}\n\n{% if starter_code %}Complete this code:\n\n```python\n"
        "{{ starter_code }}\n```\n\nAnswer with the whole class in one fenced python block."
        "{% else %}Write a Python program that reads from standard input and prints its result. "
        "Answer with the whole program in one fenced python block.{% endif %}"
    )

    def _example(self, row: Row) -> PromptExample:
        tests = [*_tests(row, "public_test_cases"), *_tests(row, "private_test_cases")]
        fields: dict[str, Any] = {
            "question": row.text("question_content"),
            "starter_code": row.fields.get("starter_code") or "",
            "test_time_limit": _SECONDS,
            "prefix": "",
        }
        if fields["starter_code"]:
            method = re.findall(r"def (\w+)\(self", fields["starter_code"])
            row.expect(bool(method), "a method in field 'starter_code'", fields["starter_code"])
            fields["method"] = method[-1]
            fields["test_method"] = "function"
            # As in the release, a tuple is as good as a list. The test says so itself: values are
            # compared in the sandbox's trusted process, which knows nothing of this benchmark.
            fields["test_list"] = [
                "assert (lambda value: [*value] if isinstance(value, tuple) else value)("
                f"Solution().{method[-1]}(*{_values(test['input'])!r})) == "
                f"{json.loads(test['output'])!r}"
                for test in tests
            ]
        else:
            fields["test_method"] = "stdio"
            fields["test_input"] = [test["input"] for test in tests]
            fields["test_output"] = [test["output"] for test in tests]
        example = super()._example(replace(row, fields=fields))
        example.reference["method"] = fields.get("method")
        return example

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        method, stub = example.reference["method"], example.reference["stub"]
        # As in the release, the method may be a plain function. Tests ask for the class, so one is
        # put around it, where there is none.
        if method is not None and self._extracted(example, completion).reason:
            code = extract_code(example.answer_start + completion, method, stub=stub)
            if not code.reason:
                solution = f"class Solution:\n    {method} = staticmethod({method})"
                example = replace(example, answer_start="")
                completion = python_block(f"{code.code}\n\n\n{solution}")
        return super().grade(example, completion)

    def _limits_of(self, example: PromptExample) -> SandboxLimits:
        # One process runs all tests and has the sum of their times; what a single test may take is
        # the limit of a call.
        seconds = example.reference["seconds"]
        whole = seconds * (1 + len(example.reference.get("test_list", ())))
        return replace(self.limits, wall_seconds=whole, cpu_seconds=whole, call_seconds=seconds)


def _values(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _tests(row: Row, name: str) -> list[dict[str, str]]:
    """Reads tests: JSON, or a pickled text, zipped, in base64, which is read from its opcodes."""
    text = row.text(name)
    with refusing(f"{row.origin}: field {name!r} holds no tests", *_UNREADABLE):
        if not text.lstrip().startswith("["):
            packer = zlib.decompressobj()
            # zlib packs up to a thousand to one: a row of some megabytes could fill the memory.
            limit = (64 << 20) + 20 * len(text)
            packed = packer.decompress(base64.b64decode(text, validate=True), limit)
            if packer.unconsumed_tail:
                raise ValueError(f"expected at most {limit} bytes")
            # Loading a pickle runs whatever it names. This one is a single text, which the opcodes
            # hold as an argument, beside short ones of the protocol.
            strings = [arg for _, arg, _ in pickletools.genops(packed) if isinstance(arg, str)]
            text = max(strings, key=len)
        tests = json.loads(text)
        return [{key: str(test[key]) for key in ("input", "output")} for test in tests]
