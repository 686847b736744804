from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cli
from lit_dlm.decoding import Decoder, NoQuota, ThresholdPolicy
from lit_dlm.generation import generate

ROOT = Path(__file__).resolve().parents[2]
PENS = "Tom has 34 pens, finds 7, loses 5. How many pens?"
NUTS = "Leo has 8 nuts, sells 4, eats 4. How many nuts?"
SHORT = ["--response_length", "32"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    cli.main(["generate", *arguments])
    return capsys.readouterr().out


def test_a_pipe_gets_the_texts_of_python(capsys):
    expected = generate(
        "tiny",
        [PENS, NUTS],
        decode=Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota()),
        response_length=32,
    ).texts
    flags = ["--policy", "ThresholdPolicy", "--policy.threshold", "0.9", "--quota", "NoQuota"]
    assert run(capsys, PENS, NUTS, *SHORT, *flags) == "{}\n\n{}\n".format(*expected)
    assert "#### 36" in expected[0]


def test_prompts_come_line_by_line_and_the_decoder_from_its_file(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PENS}\n\n  {NUTS}\n"))
    config = ["--config", str(ROOT / "configs" / "decode" / "confidence_dual.yaml")]
    from_lines = run(capsys, *SHORT, *config)
    assert from_lines == run(capsys, PENS, NUTS, *SHORT, *config, "--batch_size", "1")
    assert "#### 36" in from_lines


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "prompts: expected some as arguments, or lines on standard input"),
        (["Hi", "--backbone", "nowhere"], "'nowhere' is neither an existing folder nor"),
        (["Hi", "--response_length", "0"], "response_length: "),
        (["Hi", "--policy", "JacobiPolicy"], "layout: JacobiPolicy"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, arguments: list[str], told: str):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit, match=r"[12]"):
        cli.main(["generate", *arguments])
    error = capsys.readouterr().err
    assert error.startswith("lit-dlm: error: ")
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.slow  # starts the command line
def test_a_terminal_sees_the_decode_and_then_the_text():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "cli.py", "generate", PENS, *SHORT],
        cwd=ROOT, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    output = b""
    while True:
        try:
            output += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    assert process.wait() == 0, process.stderr and process.stderr.read()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert "░" in text
    assert "(32 forwards)" in text
    assert text.rstrip().splitlines()[-1].endswith("#### 36")
