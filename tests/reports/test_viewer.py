import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

from lit_dlm.reports import viewer
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.viewer_command import main
from lit_dlm.trajectories.record import Trajectory
from tests.reports import sample_sets as sets

HOSTILE = "</script><img src=x onerror=alert(1)>"


def viewed(*records: Trajectory, pieces: TokenPieces | None = None) -> viewer.ViewedSet:
    shown = sets.sample_set(list(map(sets.sample, records)))
    return viewer.ViewedSet(samples=shown, pieces=pieces or sets.tiny_pieces())


def column(text: str, dtype: str) -> list:
    return np.frombuffer(base64.b64decode(text), dtype).tolist()


def test_columns_hold_the_record():
    one = sets.remasked(meta={"advantage": [0.5, None], "reward": 1.5})
    content = viewer.page_data([viewed(one)], title="x")
    (shown,) = content["samples"]
    ids = content["sets"][0]["tokens"]["ids"]
    assert ids == [2, 5, 6, 7, 8, 9]
    assert [ids[index] for index in column(shown["tokens"], "<u2")] == [8, 9, 2]
    assert [ids[index] for index in column(shown["prompt"], "<u2")] == [5, 6, 7]
    assert column(shown["commit"], "<u2") == [3, 65535, 65535]
    assert shown["early"] == [[0, 0, ids.index(7)], [1, 0, ids.index(sets.MASK)]]
    assert (shown["given"], shown["reward"], shown["status"]) == ([1], 1.5, "step_limit")
    advantage = column(shown["signals"]["advantage"], "<f2")
    assert advantage[0] == 0.5
    assert np.isnan(advantage[1:]).all()
    assert not {"seen", "answer"} & shown.keys()


def test_entropy_is_that_of_the_step_that_wrote():
    """Two places, written at steps 1 and 0. Masked rows: (0,0) (0,1) (1,0)."""
    one = sets.record([8, 9], [1, 0])
    one.signals["step_entropy"] = np.array([0.1, 0.2, 0.3], dtype=np.float16)
    one.signals["commit_prob"] = np.array([0.9, 0.8], dtype=np.float16)
    found = {name: list(values) for name, values in viewer.position_signals(one).items()}
    near = [pytest.approx(values, abs=1e-3) for values in ([0.3, 0.2], [0.9, 0.8])]
    assert found == {"entropy": near[0], "confidence": near[1]}


def test_proposals_are_kept_until_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    one = sets.record([8, 9], [1, 0])
    one.signals["step_proposal"] = np.array([7, 9, 8], dtype=np.int32)
    one.signals["step_prob"] = np.array([0.0, 1.0, np.nan], dtype=np.float16)
    (shown,) = viewer.page_data([viewed(one)], title="x")["samples"]
    assert column(shown["sure"], "u1") == [0, 254, 255]
    assert len(column(shown["seen"], "<u2")) == 3
    monkeypatch.setattr("lit_dlm.reports.viewer.MAX_PROPOSALS", 2)
    (shown,) = viewer.page_data([viewed(one)], title="x")["samples"]
    assert "seen" not in shown
    assert "3 proposals of single steps are too many" in caplog.text


def test_many_tokens_get_wide_indices():
    ids = np.arange(3, 70_003)
    halves = (sets.record(half, [0] * 35_000, vocab_size=10**6) for half in np.split(ids, 2))
    table = viewer.TokenTable(TokenPieces(None), halves)
    assert table.as_json()["wide"]
    assert column(table.encode(np.array([70_002])), "<u4") == [70_000]


def test_signals_of_another_length_are_refused():
    one = sets.record([8, 9], [1, 0], meta={"value": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"t/test/0@m.*meta 'value'.*up to 2 numbers"):
        viewer.page_data([viewed(one)], title="x")


def page_of(shown: viewer.ViewedSet, path: Path, *, title: str = "x") -> str:
    viewer.write_viewer(path, [shown], title=title)
    return path.read_text(encoding="utf-8")


def test_hostile_text_cannot_leave_its_place_in_the_page(tmp_path: Path):
    words = [HOSTILE, "@@STYLE@@", "b"]
    pieces = TokenPieces(sets.WordTokenizer(words))
    shown = viewed(sets.record([3, 4, 5], [0, 0, 0], prompt=[3]), pieces=pieces)
    page = page_of(shown, tmp_path / "page.html", title=HOSTILE)
    assert HOSTILE not in page
    assert page.count("<script") == page.count("</script>") == 2
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    content = json.loads(data)
    assert (content["title"], content["sets"][0]["tokens"]["texts"][1:]) == (HOSTILE, words)


def test_the_page_asks_for_nothing_and_its_policy_names_its_own_script(tmp_path: Path):
    page = page_of(viewed(sets.record([8], [0])), tmp_path / "page.html")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert "innerHTML" not in page
    assert page == page_of(viewed(sets.record([8], [0])), tmp_path / "again.html")


def test_decoders_in_one_line():
    method = {
        "policy": {"name": "TraceLockPolicy", "threshold": 0.9, "weights": "ab", "cap": None},
        "quota": {"name": "NoQuota"},
        "sampler": {"name": "Sampler", "temperature": 0.0, "score_on": "raw"},
        "settings": {"max_steps": None},
        "layout": {"name": "FixedLayout", "regions": [{"name": "R"}, {"name": "A"}]},
    }
    told = "TraceLockPolicy(threshold=0.9), NoQuota, FixedLayout(R, A)"
    assert viewer.decoder_line(method) == told
    assert viewer.decoder_line(None) == ""


def test_command_writes_page_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ids = sets.ids_of("4-4=0")
    records = [
        sets.record(ids, order, uid=f"t/test/{number}@{method}")
        for number in range(2)
        for method, order in (("a", range(5)), ("b", [0] * 5))
    ]
    run = sets.write_run(tmp_path / "run", records)
    other = sets.write_set(tmp_path / "other", records[:1])
    assert main([str(run)]) == 0
    assert "traces.html: 4 of 4 samples" in capsys.readouterr().out
    assert (run / "traces.html").exists()
    out = tmp_path / "pair.html"
    assert main([str(run), "--compare", str(other), "--limit", "2", "--out", str(out)]) == 0
    assert "2 of 4 samples, 1 of 1 samples" in capsys.readouterr().out
    assert main([str(run), "--method", "b", "a", "--gif", str(tmp_path / "x.gif")]) == 0
    assert "x.gif: t/test/0@b, t/test/0@a" in capsys.readouterr().out
    apart = sets.write_set(tmp_path / "apart", [sets.record(ids, range(5), uid="t/test/9@a")])
    with pytest.raises(ValueError, match=r"/apart: no decode of the requested prompts"):
        main([str(run), "--compare", str(apart)])
    with pytest.raises(ValueError, match="--limit: expected 0 or more, got -1"):
        main([str(run), "--limit", "-1"])
