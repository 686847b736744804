"""The application without a network, where a test can say when a client leaves."""

import asyncio
import json
from typing import Any

import pytest

from lit_dlm.backbones import load_backbone, load_tokenizer
from lit_dlm.decoding import ConfidencePolicy, Decoder
from lit_dlm.serve.engine import Engine

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")


@pytest.fixture
def engine() -> Engine:
    """One that does not run: what it is given waits."""
    loaded = {"backbone": load_backbone("tiny"), "tokenizer": load_tokenizer("tiny")}
    return Engine(**loaded, decoder=Decoder(policy=ConfidencePolicy()), num_slots=1, max_waiting=1)


def ask(engine: Engine, sent: list[dict[str, Any]], *, is_body_sent: bool = True) -> None:
    """Adds what the application sends to a client that leaves as soon as it has asked."""
    from lit_dlm.serve.api import application

    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    told = [{"type": "http.request", "body": json.dumps(body).encode()}] * is_body_sent
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}

    async def receive() -> dict[str, Any]:
        return told.pop() if told else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app = application(engine, "tiny", response_length=8, seed=0, api_key=None)
    asyncio.run(app({**scope, "headers": headers}, receive, send))  # type: ignore[arg-type]


def test_a_client_that_leaves_before_its_body_came_is_no_fault(engine):
    ask(engine, [], is_body_sent=False)  # raises nothing
    assert not engine.num_requests


def test_a_fault_of_the_server_is_an_error_object(engine, monkeypatch):
    def fail(*_: Any) -> None:
        raise LookupError("an unforeseen bug")

    monkeypatch.setattr(engine, "check", fail)
    sent: list[dict[str, Any]] = []
    with pytest.raises(LookupError):  # for the log
        ask(engine, sent)
    start, body = sent
    assert start["status"] == 500
    error = json.loads(body["body"])["error"]
    assert error["type"] == "server_error"
    assert error["message"] == "the server has failed; its log says why"
