"""A server as its clients see it: the real ones of OpenAI, and ones that break off or misbehave."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lit_dlm
from lit_dlm.backbones import load_backbone, load_tokenizer
from lit_dlm.decoding import ConfidencePolicy, Decoder, NoQuota, Sampler, ThresholdPolicy
from lit_dlm.toy import WordProblems
from tests.e2e.runs import fails
from tests.processes import ROOT
from tests.serve.servers import Running, serving, until

openai = pytest.importorskip("openai", reason="openai's client is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytestmark = pytest.mark.slow

LENGTH, SEED = 32, 5
PAGE = re.findall(
    r"^```\w*\n(.*?)^```", (ROOT / "docs/how-to/serve.md").read_text(), re.DOTALL | re.MULTILINE
)
THRESHOLD = {"policy": ThresholdPolicy(0.9), "quota": NoQuota()}
PROBLEMS = [one.text for one in WordProblems(split="test", num_examples=64).examples()]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The one of the page."""
    (command,) = re.findall(r"^\$ lit-dlm serve (.*)", PAGE[0], re.MULTILINE)
    with serving(tmp_path_factory.mktemp("server"), *command.split()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    return {"backbone": load_backbone("tiny"), "tokenizer": load_tokenizer("tiny")}


def generated(tiny: dict[str, Any], prompts: list, temperature: float, **options: Any) -> Any:
    decoder = Decoder(**THRESHOLD, sampler=Sampler(temperature=temperature))
    options = {"response_length": LENGTH, "seed": SEED, **options}
    return lit_dlm.generate(**tiny, prompts=prompts, decode=decoder, trajectories=True, **options)


def asked(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **options}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_chat_is_token_for_token_what_generate_gives(temperature: float, client, tiny):
    """Three answers, and how each of their tokens was written."""
    options = {"temperature": temperature, "seed": SEED, "n": 3, "max_tokens": 20}
    answer = client.chat.completions.create(
        **asked(PROBLEMS[0], **options), extra_body={"trajectory": True}
    )
    done = generated(tiny, [PROBLEMS[0]] * 3, temperature, response_length=20)
    for choice, text, record in zip(answer.choices, done.texts, done.trajectories, strict=True):
        assert choice.message.content == text
        assert choice.trajectory["tokens"] == record.tokens.tolist()
        assert choice.trajectory["steps"] == record.commit_step.tolist()
        assert all(one <= 0 for one in choice.trajectory["log_probs"])
        assert choice.finish_reason == ("stop" if 1 in record.tokens else "length")
    assert [choice.steps for choice in answer.choices] == done.num_steps
    assert answer.forwards == sum(done.num_steps)
    assert answer.usage.completion_tokens == sum(map(len, done.ids))
    assert answer.usage.prompt_tokens == done.trajectories[0].num_prompt
    assert (len(set(done.texts)) > 1) == (temperature > 0.0)


def test_texts_and_token_ids_are_continued_as_they_are(client, tiny):
    text = tiny["tokenizer"].apply_chat_template(
        [{"role": "user", "content": PROBLEMS[1]}], add_generation_prompt=True, tokenize=False
    )
    ids = tiny["tokenizer"](text)["input_ids"]
    done = generated(tiny, [ids, ids], 0.5)
    for prompt in ([ids, ids], [text, text]):
        options = {"model": "tiny", "temperature": 0.5, "seed": SEED}
        answer = client.completions.create(prompt=prompt, **options)
        assert [choice.text for choice in answer.choices] == done.texts
    alone = client.completions.create(prompt=ids, **options)
    assert alone.choices[0].text == done.texts[0]


def test_streams_add_up_and_show_nothing_that_changes(client, tiny):
    options = {"temperature": 0.9, "seed": SEED, "n": 2, "stream": True}
    done = generated(tiny, [PROBLEMS[2]] * 2, 0.9)
    texts = {0: "", 1: ""}
    ends, pieces = {}, 0
    chunks = client.chat.completions.create(
        **asked(PROBLEMS[2], **options), stream_options={"include_usage": True}
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content
            pieces += bool(choice.delta.content)
            assert done.texts[choice.index].startswith(texts[choice.index])
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert [texts[0], texts[1]] == done.texts
    assert ends == {0: "stop", 1: "stop"}
    assert pieces > 4
    assert usage.completion_tokens == sum(map(len, done.ids))
    cut = done.texts[0][3:6]
    stopped = client.chat.completions.create(**asked(PROBLEMS[2], **options), stop=[cut, "never"])
    first = "".join(c.delta.content for chunk in stopped for c in chunk.choices if c.index == 0)
    assert first == done.texts[0].partition(cut)[0]


def test_64_clients_at_once_get_what_one_batch_gets(server, tiny):
    """They ask for two temperatures, so some wait until those of the other have ended."""

    async def ask() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        **asked(text, temperature=0.9 * (number % 3 == 0), seed=SEED)
                    )
                    for number, text in enumerate(PROBLEMS)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    found = asyncio.run(ask())
    for first, temperature in ((0, 0.9), (1, 0.0), (2, 0.0)):
        prompts = PROBLEMS[first::3]
        done = generated(tiny, prompts, temperature, uids=["0"] * len(prompts))
        assert found[first::3] == done.texts


REFUSED = [
    (asked("Hi", tools=[{"type": "function"}]), 400, "tools: this server does not have it"),
    (asked("Hi", n=17), 400, "n: expected at most 16 responses, got 17"),
    (asked("Hi", n=0), 400, "n: Input should be greater than or equal to 1"),
    (asked("Hi", temperature="hot"), 400, "temperature: Input should be a valid number, got 'hot'"),
    (asked("Hi", temperature=-1), 400, "temperature: Input should be greater than or equal to 0"),
    (asked("Hi", max_tokens=10**9), 400, "leaves of the model's 512 positions"),
    (asked("<mask>" * 3, model="gpt-5"), 404, "model: expected 'tiny', got 'gpt-5'"),
    ({"model": "tiny"}, 400, "messages: Field required"),
    ({"model": "tiny", "messages": []}, 400, "messages: List should have at least 1 item"),
    ({"model": "tiny", "messages": [{"role": "user"}]}, 400, "messages.0.content: Field required"),
    (
        {"model": "tiny", "messages": [{"role": "usr", "content": "Hi"}]},
        400,
        "messages.0.role: Input should be 'developer', 'system', 'user'",
    ),
    ([], 400, "body: Input should be an object, got []"),
    (asked("Hi", metadata={"a": "b"}, logit_bias={}, presence_penalty=0), 200, ""),
]


@pytest.mark.parametrize(("body", "status", "message"), REFUSED)
def test_what_a_server_cannot_do_is_refused_in_one_line(body, status, message, server):
    found = httpx.post(f"{server.url}{CHAT}", json=body)
    assert found.status_code == status
    if status != 200:
        error = found.json()["error"]
        assert message in error["message"]
        assert "Value error" not in error["message"]
        assert error["type"] == "invalid_request_error"


def test_bodies_that_are_no_requests_are_refused(server, client, tiny):
    def problem(**options: Any) -> tuple[int, str]:
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        found = httpx.post(f"{server.url}{CHAT}", headers=headers, **options)
        return found.status_code, found.json()["error"]["message"]

    assert problem(content=b'{"model": ')[0] == 400
    assert "Invalid JSON" in problem(content=b'{"model": ')[1]
    assert "Invalid JSON" in problem(content=b"[" * 100_000)[1]
    assert problem(content=b"{}", headers={"content-type": "text/plain"})[0] == 415
    mask = tiny["backbone"].spec.mask_id
    for prompt in ([], "", [[]], [mask], [10**6], [-1]):
        with pytest.raises(openai.BadRequestError, match="prompt: expected one or more ids"):
            client.completions.create(model="tiny", prompt=prompt)
    with pytest.raises(openai.APIStatusError, match="body: expected at most") as large:
        client.chat.completions.create(**asked("x" * 100_000_000))
    assert large.value.status_code == 413
    assert problem(content=(b" " * 10**6 for _ in range(10)))[0] == 413  # of no told length


def test_lists_its_model_and_counts(server, client):
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    before = metrics(server)
    answer = client.chat.completions.create(**asked(PROBLEMS[3]))
    after = metrics(server)
    assert after["requests_total"] == before["requests_total"] + 1
    gained = after["tokens_total"] - before["tokens_total"]
    assert gained == answer.usage.completion_tokens > 0
    assert after["forwards_total"] - before["forwards_total"] == answer.forwards
    assert after["running"] == after["waiting"] == 0
    drawn = [client.chat.completions.create(**asked(PROBLEMS[3])).seed for _ in range(2)]
    assert len({answer.seed, *drawn}) == 3


def test_the_page_shows_what_happens(server, capsys):
    command, shown = PAGE[1].removeprefix("$ ").rsplit("'\n", 1)
    command = (command + "'").replace("http://127.0.0.1:8000", server.url)
    told = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout
    assert shown.strip() in told
    exec(PAGE[2].replace("http://127.0.0.1:8000", server.url), {})
    assert "#### " in capsys.readouterr().out
    (welcome,) = [line for line in PAGE[0].splitlines() if "answers at" in line]
    told = (server.folder / "out").read_text().replace(server.url, "http://127.0.0.1:8000")
    assert told.splitlines()[0] == welcome


def metrics(server: Running, **options: Any) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", **options).text
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("lit_dlm_"): float(value) for name, value in lines}


