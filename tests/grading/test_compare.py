"""Comparing returned values with expected ones."""

import json
import math
from typing import Any

import pytest

from lit_dlm.grading.child import wire
from lit_dlm.grading.child.compare import RULES, Case, judge, outputs_match


@pytest.mark.parametrize(
    ("output", "expected", "atol", "match"),
    [
        (1, 1.0, 0, True),
        (True, 1, 0, True),
        ([1, 2], (1, 2), 0, False),
        (0.1 + 0.2, 0.3, 0, True),  # an expected float brings its own 1e-6
        (0.3 + 2e-6, 0.3, 0, False),
        ([0.3], [0.3 + 1e-9], 0, True),
        ((0.3,), [0.3], 0, False),
        ([0.3, 0.3], [0.3], 0, False),
        ([0.3, 1], [0.3 + 1e-9, 1], 0, False),  # not all floats, so exactly
        ([0.3, 1], [0.3 + 1e-9, 1], 1e-6, True),
        (3, 4, 1, True),
        (3, 4.0, 1, False),  # the type must be the same
        (1e9, 1e9 + 50, 0, True),  # 1e-6 + 1e-7 * 1e9 = 100
        (1e9, 1e9 + 200, 0, False),
        (math.inf, math.inf, 0, True),
        (math.inf, 1.0, 0, False),
        (math.nan, math.nan, 0, False),
        (complex(1, 1e-5), complex(1, 0), 1e-4, True),
        ("a", "a", 1e-4, True),
        ("a", "b", 1e-4, False),
        ([[0.5]], [[0.5 + 1e-7]], 1e-6, True),
        (None, 0.0, 1e-6, False),
    ],
)
def test_outputs_match_within_tolerance(output, expected, atol, match):
    assert outputs_match(output, expected, atol=atol) is match


@pytest.mark.parametrize(
    ("rule", "output", "right"),
    [
        ("root", 1.0, True),  # 2 - 3x + x^2 = (x - 1)(x - 2)
        ("root", 2.00001, True),
        ("root", 1.5, False),
        ("root", "1", False),
        ("root", complex(1), False),
        ("same_set", [3, 3], True),
        ("same_set", [3, 4], False),
        ("same_set", 3, False),
        ("found_alike", [7], True),
        ("found_alike", None, False),
        ("found_alike", False, False),
        ("either", [3], True),
        ("either", 8, True),
        ("either", 8.00001, True),
        ("either", 9, False),
        ("either", "8", False),
        ("anything", None, True),
        ("close", [3.0], True),
        ("close", (3,), False),
    ],
)
def test_rules(rule: str, output: Any, right: bool) -> None:
    """Expected is ``[3]``, the alternative 8, the tolerance 1e-4, the input 2 - 3x + x^2."""

    def reply(value: Any) -> bytes:
        return b'"value":' + json.dumps(wire.encode(value)).encode() + b"}"

    case = Case(inputs=wire.encode(([2, -3, 1],)), alternative=wire.encode(8), atol=1e-4)
    failure = judge(RULES[rule], reply(output), reply([3]), case)
    assert (failure is None) is right
    if failure is not None:
        assert failure == ("wrong", f"expected [3], got {output!r}")


def test_replies_that_are_none_are_failures() -> None:
    case = Case(inputs=None, alternative=None, atol=0.0)
    for reply in (b"", b'"value":["?"]}', b'"value":', b'"error":7}', b'"id":1}'):
        assert judge(RULES["anything"], reply, b'"value":1}', case)[0] == "runtime_error"  # type: ignore[index]
