import json
import re
from pathlib import Path

import pytest

from lit_dlm.reports.compare_command import main
from lit_dlm.reports.results import ResultFolder
from tests.reports.rows import row


def run(folder: Path, **methods: str) -> Path:
    """A run whose methods answered samples 0, 1, ... as the letters say: r(ight) or w(rong)."""
    results = ResultFolder(folder / "results")
    for method, letters in methods.items():
        results.claim("t", method, {"decoder": {"policy": {"name": method}}})
        results.append(
            row(str(number), method=method, correct=letter == "r", nfe=len(method))
            for number, letter in enumerate(letters)
        )
    return folder


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_methods_of_equal_name_are_paired_on_common_samples(tmp_path: Path, capsys):
    """x: A wrong on 1..6 of the 7 common samples, B on 0: 1 against 6, p = 2 * 8 / 128.
    y: no disagreement. Holm for two: 0.25 and 1."""
    a = run(tmp_path / "a", x="rwwwwww", y="rr", only="r")
    b = run(tmp_path / "b", x="wrrrrrrr", y="rr")
    x, y = compared(capsys, a, b)
    assert (x["n"], x["left_out_b"], x["only_a"], x["only_b"]) == (7, 1, 1, 6)
    assert (x["p_value"], x["p_adjusted"], y["p_adjusted"]) == (0.125, 0.25, 1.0)
    out = tmp_path / "table.md"
    assert main([str(a), str(b / "results"), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "0.125" in shown
    assert "The recorded settings are equal." in shown
    assert "| A x<br>B x | 14.3<br>85.7 | 1<br>6 | +71.4<br>(" in out.read_text()


def test_named_methods_of_one_run_and_the_only_ones_of_two_are_paired(tmp_path: Path, capsys):
    one = run(tmp_path / "a", x="rw", yy="rr")
    (found,) = compared(capsys, one, one, "--a", "x", "--b", "yy")
    assert (found["method_a"], found["method_b"], found["nfe_interval"]) == ("x", "yy", [1.0, 1.0])
    assert main([str(one), str(one), "--a", "x", "--b", "yy"]) == 0
    assert "decoder.policy.name: 'x', now 'yy'" in capsys.readouterr().out
    (found,) = compared(capsys, run(tmp_path / "b", base="rr"), run(tmp_path / "c", tuned="rw"))
    assert (found["method_a"], found["method_b"]) == ("base", "tuned")


def test_what_cannot_be_compared_is_explained(tmp_path: Path, capsys):
    a = run(tmp_path / "a", x="rr", y="rr")
    for name, task in (("b", "u"), ("c", "t")):
        results = ResultFolder(tmp_path / name / "results")
        results.claim(task, "x", {})
        results.append([row("9", task=task, method="x")])
    for arguments, message in (
        ([a, tmp_path / "b"], r"/a has t: x, y; .*/b has u: x"),
        ([a, tmp_path / "c"], "no sample in common; A has 2 such as '0', B has 1 such as '9'"),
        ([a, a], "--a and --b"),
        ([a, a, "--a", "x"], "give both"),
        ([a, a, "--a", "x", "--b", "z"], "expected 'x' of A and 'z' of B on a common task"),
        ([a, tmp_path / "nowhere"], "nowhere has no results"),
    ):
        with pytest.raises((ValueError, SystemExit)) as error:
            main([str(argument) for argument in arguments])
        assert re.search(message, f"{error.value}{capsys.readouterr().err}")
