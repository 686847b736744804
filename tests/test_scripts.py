"""Benchmarks and experiments: scripts outside the packages, which a renamed import would break."""

import itertools
import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Script = Callable[[str | Path], dict[str, Any]]
ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    path
    for folder in ("benchmarks", "experiments")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "def main(" in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_finds_what_it_imports(script: Path, imported: Script) -> None:
    assert callable(imported(script)["main"])


def constant(right: float, forwards: float) -> tuple[np.ndarray, np.ndarray]:
    """Forwards and verdicts of two seeds and five problems that are all alike."""
    return np.full((2, 5), float(forwards)), np.full((2, 5), right)


def test_the_stack_compares_fronts_at_equal_forwards(imported: Script) -> None:
    stack = imported("experiments/stack.py")
    ends = {"base": (0.2, 0.4), "sft": (0.3, 0.6), "rl": (0.5, 0.6), "sft-rl": (0.6, 0.6)}
    decodes = {
        (chain, "words", cell): constant(*values)
        for chain, (low, high) in ends.items()
        for cell, values in {
            "left-to-right_1_whole": (0.9, 32),
            **{
                f"threshold_{level}_{window}": point
                for window in stack["AT"]
                for level, point in {"0.5": (low, 9), "0.9": (high, 12)}.items()
            },
        }.items()
    }
    decodes["base", "words", "tracelock_0.9_whole"] = constant(0.45, 12)
    text = stack["markdown"](decodes)
    # 11 is two thirds of the way from 9 to 12; a front that ends before 13 is taken at its end, and
    # one that begins behind 11 is not there.
    assert "| base | 90.0 ± 0.0 | 33.3 ± 0.0 | | | 40.0 ± 0.0 | |" in text
    pair = "+16.7 ± 0.0 | +23.3 ± 0.0 | +26.7 ± 0.0 | -13.3 ± 0.0"
    assert f"| sft + rl | {pair} |" in text
    assert "tracelock + cache" not in text


def test_policy_losses_are_compared_with_the_untrained_model_at_equal_steps(
    imported: Script,
) -> None:
    """The smallest case by hand: two problems, of which one is won at 1.5 steps.

    The untrained line gives 0.25 there, half way between none and half of them.
    """
    markdown = imported("experiments/rl_methods.py")["markdown"]
    line = {
        "threshold_05": {"steps": 1.0, "correct": "00"},
        "threshold_06": {"steps": 2.0, "correct": "10"},
    }
    arm = {"steps": 1.5, "correct": "11", "cpu_minutes": 2.0}
    arms = [{**arm, "seed": seed} for seed in range(2)]
    text = markdown({"line": line, "methods": {"tracerl": arms, "value": arms[1:]}})
    # Gains of 1 and 0 and of 1 and 0.5: errors over two resampled problems, about 0.35 and 0.18.
    for name, rates in {
        "TraceRL": "1.000: 1.000, 1.000",
        "with value model": "1.000: 1.000",
    }.items():
        row = re.escape(f"| {name} | {rates} | +50.0 ± ") + r"3\d\.\d \| (\S+ ± \S+)? ?\| 1\.50 \|"
        found = re.search(row + r" \+75\.0 ± 1\d\.\d \| 2\.0 \|", text)
        assert found
        assert found[1] == (None if name == "TraceRL" else "+0.0 ± 0.0")


