"""The judge callback against a local server that answers as told."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_dlm.callbacks.judge import HttpJudge, parse_verdict
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.tasks import PromptExample


class Server:
    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                candidate = body["messages"][1]["content"].rpartition("Candidate:\n")[2]
                content = {"7": '{"verdict": "correct"}', "8": '{"verdict": "incorrect"}'}
                reply = {"choices": [{"message": {"content": content.get(candidate, "hm")}}]}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(reply).encode())

            def log_message(self, *arguments: Any) -> None:
                del arguments

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/chat/completions"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.server.shutdown()
    running.server.server_close()


def row(number: int, completion: str) -> ResultRow:
    return ResultRow(
        uid=f"sums/test/{number}", task="sums", method="entropy", correct=False, verdict="wrong",
        detail="", answer=None, completion=completion, nfe=4, policy_forwards=0, idle_steps=0,
        stalled_steps=0, num_tokens=1, response_length=4, seconds=0.1, status="complete", seed=0,
    )  # fmt: skip


def run(callback: HttpJudge) -> None:
    examples = [
        PromptExample(uid=f"sums/test/{n}", task="sums", text="3+4?", reference={"answer": "7"})
        for n in range(3)
    ]
    task = SimpleNamespace(name="sums", examples=lambda: examples)
    datamodule = SimpleNamespace(tasks=[task], task=lambda name: task)
    trainer: Any = SimpleNamespace(is_global_zero=True, datamodule=datamodule)
    callback.setup(trainer, None, "predict")  # type: ignore[arg-type]
    callback.teardown(trainer, None, "predict")  # type: ignore[arg-type]


def test_verdicts_are_kept_counted_and_asked_once(server: Server, tmp_path: Path) -> None:
    """Right, wrong and no verdict: one of two judged is correct."""
    results = ResultFolder(tmp_path / "results")
    results.claim("sums", "entropy", {})
    results.append([row(0, "7"), row(1, "8"), row(2, "?")])
    judge = HttpJudge(str(tmp_path), url=server.url, model="judge-7b", tasks=["sums"])
    run(judge)
    path = tmp_path / "judge" / "sums" / "entropy.jsonl"
    with path.open("a") as file:
        file.write('{"uid": "sums/test/3", "corr')  # as a killed run leaves it
    run(judge)
    assert len(path.read_text().splitlines()) == 3
    (record,) = json.loads((tmp_path / "judge" / "summary.json").read_text())
    assert (record["judged"], record["failures"], record["accuracy"]) == (2, 1, 0.5)
    assert len(server.requests) == 3
    assert server.requests[0]["model"] == "judge-7b"
    assert "Reference solution:\n7" in server.requests[0]["messages"][1]["content"]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"verdict": "correct"}', True),
        (' {"verdict": "incorrect"}\n', False),
        ('{"verdict": "maybe"}', None),
        ('{"verdict": ["correct"]}', None),
        ("correct", None),
        ("[]", None),
    ],
)
def test_only_strict_replies_are_verdicts(text: str, verdict: bool | None) -> None:
    assert parse_verdict(text) is verdict