SECRET = {"Authorization": "Bearer secret"}


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Running]:
    """One slot and one place to wait, for answers of seconds."""
    limits = ("--batch_size=1", "--max_waiting=1", "--response_length=480")
    with serving(tmp_path, "tiny", *limits, "--api_key=secret") as running:
        yield running


def posted(server: Running, text: str, answers: list, **options: Any) -> threading.Thread:
    def post() -> None:
        url, body = f"{server.url}{CHAT}", asked(text, **options)
        answers.append(httpx.post(url, json=body, headers=SECRET, timeout=300))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def test_a_full_server_refuses_and_a_signal_lets_running_answers_end(narrow, tiny):
    """Of three requests one decodes, one waits and one is refused."""
    for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        found = httpx.post(f"{narrow.url}{CHAT}", json=asked("Hi"), headers=key)
        assert found.status_code == 401
        assert found.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{narrow.url}/v1/models").status_code == 401
    assert httpx.get(f"{narrow.url}/health").status_code == 200
    answers: list[Any] = []
    threads = [posted(narrow, PROBLEMS[0], answers)]
    until(lambda: metrics(narrow, headers=SECRET)["running"], bool)
    threads.append(posted(narrow, PROBLEMS[0], answers))
    until(lambda: metrics(narrow, headers=SECRET)["waiting"], bool)
    full = httpx.post(f"{narrow.url}{CHAT}", json=asked("Hi"), headers=SECRET)
    assert full.status_code == 503
    assert full.json()["error"]["type"] == "server_error"
    assert "2 responses wait or decode" in full.json()["error"]["message"]
    os.kill(narrow.process.pid, signal.SIGTERM)
    threads[1].join()
    refused = httpx.post(f"{narrow.url}{CHAT}", json=asked("Hi"), headers=SECRET)
    assert [refused.status_code, answers[0].status_code] == [503, 503]
    assert "the server ends" in refused.json()["error"]["message"]
    threads[0].join()
    narrow.process.join(60)
    assert narrow.process.exitcode == 0
    decoder = Decoder(policy=ConfidencePolicy())
    done = lit_dlm.generate(**tiny, prompts=[PROBLEMS[0]], decode=decoder, response_length=480)
    assert answers[1].json()["choices"][0]["message"]["content"] == done.texts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_killed_frees_its_slot(stream: bool, narrow):
    body = json.dumps(asked(PROBLEMS[0], stream=stream))
    lines = [f"POST {CHAT} HTTP/1.1", "Host: here", "Authorization: Bearer secret"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", body]
    code = (
        "import socket, sys, time\nlink = socket.create_connection((sys.argv[1], sys.argv[2]))\n"
        "link.sendall(sys.argv[3].encode()); time.sleep(600)"
    )
    address = narrow.url.rpartition("/")[2].split(":")
    command = [sys.executable, "-c", code, *address, "\r\n".join(lines)]
    clients = []
    for place in ("running", "waiting"):
        clients.append(subprocess.Popen(command))
        until(lambda place=place: metrics(narrow, headers=SECRET)[place], bool)
    for one in reversed(clients):
        one.kill()
        one.wait()
    until(lambda: metrics(narrow, headers=SECRET)["running"], lambda number: not number)
    until(lambda: narrow.log, lambda log: log.count("1 responses given up") == 2)
    answers: list[Any] = []
    posted(narrow, PROBLEMS[1], answers, max_tokens=4).join()
    assert answers[0].status_code == 200


def test_a_port_in_use_and_a_host_without_a_key_are_one_line(capsys, monkeypatch):
    monkeypatch.delenv("LIT_DLM_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = fails(capsys, "serve", "tiny", "--port", port)
    assert f"port: expected a free one of 127.0.0.1, got {port}" in told
    told = fails(capsys, "serve", "tiny", "--host", "0.0.0.0", "--port", "0")
    assert "host: others reach 0.0.0.0, so expected --api_key" in told
    assert "port: expected a number in [0, 65535]" in fails(capsys, "serve", "--port", "99999")
    assert "no-such-model" in fails(capsys, "serve", "no-such-model", "--port", "0")
