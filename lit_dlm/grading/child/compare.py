"""Compares what a candidate returned with what the reference solution did, by EvalPlus's rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from . import wire


class Case(NamedTuple):
    """What a rule may look at besides the two values; inputs and alternative are encoded."""

    inputs: Any
    alternative: Any  # another right output, for the rule either
    atol: float


Rule = Callable[[Any, Any, Case], bool]  # (output, expected, case) -> whether the output is right


def judge(rule: Rule, reply: bytes, truth: bytes, case: Case) -> tuple[str, str] | None:
    """Returns how the candidate's reply fails, as status and detail, or ``None`` if right."""
    # Equal bytes are equal values. Some problems return megabytes for each of a thousand inputs:
    # decode only what may differ.
    if reply == truth and b'["h"' not in reply:
        return None
    expected = read_reply(truth)[1]
    ok, value = read_reply(reply)
    if not ok:
        return "runtime_error", str(value)
    try:
        right = rule(value, expected, case)
    except Exception:  # a value of a shape, or of a size, that the rule cannot take
        right = False
    return None if right else ("wrong", f"expected {_short(expected)}, got {_short(value)}")


def read_reply(reply: bytes) -> tuple[bool, Any]:
    """Returns ``(True, value)``, of builtin types, or ``(False, "Type: message")``."""
    # An object that stayed in the worker, such as a match, equals nothing.
    try:
        message = wire.parse(b"{" + reply)
        if "error" in message:
            return False, ": ".join(str(part) for part in message["error"])
        return True, wire.decode(message["value"], from_handle=lambda _number: object())
    except (wire.WireError, KeyError, TypeError) as error:
        return False, str(error)


def outputs_match(output: Any, expected: Any, *, atol: float = 0.0) -> bool:
    """Compares a returned value with the expected one by EvalPlus's rules.

    Equal values match. Otherwise, if ``atol`` is positive, or the expected value is a float or a
    non-empty list or tuple of floats (then ``atol`` is 1e-6), the types and lengths must be the
    same and the numbers within ``atol + 1e-7 * |expected|``. EvalPlus keeps that 1e-6 for all later
    inputs of a task once it has seen a float; here each input is judged on its own.
    """
    if output == expected:
        return True
    if atol == 0 and _is_floats(expected):
        atol = 1e-6
    if atol == 0 or type(output) is not type(expected):
        return False
    return _all_close(output, expected, atol)


def _is_floats(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _all_close(output: Any, expected: Any, atol: float) -> bool:
    if isinstance(expected, list | tuple):
        return (
            isinstance(output, list | tuple)
            and len(output) == len(expected)
            and all(_all_close(o, e, atol) for o, e in zip(output, expected, strict=True))
        )
    numbers = int | float | complex
    if not isinstance(output, numbers) or not isinstance(expected, numbers):
        return False
    try:
        if output == expected:
            return True
        difference = abs(output - expected)
        return math.isfinite(difference) and difference <= atol + 1e-7 * abs(expected)
    except OverflowError:
        return False


def _is_either(output: Any, expected: Any, case: Case) -> bool:
    other = wire.decode(case.alternative)
    return output in (expected, other) or abs(output - other) <= case.atol


def _is_root(output: Any, _expected: Any, case: Case) -> bool:
    """HumanEval/32 asks for any root of a polynomial: the value at the root must be about 0."""
    factors = wire.decode(case.inputs)[0]
    value = sum(factor * math.pow(output, power) for power, factor in enumerate(factors))
    return abs(value) <= case.atol


def _is_found_alike(output: Any, expected: Any, _case: Case) -> bool:
    """Whether both found something or both nothing; a candidate's ``bool`` says so directly."""
    found = output if isinstance(output, bool) else output is not None
    return found == (expected is not None)


RULES: dict[str, Rule] = {
    "close": lambda output, expected, case: outputs_match(output, expected, atol=case.atol),
    "same_set": lambda output, expected, _case: set(output) == set(expected),
    "found_alike": _is_found_alike,
    "either": _is_either,
    "root": _is_root,
    "anything": lambda _output, _expected, _case: True,
}
"""Rules by name; all but ``close`` are for problems with more than one right output."""


def _short(value: Any) -> str:
    # Python refuses the repr of integers with more than 4300 digits.
    if isinstance(value, int) and abs(value) >= 1 << 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."
