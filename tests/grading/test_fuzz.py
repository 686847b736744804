"""Whatever a candidate or a completion holds, graders answer with values or with errors of ours."""

import json
import os
import re
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from lit_dlm.grading.answers import extract_math, extract_number, last_boxed, parse_number
from lit_dlm.grading.child import extraction, wire
from lit_dlm.grading.child.compare import RULES, Case, judge
from lit_dlm.grading.child.remote import Handle, Remote, WorkerLostError
from lit_dlm.grading.notation import normalised

pytestmark = pytest.mark.slow

TAGS = "ltszdibycrqevkmajouxfpnh?"
_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["int", "zz", "0x1f", "00", "\ud800", "2024-02-29", "1e9", "x"])
)
_tagged = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(lambda tag, rest: [tag, *rest], st.sampled_from(TAGS), st.lists(inner))
        | st.dictionaries(st.sampled_from(["id", "value", "error", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)
_replies = st.binary(max_size=40) | _tagged.map(lambda value: json.dumps(value).encode())


@given(_tagged)
def test_decoding_gives_builtin_values_or_a_wire_error(structure: Any) -> None:
    try:
        value = wire.decode(structure)
    except wire.WireError:
        return
    library = ("builtins", "collections", "datetime", "decimal", "fractions")
    assert type(value).__module__ in library or type(value) is wire.Named


@given(st.binary(max_size=60))
@example(b"\xff\xff\xff\xff")
@example(b"\x00\x00\x00\x02[]\x00")
def test_streams_give_messages_or_an_error_of_ours(stream: bytes) -> None:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, stream)
    os.close(write_fd)
    channel = wire.Channel(read_fd, -1, max_bytes=50)
    read = b""
    try:
        while True:
            message = channel.receive()
            read += len(message).to_bytes(4, "big") + message
    except (wire.WireError, wire.ChannelClosedError):
        assert stream.startswith(read)
    finally:
        os.close(read_fd)


class _Liar:
    """A worker that gives one reply to everything, as the one it was asked for or as it is."""

    def __init__(self, reply: bytes, *, as_asked: bool) -> None:
        self.reply = reply
        self.as_asked = as_asked
        self.number = 0

    def send(self, message: dict[str, Any], *, deadline: float) -> None:
        self.number = message["id"]

    def receive(self, *, deadline: float | None = None) -> bytes:
        return b'{"id":%d,%s' % (self.number, self.reply) if self.as_asked else self.reply


_bodies = st.one_of(
    _replies,
    _tagged.map(lambda value: b'"value":%s}' % json.dumps(value).encode()),
    _tagged.map(lambda value: b'"value":["t",null,["d",1,%s]]}' % json.dumps(value).encode()),
    _tagged.map(lambda value: b'"error":%s}' % json.dumps(value).encode()),
    st.tuples(st.sampled_from(["ValueError", "OSError", "exit", "E", ""]), st.text()).map(
        lambda pair: b'"error":%s}' % json.dumps(pair).encode()
    ),
)


REQUESTS = {
    "load": lambda remote: all(type(name) is str for name in remote.load("x = 1")),
    "program": lambda remote: remote.start_program("x = 1") is None,
    "call": lambda remote: [Handle(remote, "f")(1, [2], x={3})],
    "get": lambda remote: [Handle(remote, 0).value],
    "set": lambda remote: not setattr(Handle(remote, 0), "value", 1),
    "raw": lambda remote: type(remote.call_encoded("f", ["t", 1], seconds=1)) is bytes,
}


@given(_bodies, st.booleans(), st.sampled_from(sorted(REQUESTS)))
@example(b'"error":["ValueError","x"]}', True, "call")
def test_whatever_a_worker_replies_is_a_value_or_its_failure(
    reply: bytes, as_asked: bool, request: str
) -> None:
    """An ``Exception`` is the candidate's, and then the remote knows of it."""
    liar: Any = _Liar(reply, as_asked=as_asked)
    remote = Remote(
        liar, wall_seconds=1, call_seconds=1, value_bytes=1 << 16, explain_end=lambda: ("", "")
    )
    remote.wait_until_ready()
    try:
        is_right = REQUESTS[request](remote)
    except WorkerLostError:
        assert remote.failure is None
    except Exception:
        assert remote.failure is not None
    else:
        assert is_right


@given(st.sampled_from(sorted(RULES)), _bodies)
def test_judging_never_fails_itself(rule: str, reply: bytes) -> None:
    case = Case(inputs=["t", ["l", 2, -3, 1]], alternative=8, atol=1e-4)
    failure = judge(RULES[rule], reply, b'"value":["l",3]}', case)
    assert failure is None or failure[0] in ("wrong", "runtime_error")


_code = st.lists(
    st.sampled_from(
        [
            *("```", "```python", "~~~", "\n", "    ", "def f(x):", "return x", "(", ")", "\\"),
            *("[PYTHON]", "[DONE]", "def g(x): return f(x)", "return g(x)"),
            *('"""', "try:", "finally:", "\0", "\ud800", "lambda:", "-", "7" * 5000, "f = 3"),
        ]
    ),
    max_size=24,
).map("\n".join)


@given(_code, _code)
def test_code_that_is_found_without_a_reason_compiles(completion: str, stub: str) -> None:
    for found in (
        extraction.extract_code(completion),
        extraction.extract_code(completion, "f", stub=stub),
    ):
        if found.reason:
            assert found.is_syntax_error is ("does not parse" in found.reason)
        else:
            assert found.code is not None
            compile(found.code, extraction.CANDIDATE_FILE, "exec", dont_inherit=True)


_text = st.lists(
    st.sampled_from(
        [
            *("\\boxed", "\\fbox", "\\box", "{", "}", "\\", " ", "5", "x", "####", "\n", "\\frac"),
            *("-", "/", ",", ".", "1,234", "9" * 401, "^", "$", "%", "\u2212", "\u0663"),
            *("2 1/3", "1\\ 000", "\\overline{3}", "\\text{", "or", "_2", "°", "\\sqrt{-1}"),
        ]
    ),
    max_size=16,
).map("".join)


@given(_text)
@example("\\frac{" + "7" * 5000 + "}{3}")
def test_any_text_has_an_answer_or_none(text: str) -> None:
    assert last_boxed(text) == _last_boxed_slowly(text)
    extract_math(text)
    number = extract_number(text)
    assert number is None or any(character.isdigit() for character in number)
    parse_number(text)
    normalised(text)


def _last_boxed_slowly(text: str) -> str | None:
    """Every box from the last, each searched for its own end."""
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?(?![a-zA-Z])\s*", text))):
        start = match.end()
        if start < len(text) and text[start] != "{":
            if text[match.start() + 1] == "b" and text[start].isalnum():
                return text[start]
            continue
        depth = 0
        for position in range(start, len(text)):
            if text[position] in "{}" and text[position - 1] != "\\":
                depth += 1 if text[position] == "{" else -1
                if depth == 0:
                    return text[start + 1 : position].strip()
    return None
