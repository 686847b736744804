"""A scripted conversation: answers, the switches of the decoder, and what went wrong."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

import cli
from lit_dlm.decoding import (
    BlockWindow,
    ConfidencePolicy,
    Decoder,
    DualCache,
    NoQuota,
    ThresholdPolicy,
)
from lit_dlm.generation import generate

PENS = "Tom has 34 pens, finds 7, loses 5. How many pens?"
MORE = "Leo has 8 nuts, sells 4, eats 4. How many nuts?"


def talk(capsys: pytest.CaptureFixture[str], monkeypatch: Any, *lines: str, **options: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    cli.main(["chat", "--response_length=32", *(f"--{k}={v}" for k, v in options.items())])
    return capsys.readouterr().out


def answer(messages: list[str], decoder: Decoder, length: int = 32) -> tuple[str, int]:
    """The answer of Python to turns of user and assistant in turn."""
    roles = ["user", "assistant"] * len(messages)
    turns = [{"role": r, "content": m} for r, m in zip(roles, messages, strict=False)]
    done = generate("tiny", [turns], decode=decoder, response_length=length)
    return done.texts[0], done.num_steps[0]


def test_policy_and_cache_change_on_the_way(capsys, monkeypatch):
    out = talk(
        capsys, monkeypatch, PENS, "/new", "/policy threshold_09", PENS,
        "/policy confidence_dual", "/length 16", MORE, "/quit", "never said",
    )  # fmt: skip
    first, steps = answer([PENS], Decoder(policy=ConfidencePolicy()))
    second, fewer = answer([PENS], Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota()))
    dual = Decoder(policy=ConfidencePolicy(), window=BlockWindow(32), cache=DualCache())
    third, few = answer([PENS, second, MORE], dual, 16)
    assert re.findall(r"in (\d+) steps", out) == [str(steps), str(fewer), str(few)]
    assert fewer < steps == 32
    for text in (first, second, third):
        assert text in out
    assert out.count("tokens/s") == 3
    assert "ThresholdPolicy, NoCache, 32 cells, 0 messages before" in out
    assert "ConfidencePolicy, DualCache, 16 cells, 2 messages before" in out


def test_a_bad_switch_is_told_and_changes_nothing(capsys, monkeypatch):
    out = talk(
        capsys, monkeypatch, "/policy nothing_such", "/cache dual", "/length 0", "/what",
        "/cache none", PENS,
    )  # fmt: skip
    assert "ConfidencePolicy, DualCache, 32 cells" in out
    assert out.count("/policy NAME") == 2  # the list of commands, for the last two bad ones
    assert answer([PENS], Decoder(policy=ConfidencePolicy()))[0] in out
    assert "32 cells, 0 messages before" in out
