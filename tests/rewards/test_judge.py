"""The judge over HTTP against a local server whose replies follow from the request alone."""

import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from lit_dlm.rewards import HttpStepJudge, ProcessReward
from lit_dlm.rewards.judge import StepQuestion, read_grade
from lit_dlm.vision.pictures import Picture, picture_from_text
from tests.rewards.groups import SUM, right, wrong
from tests.rewards.judge_server import JudgeServer

QUESTION = StepQuestion(
    uid="s#0", part=1, problem="3+4?", truth="7", is_correct=True, response="all", shown="it is 13"
)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    running = JudgeServer()
    yield running
    running.close()


def judge_of(server: JudgeServer, *, pause_s: float = 0.02, **options: Any) -> HttpStepJudge:
    judge = HttpStepJudge(url=server.url, model="judge", **options)
    judge.endpoint.pause_s = pause_s
    return judge


def test_rewards_through_the_endpoint_are_the_same_every_time(server: JudgeServer):
    """Chunks of 10 over 20 tokens: 13 is in the second chunk of the long response only.

    Chunk 0: both 1, no spread. Chunk 1: -1 for the first response, 1 for the one whose 13 is not
    shown; numbers -1 and 1 on the last tokens.
    """
    harmless = {"decode": lambda ids: " ".join(str(i + 50) for i in ids)}
    group = [wrong(number=0, steps=range(20)), right(number=1, steps=range(20), **harmless)]
    reward = ProcessReward(judge_of(server), reward_chunk_length=10)
    for scores in (reward.score(group), reward.score(group)):
        assert [s.token_rewards.tolist() for s in scores] == [[0] * 19 + [-1], [0] * 19 + [1]]
    # 2 responses, 2 chunks, 3 opinions, each request with a seed of its own, twice the same.
    seeds = [request["seed"] for request in server.requests]
    assert (len(seeds), len(set(seeds))) == (24, 12)
    assert sorted(seeds[:12]) == sorted(seeds[12:])
    sent = {"model": "judge", "temperature": 0.6, "top_p": 0.95, "max_tokens": 10_000}
    assert sent.items() <= server.requests[0].items()


def test_the_judge_sees_the_pictures_as_the_model_does(server: JudgeServer):
    """Turned as its EXIF note says and as PNG, in front of the text."""
    file = io.BytesIO()
    image, note = Image.new("RGB", (6, 4), "red"), Image.Exif()
    note[0x0112] = 6  # the camera lay on its side
    image.save(file, "JPEG", exif=note)
    example = replace(SUM, images=(Picture(file.getvalue()),))
    ProcessReward(judge_of(server), k_sample=1).score([right(example=example)])
    shown, asked = server.requests[0]["messages"][1]["content"]
    assert (shown["type"], asked["type"]) == ("image_url", "text")
    assert picture_from_text(shown["image_url"]["url"]).size == (4, 6)
    assert asked["text"].startswith("Problem:\n3+4?")


def test_a_judge_that_is_busy_is_waited_for_and_gets_the_token_of_the_environment(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
):
    """For longer than three attempts."""
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    server.num_failures, server.status = 6, 503
    assert judge_of(server, deadline_s=30, api_key_env="JUDGE_KEY").grade(QUESTION, 0) == -1
    judge_of(server).grade(QUESTION, 0)
    assert server.tokens == ["Bearer sesame"] * 7 + [None]


def test_a_reply_that_a_closed_connection_cuts_off_is_asked_for_again(server: JudgeServer):
    server.num_cut = 2
    assert judge_of(server, deadline_s=30).grade(QUESTION, 0) == -1
    assert len(server.requests) == 3


def test_a_deadline_that_passes_ends_the_run_or_leaves_the_outcome(
    server: JudgeServer, caplog: pytest.LogCaptureFixture
):
    """The deadline is the endpoint's: once it has passed, further questions are asked once."""
    server.num_failures, server.status = 10_000, 503
    strict = judge_of(server, deadline_s=0.4, pause_s=0.1)
    with pytest.raises(ValueError, match=r"^s#0: judge: http://.* did not answer: .*503"):
        strict.grade(QUESTION, 0)
    asked = len(server.requests)
    assert asked >= 2
    strict.on_silence = "outcome"
    assert strict.grade(QUESTION, 1) is None
    assert len(server.requests) == asked + 1
    assert "its outcome counts instead" in caplog.text
    bad, good = ProcessReward(strict).score([wrong(number=0), right(number=1)])
    assert (bad.token_rewards[-1], good.token_rewards[-1]) == (-1, 1)
    server.num_failures = 0
    assert strict.grade(QUESTION, 2) == -1


def test_a_reply_that_does_not_end_is_not_waited_for(server: JudgeServer):
    """Every byte comes in time, all of them would take 12 s."""
    server.body, server.pause_s = b" " * 400, 0.03
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"did not answer: no whole reply in 0\.2 s"):
        judge_of(server, timeout_s=0.2, deadline_s=0.1).grade(QUESTION, 0)
    assert time.monotonic() - began < 5.0


def test_looking_up_a_name_counts_as_waiting(monkeypatch: pytest.MonkeyPatch):
    given_up = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: given_up.wait(10) and [])
    judge = HttpStepJudge(url="http://judge.test/", model="judge", timeout_s=0.2, deadline_s=0)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"did not answer: no whole reply in 0\.2 s"):
        judge.grade(QUESTION, 0)
    given_up.set()
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    ("head", "part"), [(b"HTTP/1.1 200 OK\r\n\r\n", b" "), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")]
)
def test_what_comes_without_an_end_is_read_up_to_a_size(head: bytes, part: bytes):
    """A body, and interim replies in front of the headers."""

    def send() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(head)
            while True:
                connection.sendall(part * 10_000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=send, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with pytest.raises(ValueError, match="more than 16 MiB"):
            HttpStepJudge(url=url, model="judge").grade(QUESTION, 0)


def test_the_token_goes_to_the_named_host_alone(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    other = JudgeServer()
    server.num_failures, server.status, server.location = 1, 302, other.url
    with pytest.raises(ValueError, match=r"did not answer: .*302"):
        judge_of(server, deadline_s=30, api_key_env="JUDGE_KEY").grade(QUESTION, 0)
    other.close()
    assert (server.tokens, other.tokens) == (["Bearer sesame"], [])


def test_a_refusal_is_final_and_names_the_sample(server: JudgeServer):
    """A client error, and replies of another protocol."""
    for body in (b"{}", b"<html>", b'{"choices": []}'):
        server.body = body
        with pytest.raises(ValueError, match=r"^s#0: .* did not reply as chat completions do"):
            judge_of(server).grade(QUESTION, 0)
    server.num_failures, server.status = 9, 404
    with pytest.raises(ValueError, match=r"^s#0: judge: http://.* did not answer: .*404"):
        judge_of(server).grade(QUESTION, 0)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        (r"\boxed{1}", 1), (r"\boxed{ +1 }", 1), (r"\boxed{-1}", -1), (r"\boxed{0}", None),
        ("\\boxed{\N{MINUS SIGN}1}", -1), (r"\boxed{1} or \boxed{-1}", -1), ("1", None), ("", None),
    ],
)  # fmt: skip
def test_only_boxed_grades_count(reply: str, grade: int | None):
    assert read_grade(reply) == grade
