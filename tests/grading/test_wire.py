"""Encoding then decoding is the identity on plain values; hostile bytes never become objects."""

import collections
import datetime
import functools
import json
import math
import os
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lit_dlm.grading.child import remote, wire

_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
_hashable = st.recursive(
    _leaves, lambda inner: st.tuples(inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(_hashable, max_size=4)
        | st.dictionaries(_hashable, inner, max_size=4)
    ),
    max_leaves=20,
)


def _there_and_back(value):
    return wire.decode(json.loads(json.dumps(wire.encode(value))))


def _same(a, b):
    """Equality that also compares types at every level (1 == 1.0 == True in Python)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return all(map(_same, list(a.items()), list(b.items())))
    return a == b


@pytest.mark.slow
@given(_values)
@settings(max_examples=60, deadline=None)
def test_decoding_undoes_encoding_with_types(value):
    assert _same(_there_and_back(value), value)


LONG = pytest.param(10**5000, id="long")


@pytest.mark.parametrize(
    "value", [-0.0, math.inf, -math.inf, math.nan, LONG, -(2**53), 2**53, range(3), int, str]
)
def test_values_json_handles_badly_survive(value):
    (back,) = _there_and_back([value])
    assert back == value or (back != back and value != value)
    assert type(back) is type(value)
    if value == 0:
        assert math.copysign(1, back) == -1


LIES = {
    "__eq__": lambda self, other: True,
    "__iter__": lambda self: iter([42]),
    "__hash__": lambda self: 0,
}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (type("Lies", (list,), LIES)([1, 2]), [1, 2]),
        (type("Lies", (int,), LIES)(7), 7),
        (type("Lies", (datetime.date,), LIES)(2024, 2, 29), datetime.date(2024, 2, 29)),
        (type("Lies", (Decimal,), LIES)("1e-3"), Decimal("0.001")),
        (type("Lies", (Fraction,), LIES)(1, 3), Fraction(1, 3)),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
    ],
)
def test_subclasses_become_their_plain_base(value, plain):
    """What a subclass overrides (``__eq__``, ``__iter__``) has no effect on the far side."""
    back = _there_and_back(value)
    assert type(back) is type(plain)
    assert back == plain


def test_named_tuples_are_tuples_with_their_fields() -> None:
    """There and back again, with a field that has the name of a method of tuples."""
    point = collections.namedtuple("Point", "x count")(1, [2])
    back = _there_and_back(_there_and_back(point))
    assert back == point == (1, [2])
    assert (back.x, back.count, type(back).__bases__) == (1, [2], (tuple,))
    with pytest.raises(AttributeError):
        back.y  # noqa: B018


@pytest.mark.parametrize(
    "value",
    [
        *(datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.time(1, 2, 3, 4)),
        datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
        *(datetime.timedelta.min, datetime.timedelta.max, datetime.timedelta(1, 2, 3)),
        *(Decimal("1E+999999999"), Decimal("-0"), Decimal("sNaN"), Decimal("7" * 5000)),
        *(Fraction(-1, 3), Fraction(2**60, 3)),
    ],
)
def test_values_of_the_standard_library_survive(value: Any) -> None:
    back = _there_and_back(value)
    assert (type(back), repr(back)) == (type(value), repr(value))


def test_iterators_are_drained_and_views_stay_views():
    assert list(_there_and_back(x * x for x in (1, 2))) == [1, 4]
    assert list(_there_and_back(collections.deque([1, [2]]))) == [1, [2]]
    assert _there_and_back(bytearray(b"\0a")) == bytearray(b"\0a")
    assert _there_and_back({1: 2}.keys()) == {1}
    assert sorted(_there_and_back({1: 2}.values())) == [2]
    assert _there_and_back({1: 2}.items()) == {(1, 2)}


LOOP: list = []
LOOP.append(LOOP)
# 2**40 leaves from 41 small lists.
DOUBLED = functools.reduce(lambda inner, _: [inner, inner], range(40), [0.5])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([object()], "type object"),
        (len, "type builtin_function_or_method"),
        (LOOP, "nested"),
        (DOUBLED, "too large"),
        (iter(int, 1), "too large"),
    ],
)
def test_what_cannot_be_sent_is_refused(value, message):
    with pytest.raises(wire.WireError, match=message):
        wire.encode(value, max_bytes=1 << 16)


def test_unknown_objects_travel_by_handle():
    assert wire.encode([object()], to_handle=lambda _: 3) == ["l", ["h", 3]]
    assert wire.decode(["l", ["h", 3]], from_handle=lambda n: f"#{n}") == ["#3"]


@pytest.mark.parametrize(
    "hostile",
    [
        *({}, {"a": 1}, [], [1], ["?"], ["i"], ["i", "zz"], ["b", "0"], ["d", 1], ["c", "x", 1]),
        *(["d", ["l"], 1], ["r", 1, 2, 0], ["k", ["l"]], ["m", 1], ["s", ["l"]]),
        *(["a", "2024"], ["a", 1], ["a"], ["j", "2024-02-30"], ["j", "x", "y"], ["o", None]),
        *(["u", 0, 0, 1e300], ["u", "x"], ["x", "one"], ["x", 1], ["x", ["f", 1, 2]], ["x"]),
        *(["f", 1, 0], ["f", "1e999999999"], ["f", 0.5], ["f", 1, 2, 3], ["s", ["x", "sNaN"]]),
        *(["p", 1], ["p", ["l", "__eq__"], 1], ["p", ["l", "x"]], ["p", ["l", "x", "y"], 1]),
        *(["p", ["l", 1], 1], ["p", ["l", ""], 1], ["p", ["l", "a b"], 1], ["p", "", 1], ["p"]),
        *(["n", "len"], ["n", "__import__"], ["n", 3], ["h", 3], ["l", ["h"]]),
    ],
)
def test_malformed_structures_are_errors(hostile):
    with pytest.raises(wire.WireError):
        wire.decode(hostile)


def test_channel_respects_deadline_limit_and_end():
    read_fd, write_fd = os.pipe()
    channel = wire.Channel(read_fd, write_fd, max_bytes=100)
    with os.fdopen(read_fd), os.fdopen(write_fd, "wb", buffering=0) as sender:
        channel.send([1, "two"])
        assert wire.parse(channel.receive()) == [1, "two"]
        with pytest.raises(wire.WireError, match="over 100"):
            channel.send("x" * 200)
        with pytest.raises(wire.ChannelTimeoutError):
            channel.receive(deadline=time.monotonic() + 0.02)
        sender.write(b"\x7f\xff\xff\xff")
        with pytest.raises(wire.WireError, match="over 100"):
            channel.receive()
        sender.write(b"\x00\x00\x00\x01{")
        with pytest.raises(wire.WireError, match="not JSON"):
            wire.parse(channel.receive())
        sender.close()
        with pytest.raises(wire.ChannelClosedError):
            channel.receive()


def test_the_time_to_put_the_walls_up_is_not_the_candidates(monkeypatch):
    """Ready after 8 s of 10 at clock 100: the limit of half a second ends at 108.5."""
    clock = [100.0]
    deadlines: list[float] = []

    class Channel:
        def send(self, message, *, deadline):
            deadlines.append(deadline)

        def receive(self, *, deadline=None):
            deadlines.append(deadline)
            clock[0] += 8.0 if deadline is None else 0.0
            return b'{"id":1,"value":["f"]}'

    monkeypatch.setattr(remote.time, "monotonic", lambda: clock[0])
    explain = lambda: ("", "")  # noqa: E731
    worker = remote.Remote(
        Channel(), wall_seconds=0.5, call_seconds=9, value_bytes=1 << 10, explain_end=explain
    )
    worker.wait_until_ready()
    assert worker.load("def f(): pass") == ["f"]
    assert deadlines == [None, 108.5, 108.5]