def test_arms_of_decode_states_are_compared_by_problem_and_at_equal_forwards(
    imported: Script,
) -> None:
    script = imported("experiments/decode_states.py")
    verdicts = {  # arm, method -> forwards, and what is right in each seed
        ("decode", "entropy_1"): (8, ["1110", "1100"]),
        ("random", "entropy_1"): (8, ["1000", "1100"]),
        ("decode", "threshold_06"): (6, ["1100", "1100"]),
        ("random", "threshold_06"): (4, ["0000", "0000"]),
        ("random", "threshold_09"): (8, ["1111", "1111"]),
        ("decode", "threshold_dual_09"): (9, ["1111", "1111"]),
    }
    decodes = {}
    for arm, method in itertools.product(script["ARMS"], (*script["ORDER"], *script["FAST"])):
        others = 4 if method.endswith("_06") else 8, ["1010", "1010"]
        forwards, right = verdicts.get((arm, method), others)
        shown = np.array([[float(digit) for digit in seed] for seed in right])
        decodes[f"words, {arm}", "t", method] = np.full(shown.shape, float(forwards)), shown
    found = script["arms"](decodes, "words")
    # By problem 0, 0.5, 0.5, 0; by seed 0.5 and 0; entropy_2 and entropy_4 are equal in both.
    assert script["gain"](found, "entropy_1").mean(0).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert script["gain"](found, *script["ORDER"]).mean() == pytest.approx(0.25 / 3)
    # Six forwards lie half way between none right at four and all right at eight; nine lie outside.
    equal = script["gain_at_equal_forwards"](found, "threshold_06")
    assert equal.tolist() == [[0.5, 0.5, -0.5, -0.5]] * 2
    fixed, fast = script["markdown"](decodes).split("\n\n")
    assert "| words | 62.5, +25.0 ± " in fixed
    assert "| words | 50.0 @ 6.0, +50.0 ± 24.0 (+0.0 ± 24.0) |" in fast
    assert fast.endswith(" | 100.0 @ 9.0, +50.0 ± 24.9 |\n")


def test_editing_is_compared_with_thresholds_of_the_same_model_and_of_all(imported: Script) -> None:
    """Two problems and seeds. Editing has both right at 4 forwards; its own model's thresholds have
    none at 2 and one at 6, so half of one there; those of ``sft`` have one at 4.
    """
    script = imported("experiments/editing.py")
    verdicts = {
        ("editing-edit", "whole", "0.5-0.7"): (4, "11"),
        ("threshold-edit", "whole", "0.5"): (2, "00"),
        ("threshold-edit", "whole", "0.9"): (6, "10"),
        ("threshold-sft", "whole", "0.8"): (4, "10"),
    }
    right, forwards = (
        {
            cell: np.array([[float(part(digit, cost)) for digit in digits]] * 2)
            for cell, (cost, digits) in verdicts.items()
        }
        for part in (lambda digit, _: digit, lambda _, cost: cost)
    )
    one = script["Decodes"](right, forwards, {})
    contest, _, every = script["markdown"](
        {("words", "validation"): one, ("words", "test"): one}
    ).split("\n\n")
    same, any_model = contest.splitlines()[2:]
    assert "| thresholds on the same model | 100.0 ± 0.0 @ 4.0 (0.5-0.7) | 25.0 (" in same
    assert "| 50.0 (threshold-sft 0.8) | +50.0 [" in any_model
    assert "| threshold-edit | whole | 0.5 | 0.0 ± 0.0 @ 2.0 |" in every


