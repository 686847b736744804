"""Answers questions about untrusted text, one JSON line in, one out, until end of input.

Compiling a text, comparing two formulas or rendering a template can take any amount of time and
memory and can crash the interpreter. The kernel's alarm limits each question: nothing keeps running
when the asker is gone.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

_START_SECONDS = 120.0
_MEMORY_BYTES = {"extraction": 1 << 30, "math": 3 << 30, "template": 1 << 30}
_LONGEST_TEXT = 32 << 20
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def main() -> NoReturn:
    """Answers the kind of questions that the command line names, ``extraction`` or another."""
    kinds = {"extraction": _answer_extraction, "math": _answer_math, "template": _answer_template}
    kind = sys.argv[1]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.setitimer(signal.ITIMER_REAL, _START_SECONDS)
    answer = kinds[kind]()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES[kind],) * 2)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    _say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, max(request["seconds"], 1e-3))  # 0 would be none
        reply = answer(**request["question"])
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _say(reply)
    sys.exit(0)


def _say(reply: Any) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def _answer_extraction() -> Callable[..., Any]:
    from . import extraction

    warnings.simplefilter("ignore")

    return lambda **question: dataclasses.asdict(extraction.extract_code(**question))


def _answer_math() -> Callable[..., Any]:
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def equal(gold: str, answer: str) -> bool:
        # math-verify's own limits rely on signals, which work only in main threads.
        truth = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
        candidate = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        # By default 3.142857 is 22/7, and 1 <= x <= 3 is not [1, 3].
        options = {"float_rounding": 9, "allow_set_relation_comp": True, "timeout_seconds": None}
        return bool(truth and candidate and verify(truth, candidate, **options))

    return equal


def _answer_template() -> Callable[..., Any]:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would count as memory
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it would take seconds
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(template: str, turns: list[dict[str, Any]], values: Any) -> dict[str, str]:
        # As a tokenizer of transformers does.
        chat = [{key: value for key, value in turn.items() if value is not None} for turn in turns]
        try:
            text = render_jinja_template([chat], chat_template=template, **values)[0][0]
        except (TemplateError, *_FAULTS) as error:  # of the template or its expressions
            return {"problem": " ".join(str(error).split())[:500]}
        if len(text) > _LONGEST_TEXT:
            return {"problem": f"it makes more than {_LONGEST_TEXT >> 20} Mi characters"}
        return {"text": text}

    return render
