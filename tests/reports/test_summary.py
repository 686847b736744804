import math
import re
from itertools import combinations
from pathlib import Path

import pytest

from lit_dlm.reports import summary
from lit_dlm.reports.command import labelled, merge_runs
from lit_dlm.reports.plots import METHODS, THEMES, family, front_figure, method_styles
from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.summary import summarise, wilson_interval
from tests.reports.rows import row


def test_means_and_standard_error_have_hand_computed_values():
    """3 of 4 right: p = 0.75, se = sqrt(0.75 * 0.25 / 4) = 0.2165; 8 + 8 + 8 + 40 = 64 forwards."""
    rows = [
        row("a", nfe=8, num_tokens=10),
        row("b", nfe=8, num_tokens=6),
        row("c", nfe=8, num_tokens=0, correct=False, verdict="timeout"),
        row("d", nfe=40, num_tokens=16, status="step_limit", seconds=1.25),
    ]
    found = summarise(rows)
    assert (found.n, found.accuracy, found.nfe) == (4, 0.75, 16.0)
    assert found.stderr == pytest.approx(math.sqrt(3) / 8)
    assert (found.tokens_per_step, found.useful_tokens_per_step) == (4 * 32 / 64, 32 / 64)
    assert found.seconds == pytest.approx((3 * 0.25 + 1.25) / 4)
    assert (found.timeouts, found.unfinished) == (0.25, 0.25)


def test_the_interval_is_that_of_wilson():
    """10 of 10: z² = 3.8416, so 1 / (1 + 0.38416) = 0.7225 to 1; 5 of 10 is symmetric:

    0.5 ± sqrt(0.38416 (0.25 + 0.09604)) / 1.38416 = 0.5 ± 0.2634.
    """
    assert wilson_interval(1.0, 10) == pytest.approx((1 / 1.38416, 1.0))
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 1 - 1 / 1.38416))
    for n in range(1, 500):
        assert wilson_interval(1.0, n)[1] == 1.0
        assert wilson_interval(0.0, n)[0] == 0.0
    assert wilson_interval(0.5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


def test_several_responses_to_a_prompt_give_pass_at_k_and_a_wider_error():
    """Right of four: 4, 2 and 0. avg@4 = 6 / 12, pass@2 = (1 + 5/6 + 0) / 3, pass@4 = 2 / 3.

    Sums of ``x - p`` per prompt are 2, 0 and -2: the error is sqrt(4 + 4) / 12, where twelve
    independent samples would have sqrt(3) / 12.
    """
    rows = [
        row(f"{prompt}#{n}" if n else prompt, response=n, correct=n < right)
        for prompt, right in (("a", 4), ("b", 2), ("c", 0))
        for n in range(4)
    ]
    found = summarise(rows)
    assert (found.n, found.accuracy) == (12, 0.5)
    assert found.pass_at == pytest.approx({"2": 11 / 18, "4": 2 / 3})
    assert found.stderr == pytest.approx(math.sqrt(8) / 12)
    assert found.interval == pytest.approx(wilson_interval(0.5, 0.25 / (8 / 144)))  # of 4.5
    text = summary.markdown_tables([found, summarise([row(method="single")])])
    assert "| accuracy [95 %] | steps | tokens/step | ms/sample | n | pass@k |" in text
    assert "| 12 | 66.7 % (k = 4) |" in text
    assert text.rstrip().endswith("| 1 | - |")
    partial = summarise(rows[:-1])  # the last response is not there yet
    assert list(partial.pass_at) == ["2", "3"]


@pytest.mark.parametrize(("n", "c"), [(1, 1), (5, 0), (5, 2), (6, 5)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n: int, c: int):
    grades = [number < c for number in range(n)]
    for k in range(1, n + 1):
        draws = list(combinations(grades, k))
        assert summary.pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_folder_summary_follows_the_given_order(tmp_path: Path):
    folder = ResultFolder(tmp_path)
    for method in ("alpha", "beta", "gamma"):
        folder.claim("t", method, {})
        folder.append([row(method=method)])
    summaries = summary.summarise_folder(tmp_path, order=["gamma", "alpha"])
    assert [s.method for s in summaries] == ["gamma", "alpha", "beta"]


def test_a_damaged_summary_is_named(tmp_path: Path):
    (tmp_path / "summary.json").write_text("[{")
    with pytest.raises(ValueError, match=r"summary\.json: not valid JSON"):
        summary.summarise_run(tmp_path)


def test_methods_of_one_family_share_a_curve():
    # With a hyphen and a point as results of 0.1 name it.
    for name in ("threshold-0.95", "threshold_095", "threshold_1", "tracelock_0.9995", "entropy"):
        assert family(name) == re.match("[a-z]+", name)[0]


def test_ungraded_samples_have_no_accuracy():
    """Beside graded ones, 1 of 2 right, they do not count."""
    rows = [row("a"), row("b", correct=False, verdict="wrong")]
    found = summarise([*rows, row("c", correct=False, verdict="ungraded")])
    assert (found.n, found.accuracy, found.interval) == (3, 0.5, wilson_interval(0.5, 2))
    found = summarise([row(correct=False, verdict="ungraded")])
    assert (found.accuracy, found.stderr) == (None, None)
    assert "| m | - | 8.0 |" in summary.markdown_tables([found])
    assert front_figure([found], THEMES["light"]) is None


def test_a_method_has_its_colour_in_every_picture_and_tracelock_one_of_its_own():
    theme = THEMES["dark"]
    first, plain, block = method_styles(["tracelock", "threshold", "tracelock_blocks"], theme)
    assert first["color"] == block["color"] == theme.series[1]
    assert (first["linestyle"], first["marker"]) != (block["linestyle"], block["marker"])
    others = method_styles(["mine", *METHODS, *map(str, range(9)), "threshold_dual"], theme)
    assert others[-1]["color"] == plain["color"]
    assert [one["color"] for one in others].count(theme.series[1]) == 1


def test_runs_that_share_a_method_are_told_apart_by_their_names():
    base, tuned = (
        [summarise([row(task=task, method="entropy")]) for task in ("a", "b")] for _ in range(2)
    )
    other = summarise([row(task="a", method="random")])
    for one, two in (("sft_1", "sft_2"), ("s0/bench", "s1/bench"), ("bench", "s1/again")):
        merged = merge_runs(labelled([(Path(one), base), (Path(two), [*tuned, other])]))
        end = Path(two).name if Path(two).name == "again" else two
        first, second = f"{one}/entropy", f"{end}/entropy"
        names = [f"a: {first}", f"a: {second}", "a: random", f"b: {first}", f"b: {second}"]
        assert [f"{found.task}: {found.method}" for found in merged] == names
        assert (family(first), family(second)) == (first, second)  # each has its own curve
