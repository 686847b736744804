import base64
import hashlib
import re
import shutil
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from lit_dlm.reports.command import failures_first, main
from lit_dlm.reports.results import ResultFolder
from tests.reports.rows import row
from tests.reports.sample_sets import record, write_run

pytestmark = pytest.mark.slow  # whole pages


def test_failures_come_first_and_ungraded_samples_are_no_failures():
    verdicts = {"a": "right", "c": "wrong", "b": "timeout", "d": "ungraded"}
    rows = [row(uid, correct=uid == "a", verdict=verdict) for uid, verdict in verdicts.items()]
    found = failures_first("t", "m", rows)
    assert [one.uid for (one,) in found.samples] == ["b", "c", "d", "a"]
    assert found.counts == "m: 2 of 4 wrong"


def test_report_of_two_runs_links_every_failure_to_its_trace(tmp_path: Path):
    """Both runs have method m, so their names tell the methods apart; links name the set."""
    for name in ("base", "tuned"):
        uids = ("t/test/0@m", "t/test/0#1@m", "t/test/1@m", "t/test/1#1@m")
        records = [record([10, 11], [0, 1], uid=uid) for uid in uids]
        write_run(tmp_path / name, records)
    logs = tmp_path / "tuned" / "logs" / "version_0"
    logs.mkdir(parents=True)
    (logs / "metrics.csv").write_text("step,train/loss\n0,2\n1,1\n")
    shutil.copytree(logs.parent, tmp_path / "tuned" / "round2" / "logs")
    out = tmp_path / "out"
    assert main([str(tmp_path / "base"), str(tmp_path / "tuned"), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        "summary.json", "summary.md", "front.png", "front_dark.png",
        "report.html", "report.md", "traces.html",
    }  # fmt: skip
    page = (out / "report.html").read_text()
    links = [unescape(link) for link in re.findall(r'<a href="(.*?)"', page)]
    assert len(links) == 8
    anchors = [parse_qs(urlsplit(link).fragment) for link in links]
    assert {anchor["uid"][0] for anchor in anchors} == set(uids)
    assert sum(anchor.get("set") == ["1"] for anchor in anchors) == 4
    assert "2 of 4 wrong" in page
    for training in ("tuned", "tuned/round2"):
        assert page.count(f"train/loss, training of {training}<") == 1
    text = (out / "report.md").read_text()
    assert "### t, base/m: 2 of 4" in text
    assert "[t/test/0#1](traces.html#uid=t%2Ftest%2F0%231%40m&set=1) |  | wrong | a1 |" in text
    assert "![Accuracy against average steps](front.png)" in text


def test_the_best_methods_failures_and_what_two_methods_split_on_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """``a`` of 3 right of 4 is best; ``b`` is of another kind, ``a_2`` of the same."""
    results = ResultFolder(tmp_path / "results")
    for method, right in (("a", "xyz"), ("a_2", "xy"), ("b", "xw")):
        results.claim("t", method, {})
        results.append(
            row(uid, method=method, correct=uid in right, prompt=f"What is {uid}?",
                verdict="right" if uid in right else "wrong")
            for uid in "wxyz"
        )  # fmt: skip
    results.write_metadata({"model": "m-7B", "parameters": 7000, "versions": {"lit_dlm": "0.1.0"}})
    assert main([str(tmp_path)]) == 0
    compare = f"next: lit-dlm compare {tmp_path} {tmp_path} --a a --b b\n"
    assert capsys.readouterr().out.endswith(compare)
    page = (tmp_path / "report.html").read_text()
    places = [page.index(text) for text in (
        "m-7B", "7,000", "lit_dlm 0.1.0", "The most accurate method, failures first",
        "a: 1 of 4 wrong", "What is w?", "What is x?",
        "2 right by a alone, 1 by b alone", "Samples of the other methods", "a_2: 2 of 4 wrong",
        "b: 2 of 4 wrong",
    )]  # fmt: skip
    assert places == sorted(places)
    split = page[places[-4] : places[-3]]
    assert re.findall(r"What is .", split) == ["What is w", "What is y", "What is z"]


def test_hostile_completions_are_text(tmp_path: Path):
    evil = "</pre><script>alert(1)</script>"
    results = ResultFolder(tmp_path / "results")
    results.claim("t", "m", {})
    texts = dict.fromkeys(("completion", "answer", "prompt"), evil)
    results.append([row("u|1", correct=False, verdict="wrong", detail="a|b", **texts)])
    assert main([str(tmp_path)]) == 0
    page, text = ((tmp_path / f"report.{suffix}").read_text() for suffix in ("html", "md"))
    assert "<script>alert" not in page
    assert page.count("&lt;/pre&gt;&lt;script&gt;") == 3  # question, answer and completion
    policy = r"default-src 'none'; script-src '(sha256-[^']+)'; style-src '[^']+'; img-src data:"
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert re.findall(policy, page) == [f"sha256-{digest}"]
    assert r"\</pre\>\<script\>alert(1)" in text
    assert r"a\|b" in text
    assert "There are no trajectories of" in page
    assert not (tmp_path / "traces.html").exists()


def test_a_run_without_its_trajectories_is_reported_without_links(tmp_path: Path, caplog):
    run = write_run(tmp_path / "run", [record([10, 11], [0, 1], uid="t/test/0@m")])
    shutil.rmtree(run / "trajectories")
    assert main([str(run), "--out", str(tmp_path / "out")]) == 0
    assert "trajectories: not here" in caplog.text
    assert "<a " not in (tmp_path / "out" / "report.html").read_text()
