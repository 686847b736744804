"""Spans of a canvas that a forward runs over, and the origin that blocks are counted from."""

from __future__ import annotations

from typing import Literal, NamedTuple

BlockOrigin = Literal["sequence", "response"]
"""Where blocks are counted from: the first real token of a row (the generators of SDAR and dLLM-RL;
the tail of a prompt then shares the first block that is generated), or the first column of the
response."""


class Span(NamedTuple):
    """The window of one row: columns ``[begin, end)`` run and see the columns ``[0, kv_end)``."""

    begin: int
    end: int
    kv_end: int
