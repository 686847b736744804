"""Texts of one prompt or many, in a pipe and a terminal, and a scripted conversation."""

import io
import os
import pty
import random
import re
import subprocess
import sys

import pytest

import cli
from lit_dlm import decoding
from lit_dlm.backbones import load_tokenizer
from lit_dlm.commands.generation import unknown_words_hint
from lit_dlm.decoding import ConfidencePolicy, Decoder, NoQuota, ThresholdPolicy
from lit_dlm.generation import generate
from lit_dlm.toy import PythonFunctions, WordProblems
from lit_dlm.tracelock.policy import TraceLockPolicy
from tests.e2e.runs import ROOT, fails

PENS = "Tom has 34 pens, finds 7, loses 5. How many pens?"
NUTS = "Leo has 8 nuts, sells 4, eats 4. How many nuts?"
SHORT = ["--response_length", "32"]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs a command with lines on its standard input, and gives what it prints."""

    def run(*arguments: str, typed: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        cli.main([*arguments, *SHORT])
        return capsys.readouterr().out

    return run


def test_a_pipe_gets_the_texts_of_python(said):
    decoder = Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota())
    expected = generate("tiny", [PENS, NUTS], decode=decoder, response_length=32).texts
    flags = ["--policy", "ThresholdPolicy", "--policy.threshold", "0.9", "--quota", "NoQuota"]
    assert said("generate", PENS, NUTS, *flags) == "{}\n\n{}\n".format(*expected)
    assert "#### 36" in expected[0]


def test_prompts_come_line_by_line_and_the_decoder_from_its_file(said):
    config = ["--config", "decode/threshold_09_dual"]
    from_lines = said("generate", *config, typed=f"{PENS}\n\n  {NUTS}\n")
    assert from_lines == said("generate", PENS, NUTS, *config, "--batch_size", "1")
    assert "#### 36" in from_lines
    config = [
        "--config",
        "decode/tracelock",
        "--policy.path",
        "tiny",
    ]  # a file that names its class
    policy = TraceLockPolicy(path="tiny", threshold=0.99, max_accept_per_step=None)
    decoder = Decoder(policy=policy, quota=NoQuota())
    (expected,) = generate("tiny", [PENS], decode=decoder, response_length=32).texts
    assert said("generate", PENS, *config) == f"{expected}\n"
    assert expected


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "prompts: expected some as arguments, or lines on standard input"),
        (["Hi", "--backbone", "nowhere"], "'nowhere' is neither an existing folder nor"),
        (["Hi", "--response_length", "0"], "response_length: "),
        (["Hi", "--config", "decode/tracelock"], "policy.path: expected a folder with a trained"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, arguments: list[str], told: str):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit, match=r"[12]"):
        cli.main(["generate", *arguments])
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("lit-dlm: error: ")
    assert told in error


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
    assert process.wait() == 0, process.stderr.read()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert "░" in text
    assert "(32 forwards)" in text
    assert text.rstrip().splitlines()[-1].endswith("#### 36")


def test_tiny_says_what_it_knows_when_a_word_is_strange_to_it(said, caplog):
    """In a conversation where the answers are; beside a pipe, whose texts stay alone."""
    assert said("generate", PENS).endswith("#### 36\n")
    assert not caplog.messages
    out = said("generate", f"Hello. {PENS}")
    assert "never saw" not in out
    (told,) = caplog.messages
    assert told.startswith("tiny never saw 'Hello': it is a toy of half a million parameters")
    assert told.endswith(f"with --response_length 32 it answers '{PENS}'")
    out = said("chat", typed=f"{PENS}\nHello.\n")
    assert out.count("tiny never saw") == out.count("tiny never saw 'Hello'") == 1


def answer(messages: list[str], decoder: Decoder, length: int = 32) -> tuple[str, int]:
    """The answer of Python to turns of user and assistant in turn."""
    roles = ["user", "assistant"] * len(messages)
    turns = [{"role": r, "content": m} for r, m in zip(roles, messages, strict=False)]
    done = generate("tiny", [turns], decode=decoder, response_length=length)
    return done.texts[0], done.num_steps[0]


def test_policy_and_cache_change_on_the_way(said):
    typed = f"{PENS}\n/new\n/policy threshold_09\n{PENS}\n/policy confidence_dual\n/length 16\n"
    out = said("chat", typed=f"{typed}{NUTS}\n/quit\nnever said\n")
    first, steps = answer([PENS], Decoder(policy=ConfidencePolicy()))
    second, fewer = answer([PENS], Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota()))
    dual = Decoder(
        policy=ConfidencePolicy(), window=decoding.BlockWindow(32), cache=decoding.DualCache()
    )
    third, few = answer([PENS, second, NUTS], dual, 16)
    assert re.findall(r"in (\d+) steps", out) == [str(steps), str(fewer), str(few)]
    assert fewer < steps == 32
    for text in (first, second, third):
        assert text in out
    assert out.count("tokens/s") == 3
    assert "ThresholdPolicy, NoCache, 32 cells, 0 messages before" in out
    assert "ConfidencePolicy, DualCache, 16 cells, 2 messages before" in out


def test_a_block_model_keeps_its_blocks_when_another_plug_changes(said, tmp_path):
    backbone = tmp_path / "blocks.yaml"
    spec = "{attention: block, block_size: 8}"
    text = f"class_path: HFBackbone\ninit_args: {{path: tiny, spec_overrides: {spec}}}\n"
    backbone.write_text(text)
    out = said("chat", f"--backbone={backbone}", typed="/cache block\n/policy threshold_09\n")
    assert "ConfidencePolicy, BlockCache, 32 cells" in out
    assert "ThresholdPolicy, BlockCache, 32 cells" in out


def test_the_same_is_answered_by_another_draw(said):
    decoder = Decoder(policy=ConfidencePolicy(), sampler=decoding.Sampler(temperature=2.0))
    asked = [[{"role": "user", "content": PENS}]]
    one, two = (
        generate("tiny", asked, decode=decoder, response_length=32, uids=[turn]).texts[0]
        for turn in "12"
    )
    out = said("chat", "--sampler.temperature=2", typed=f"{PENS}\n/new\n{PENS}\n")
    assert out.index(one) < out.index("0 messages before") < out.index(two)


def test_a_value_out_of_range_is_told_in_one_line(capsys: pytest.CaptureFixture[str]):
    error = fails(capsys, "generate", PENS, "--sampler.temperature=-1")
    assert re.fullmatch(r"lit-dlm: error: \S*temperature: expected 0 or more, got -1\.0", error)


def test_a_bad_switch_is_told_and_changes_nothing(said):
    typed = f"/policy nothing_such\n/cache dual\n/length 0\n/what\n/cache none\n{PENS}\n"
    out = said("chat", typed=f"/length 8\n{typed}")
    assert "ConfidencePolicy, DualCache, 8 cells" in out
    assert out.count("unknown command '/what'") == out.count("unknown command") == 1
    assert out.count("/policy NAME") == 2  # the list of commands, for the last two bad ones
    assert answer([PENS], Decoder(policy=ConfidencePolicy()), 8)[0] in out
    assert "8 cells, 0 messages before" in out


def test_words_that_tiny_never_saw_are_told_and_no_others():
    tokenizer = load_tokenizer("tiny")
    told = unknown_words_hint(tokenizer, "What is 2 and 2? How many pens, Anna?")
    assert told is not None
    assert told.startswith("tiny never saw 'What', 'and', 'Anna': it is a toy")
    assert "8 names (Tom, " in told
    assert "8 things (pens, " in told
    rng = random.Random(3)
    for source in (WordProblems("train"), PythonFunctions("train")):
        for _ in range(400):
            prompt, _ = source.draw_pair(rng)
            assert unknown_words_hint(tokenizer, prompt) is None, prompt
    assert unknown_words_hint(load_tokenizer("tiny-planning"), "What is 2 and 2?") is None
