"""The judge callback with an endpoint that answers as told."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lit_dlm.callbacks.judge import HttpJudge, parse_verdict
from lit_dlm.reports.results import ResultFolder
from lit_dlm.tasks import PromptExample
from tests.reports.rows import row

REPLIES = {"7": '{"verdict": "correct"}', "8": '{"verdict": "incorrect"}'}


def run(callback: HttpJudge) -> None:
    shown = {"task": "sums", "text": "3+4?", "reference": {"solution": "", "answer": "7"}}
    examples = [PromptExample(uid=f"sums/test/{n}", **shown) for n in range(3)]
    task = SimpleNamespace(name="sums", examples=lambda: examples)
    datamodule = SimpleNamespace(tasks=[task], task=lambda name: task)
    trainer: Any = SimpleNamespace(is_global_zero=True, datamodule=datamodule)
    callback.setup(trainer, None, "predict")  # type: ignore[arg-type]
    callback.teardown(trainer, None, "predict")  # type: ignore[arg-type]


def test_verdicts_are_kept_counted_and_asked_once(tmp_path: Path) -> None:
    """Right, wrong and no verdict: one of two judged is correct."""
    results, own = ResultFolder(tmp_path / "results"), {"task": "sums", "method": "entropy"}
    results.claim("sums", "entropy", {})
    results.append(
        row(uid, **own, completion=text, response=response)  # two responses of the last problem
        for uid, response, text in [
            ("sums/test/0", 0, "7"),
            ("sums/test/1", 0, "8"),
            ("sums/test/1#1", 1, "?"),
        ]
    )
    judge = HttpJudge(str(tmp_path), url="http://x", model="judge-7b", tasks=["sums"])
    asked: list[str] = []

    def ask(_instruction: str, question: str, **_: Any) -> str:
        asked.append(question)
        return REPLIES.get(asked[-1].rpartition("Candidate:\n")[2], "hm")

    judge.endpoint.ask = ask  # type: ignore[method-assign,assignment]
    run(judge)
    path = tmp_path / "judge" / "sums" / "entropy.jsonl"
    with path.open("a") as file:
        file.write('{"uid": "sums/test/3", "corr')  # as a killed run leaves it
    run(judge)
    assert len(path.read_text().splitlines()) == len(asked) == 3
    (record,) = json.loads((tmp_path / "judge" / "summary.json").read_text())
    assert (record["judged"], record["failures"], record["accuracy"]) == (2, 1, 0.5)
    assert "Reference solution:\n7" in asked[0]
    shutil.rmtree(results.folder)  # as users are told to; the first answer comes again
    results = ResultFolder(results.folder)
    results.claim("sums", "entropy", {"seed": 1})
    results.append(row(f"sums/test/{number}", **own, completion="7") for number in range(2))
    run(judge)
    (record,) = json.loads((tmp_path / "judge" / "summary.json").read_text())
    assert (len(asked), record["judged"], record["accuracy"]) == (4, 2, 1.0)


def test_only_strict_replies_are_verdicts() -> None:
    assert parse_verdict('{"verdict": "correct"}') is True
    assert parse_verdict(' {"verdict": "incorrect"}\n') is False
    for text in ('{"verdict": "maybe"}', '{"verdict": ["correct"]}', "correct", "[]"):
        assert parse_verdict(text) is None
