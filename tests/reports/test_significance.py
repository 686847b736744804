"""Tests and intervals of a comparison, and the command that prints them."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lit_dlm.reports.compare_command import main
from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.significance import compare_rows, exact_mcnemar, holm, paired_bootstrap
from tests.reports.rows import row


def test_mcnemar_has_the_binomial_values():
    for b, c, expected in (
        (0, 0, 1.0),
        (1, 6, 2 * (1 + 7) / 2**7),  # C(7,0) + C(7,1) = 8
        (6, 1, 2 * (1 + 7) / 2**7),
        (0, 5, 2 * 1 / 2**5),
        (2, 3, 1.0),  # 2 * (1 + 5 + 10) / 32 = 1
        (5, 5, 1.0),  # capped: 2 * 638 / 1024 > 1
        (0, 10, 2 / 2**10),
    ):
        assert exact_mcnemar(b, c) == pytest.approx(expected, rel=1e-12)
    # With 2,000 : 1,900 the normal approximation is good: z = (100 - 1) / sqrt(3900).
    z = 99 / math.sqrt(3900)
    assert exact_mcnemar(1900, 2000) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)


def test_the_bootstrap_is_repeatable_and_has_the_quantiles_of_the_mean():
    assert paired_bootstrap([1, 1, 1]) == (1.0, 1.0)
    values = np.random.default_rng(0).normal(1.0, 2.0, 400)
    low, high = paired_bootstrap(values)
    assert (low, high) == paired_bootstrap(values)
    # The interval of a mean is about 1.96 standard errors to each side.
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
    # Differences 0 and 1: a resample has mean 0, 1/2 or 1 with weights 1/4, 1/2, 1/4.
    assert paired_bootstrap([0, 1]) == (0.0, 1.0)


def test_holm_multiplies_and_never_falls():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_only_common_samples_count_and_the_table_of_them_is_right():
    """Common: b, c, d. A is right on b and c, B on c and d: 1 : 1, accuracies 2/3 each."""
    a = [row("a"), row("b", nfe=10), row("c", nfe=10), row("d", nfe=10, correct=False)]
    b = [row(uid, method="n", nfe=4, correct=uid != "b") for uid in "bcdef"]
    b[0] = replace(b[0], problem="edited")
    found = compare_rows(a, b)
    assert (found.n, found.left_out_a, found.left_out_b, found.differing) == (3, 1, 2, 1)
    assert (found.only_a, found.only_b, found.p_value) == (1, 1, 1.0)
    assert found.accuracy_a == found.accuracy_b == pytest.approx(2 / 3)
    assert (found.nfe_a, found.nfe_b, found.nfe_interval) == (10.0, 4.0, (-6.0, -6.0))


def test_accuracies_of_tasks_with_scores_are_means_of_scores():
    a = [row(uid, correct=False, score=0.25) for uid in "bc"]
    b = [row(uid, correct=True, score=0.75) for uid in "bc"]
    found = compare_rows(a, b)
    assert (found.accuracy_a, found.accuracy_b) == (0.25, 0.75)
    assert found.accuracy_interval == (0.5, 0.5)


def test_samples_that_either_side_has_not_graded_are_left_out():
    a = [row("a", verdict="ungraded"), row("b"), row("c")]
    b = [row("a"), row("b", verdict="ungraded"), row("c")]
    found = compare_rows(a, b)
    assert (found.n, found.left_out_a, found.left_out_b) == (1, 2, 2)
    with pytest.raises(ValueError, match="no graded sample in common"):
        compare_rows(a[:1], b[:1])


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
    x, y = compared(capsys, a, b, "--out", tmp_path / "beside.md")
    assert (tmp_path / "beside.md").exists()
    assert (x["n"], x["left_out_b"], x["only_a"], x["only_b"]) == (7, 1, 1, 6)
    assert (x["p_value"], x["p_adjusted"], y["p_adjusted"]) == (0.125, 0.25, 1.0)
    out = tmp_path / "table.md"
    assert main([str(a), str(b / "results"), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "0.125" in shown
    assert "t, n = 2 to 7, left out of B: 0 to 1" in shown
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
        ([a, tmp_path / "c"], "no graded sample .* has 2 such as '0', B has 1 such as '9'"),
        ([a, a], "--a and --b"),
        ([a, a, "--a", "x"], "give both"),
        ([a, a, "--a", "x", "--b", "z"], "expected 'x' of A and 'z' of B on a common task"),
        ([a, tmp_path / "nowhere"], "nowhere has no results"),
    ):
        with pytest.raises((ValueError, SystemExit)) as error:
            main([str(argument) for argument in arguments])
        assert re.search(message, f"{error.value}{capsys.readouterr().err}")