def test_the_policy_bench_decodes_any_test_list_and_validates_on_a_split_of_its_own(
    tmp_path: Path, imported: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = imported("experiments/policy_bench.py")
    calls: list[tuple[Path, list[object]]] = []
    monkeypatch.setitem(
        bench["decode"].__globals__, "call", lambda done, *words: calls.append((done, [*words]))
    )
    given = {"list_seed": 23, "num_examples": 5, "functions": "model"}
    decoders = {"random_1_whole": {"policy": "RandomPolicy"}}
    for which in ("validation", "test"):
        bench["decode"](Namespace(**given), "wide-functions", which, tmp_path, decoders)
    assert [done.parent.parent.name for done, _ in calls] == ["validation", "test-23-5"]
    lists = [json.loads(words[-1])[0]["init_args"] for _, words in calls]
    assert [(one["split"], one["num_examples"], one["seed"]) for one in lists] == [
        ("validation", 300, 101),
        ("test", 5, 23),
    ]


def test_the_policy_bench_compares_at_equal_forwards_and_keeps_every_decode(
    tmp_path: Path, imported: Script
) -> None:
    bench = imported("experiments/policy_bench.py")
    verdicts = {  # policy, setting -> forwards, and what is right in each seed, on both lists
        ("threshold", "0.6"): (4, ["0110"]),
        ("threshold", "0.9"): (8, ["1111"]),
        ("klass", "0.9"): (8, ["1010"]),
        ("outcome", "0.5"): (5, ["1111", "1110"]),
        ("outcome", "0.8"): (6, ["1101", "1100"]),
    }
    rows = [
        (*key, seed - (key[2] != "outcome"), f"u{uid}", digit == "1", forwards, 0.5, 0.125, "d")
        for which in ("validation", "test")
        for (policy, setting), (forwards, right) in verdicts.items()
        for key in [("words", which, policy, "whole", setting)]
        for seed, digits in enumerate(right)
        for uid, digit in enumerate(digits)
    ]
    columns = dict(zip(bench["SCHEMA"].names, map(list, zip(*rows, strict=True)), strict=True))
    path = tmp_path / "bench.parquet"
    table = pa.table(columns, schema=bench["SCHEMA"])
    for name in ("sudoku", "words", "words"):  # what a run has anew takes the place of the former
        task = pa.array([name] * len(rows)).cast(bench["SCHEMA"].field("task").type)
        bench["write_table"](path, table.set_column(0, "task", task))
    results = bench["read"](path)
    assert {task: len(results[task, "test"].correct) for task, _ in results} == dict.fromkeys(
        ("sudoku", "words"), 5
    )
    test = results["words", "test"]
    found = bench["contest"](results["words", "validation"], test, ("whole",))
    own, forwards, accuracy, _ = found["ours"]
    assert (own[2], forwards, accuracy) == ("0.5", 5.0, 0.875)
    # A quarter of the problems by the slower threshold: 0.5 + 0.25 * 0.5.
    fast, slow, share, rate = found["theirs"]
    assert (fast[2], slow[2], share, rate) == ("0.6", "0.9", 0.25, 0.625)
    assert found["difference"][0] == pytest.approx(0.25)
    assert test.shares[own] == pytest.approx(0.25)
    fronts = {name: bench["fastest"](test, name, ("whole",)) for name in ("threshold", "outcome")}
    assert [cell[2] for cell in fronts["threshold"]] == ["0.6", "0.9"]
    assert [cell[2] for cell in fronts["outcome"]] == ["0.5"]  # 0.8 is slower and worse
    # Problems vary by 1/16 * (1 + 1/3), seeds by 1/32; the product of both effects is small.
    wide = np.array([[1.0, 0.0, 1.0, 0.0] * 50, [1.0, 0.0, 1.0, 1.0] * 50])
    seeds, problems = wide.mean(1).var(ddof=1) / 2, wide.mean(0).var(ddof=1) / 200
    error = bench["standard_error"](wide)
    assert error**2 == pytest.approx(seeds + problems, rel=0.1)
    assert "| words | whole responses | 87.5 ± " in bench["contests_table"](results)
    listed = bench["listing"](path).splitlines()  # half of four are right: 0.5 ± 0.25
    assert listed[0] == "| policy | setting | window | words | sudoku |"
    assert "| threshold | 0.6 | whole | 50.0 ± 25.0 @ 4.0 | 50.0 ± 25.0 @ 4.0 |" in listed
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(SystemExit, match=r"bench\.parquet"):
        bench["report"](path)


def test_policies_on_the_real_model_meet_rules_that_validation_chose(
    tmp_path: Path, imported: Script
) -> None:
    script, chain = imported("experiments/real_policies.py"), imported("experiments/chain.py")
    verdicts = {  # forwards, and what is right in each seed, on both lists
        "threshold_0.6": (4, ["0110"]),
        "threshold_0.9": (8, ["1111"]),
        "credit_0.9": (8, ["1010"]),  # threshold 0.9 is superior, so this is in no mixture
        "tracelock_0.5": (5, ["1101", "1100"]),
        "tracelock_0.8": (6, ["1111", "1110"]),
    }
    rows = [
        (which, "stories", method, seed - (len(right) == 1), f"u{uid}", digit == "1", forwards)
        for which in ("validation", "test")
        for method, (forwards, right) in verdicts.items()
        for seed, digits in enumerate(right)
        for uid, digit in enumerate(digits)
    ]
    path = tmp_path / "policies.parquet"
    columns = dict(zip(chain["SCHEMA"].names, map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns, schema=chain["SCHEMA"]), path)
    taken = {"tracelock_0.8": (10, 30, 60), "threshold_0.9": (20, 20, 20)}
    clock = [
        {"method": method, "batch": 1, "round": number, "milliseconds": each, "share": 0.0}
        for method, times in taken.items()
        for number, each in enumerate(times)
    ]
    path.with_suffix(".json").write_text(json.dumps({"clock": clock}))
    text = script["report"](path)
    # Of the rules only one is as accurate as the policy, in its first seed.
    rows = "|---|---:|---:|\n| tracelock_0.8 | threshold_0.9 | 1.50 (0.50 to 3.00) |"
    assert text.rstrip().endswith(rows)
    # At 6 forwards half of the problems are decoded by either: (0.5 + 1) / 2 = 0.75.
    (line,) = re.findall(r"\| test \| tracelock_0\.8 \| most accurate \| (.*)", text)
    right, forwards, rules, difference, _ = line.split(" | ")
    assert right.startswith("87.5 ± ")
    assert (forwards, rules) == ("6.0", "75.0 (threshold_0.6, threshold_0.9)")
    assert difference.startswith("+12.5 [")
    assert "| threshold_0.9 | 100.0 ± 0.0 @ 8.0 | 100.0 ± 0.0 @ 8.0 |" in text


def test_harder_stories_are_worked_out_and_share_no_sentence_with_training(
    imported: Script,
) -> None:
    stories = imported("experiments/stories.py")
    told = {}
    for name, lines in (
        ("Stories", (1, 2, 3)),
        ("NewSentences", (1, 2, 3)),
        ("ThreeEvents", (3, 4)),
    ):
        task = stories[name](num_examples=200)
        examples = task.examples()
        for example in examples:
            answer = task.reference_completion(example)
            assert task.grade(example, answer).is_correct
            assert len(example.reference["lines"]) in lines
            for equation in example.reference["lines"]:
                left, right = equation.partition(" ")[0].split("=")
                assert eval(left) == int(right)
        sentences = [*(one[0] for one in task.openings), *(one[0] for one in task.events)]
        told[name] = {*sentences, *task.questions}
    assert not told["Stories"] & told["NewSentences"]
    assert told["Stories"] == told["ThreeEvents"]


@pytest.mark.parametrize(("df", "quantile"), [(1, 12.706), (4, 2.776), (30, 2.042), (1e9, 1.960)])
def test_students_quantiles_are_those_of_tables(df: float, quantile: float, imported: Script):
    values, tails = imported("experiments/chain.py")["student"](df)
    assert np.interp(-0.05, -tails, values) == pytest.approx(quantile, rel=1e-3)


def test_tuning_counts_samples_and_compares_between_two_thresholds(imported: Script) -> None:
    script = imported("experiments/tuning.py")
    most = max(script["KS"])
    # One seed, two problems: a single right sample of all, and none.
    right = np.zeros((1, 2 * most))
    right[0, 3] = 1.0
    assert script["rates"](right, 1).tolist() == [[1 / most, 0.0]]
    assert script["rates"](right, most).tolist() == [[1.0, 0.0]]
    front = [constant(0.5, 4), constant(1.0, 8)]
    # A quarter of the way from 4 to 8 forwards.
    assert script["between"](front, 5.0).mean() == 0.625
    assert script["between"](front, 9.0) is None


def test_the_area_under_the_curve_counts_weights_and_ties(imported: Script) -> None:
    script = imported("experiments/policy_states.py")
    scores, stood = np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, True, False, True])
    # Pairs: 0.4 > 0.1, 0.4 = 0.4, 0.8 > 0.1, 0.8 > 0.4; then the first wrong one counts twice.
    weights = np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0]])
    assert script["weighted_auroc"](scores, stood, weights).tolist() == [3.5 / 4, 5.5 / 6]
