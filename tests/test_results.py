"""Tables and numbers of the results are those of what is kept beside them."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lit_dlm.toy import PythonFunctions, WordProblems
from tests.quickstart import kept_summaries, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


def page(name: str) -> str:
    return (RESULTS / name / "index.md").read_text()


def test_the_table_of_the_quickstart_is_that_of_the_kept_run():
    text = (ROOT / "docs" / "start" / "quickstart.md").read_text()
    assert re.split(r"\n*<!-- /?quickstart-output -->\n*", text)[1] == table()
    methods = {one.method for one in kept_summaries()}
    assert f"benchmarks {len(methods)}\ndecoding methods" in (ROOT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "program", "count"),
    [
        ("stack/stack.parquet", "stack", 2),
        ("decode_states/decode_states.parquet", "decode_states", 2),
        ("d2f/d2f.parquet", "d2f", 2),
        ("editing/editing.parquet", "editing", 3),
        ("hybrid/hybrid.parquet", "hybrid", 2),
        ("smollm2/smollm2.json", "smollm2_losses", 1),
        ("outcome_policies/policy_states.json", "policy_states", 1),
        ("outcome_policies/policy_order.json", "policy_order", 2),
        ("outcome_policies/outcome_ablations.parquet", "outcome_ablations", 1),
        ("elsewhere/feature_tiers.json", "feature_tiers", 1),
        ("elsewhere/policy_transfer.parquet", "policy_transfer", 1),
        ("elsewhere/warm_start.parquet", "warm_start", 1),
        ("every_window/policy_clock.json", "policy_clock", 2),
        ("rl/rl_methods.json", "rl_methods", 1),
        ("rl/block_widening.parquet", "block_widening", 1),
        ("lockstep/lockstep.parquet", "kept_decodes", 3),
        ("take_back/token_editing.parquet", "kept_decodes", 1),
        ("countdown/countdown_worked.parquet", "kept_decodes", 2),
        ("countdown/countdown_direct.parquet", "kept_decodes", 2),
        ("tuning/tuning.parquet", "tuning", 4),
    ],
)
def test_tables_are_those_of_the_kept_results(kept: str, program: str, count: int, imported):
    script, path = imported(f"experiments/{program}.py"), RESULTS / kept
    if path.suffix == ".json":
        results = [json.loads(path.read_text())]
    else:
        results = [script.get("read_decodes", pq.read_table)(path)]
        beside = path.with_suffix(".json")
        results += [json.loads(beside.read_text())] if beside.exists() else []
    tables = script["markdown"](*results).split("\n\n")
    assert len(tables) == count
    assert not [table for table in tables if table.strip() not in page(path.parent.name)]


@pytest.mark.slow
def test_tables_of_the_policy_bench_are_those_of_the_kept_decodes(imported):
    """On its page, and on others that have tables of its script."""
    bench = imported("experiments/policy_bench.py")
    kept = RESULTS / "policies" / "policy_bench.parquet"
    results, curves = bench["read"](kept), json.loads(kept.with_suffix(".json").read_text())
    early = bench["read"](RESULTS / "elsewhere" / "addition_early.parquet")
    for name, made in (
        ("policies", bench["contests_table"](results)),
        ("policies", bench["summary_table"](results, bench["NEAR"])),
        ("policies", bench["fronts_table"](results)),
        ("outcome_policies", bench["curve_table"](curves)),
        ("elsewhere", bench["contests_table"](early)),
        ("take_back", bench["listing"](RESULTS / "take_back" / "taking_back.parquet")),
    ):
        assert made.strip() in page(name)
    lines = bench["listing"](kept).splitlines()
    own = [line for line in lines if line.startswith("| outcome |")]
    assert len(own) == 36  # six thresholds in six windows, of all tasks but the last one
    assert all(line.endswith("| |") for line in own)
    assert f"forwards: {', '.join(bench['FIVE'].values())}" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_tables_of_one_policy_for_every_window_are_those_of_the_kept_decodes(imported):
    script, folder = imported("experiments/every_window.py"), RESULTS / "every_window"
    tables = script["report"](folder / "every_window.parquet").split("\n\n")
    assert len(tables) == 5
    assert not [table for table in tables if table.strip() not in page("every_window")]
    tried = script["read_decodes"](folder / "every_window_trial.parquet")
    assert script["trial_table"](tried).strip() in page("every_window")


@pytest.mark.slow
def test_tables_of_the_make_up_of_lists_are_those_of_its_script(imported):
    """Up to 1,000 problems: longer lists take minutes to draw."""
    script = imported("experiments/make_up.py")
    text = page("policies")
    lines = script["make_up"]((100, 300, 1_000)).strip().splitlines()
    assert len(lines) == 2 + 6 + 5 + 2 * 4 + 4
    assert not [line for line in lines if line not in text]
    kept = script["read"](RESULTS / "policies" / script["NAME"])
    assert script["reweighted"](kept).strip() in text


@pytest.mark.slow
def test_rows_of_the_real_model_are_those_of_the_kept_decodes(imported):
    results = imported("experiments/real_results.py")
    rows: set[str] = set()
    for name in ("real_model", "real_model_4"):
        decoded, facts = results["read"](RESULTS / "real_model" / f"{name}.parquet")
        rows |= set(results["tables"](decoded.to_pandas(), facts).splitlines())
    policies = imported("experiments/real_policies.py")
    for path in (RESULTS / "real_model").glob("real_policies*.parquet"):
        rows |= set(policies["report"](path).splitlines())
    setting = r"[a-z-]+_[\d.]+ \|.*"
    first, second = rf"[a-z-]+ \| (?:[a-z-]+ \|.*|{setting})", rf"(?:[a-z ]+ \| )?{setting}"
    shown = re.findall(rf"^\| (?:{first}|{second})", page("real_model"), re.MULTILINE)
    assert len(shown) > 20
    assert not set(shown) - rows


@pytest.mark.slow
@pytest.mark.parametrize("card", ["tiny", "tiny-planning"])
def test_policies_of_cards_have_the_figures_of_their_decodes(card: str):
    decodes = pq.read_table(RESULTS / "outcome_policies" / "outcome_policies.parquet").to_pandas()
    tasks = {"tiny": ["word_problems", "python_functions"], "tiny-planning": ["sudoku"]}[card]
    text = (ROOT / "lit_dlm" / "assets" / card / "README.md").read_text()
    found = dict(
        re.findall(r"^\| (\w+) \| (\d.*) \|$", text.partition("## Policy")[2], re.MULTILINE)
    )
    assert len(found) == decodes.method.nunique()
    for method, figures in found.items():
        rows = [decodes[(decodes.task == task) & (decodes.method == method)] for task in tasks]
        assert {len(one) for one in rows} == {1000}
        rates = [one.correct.mean() for one in rows]
        assert figures == " | ".join(
            f"{rate:.3f} ± {(rate * (1 - rate) / 1000) ** 0.5:.3f} ({one.forwards.mean():.1f})"
            for rate, one in zip(rates, rows, strict=True)
        )


def asked(
    task: type[WordProblems | PythonFunctions], split: str, count: int, seed: int
) -> set[str]:
    """What the problems of a list ask for, apart from names and things."""
    keys = ("spec",) if task is PythonFunctions else ("start", "moves")
    listed = task(split=split, num_examples=count, seed=seed).examples()
    return {str([one.reference[key] for key in keys]) for one in listed}


@pytest.mark.slow
def test_as_many_problems_recur_as_the_pages_say():
    """Of lists whose seeds and lengths are those of the quickstart, the card and the bench."""
    recurring: dict[str, list[int]] = {}
    for task, traces in ((PythonFunctions, 700), (WordProblems, 1600)):
        card = asked(task, "train", 4000, 1003)
        bench, traced = asked(task, "train", 4000, 1000), asked(task, "train", traces, 0)
        quickstart, tested = asked(task, "test", 200, 0), asked(task, "test", 1000, 23)
        chosen = asked(task, "train", 300, 101)
        assert not (quickstart | tested) & (card | traced | asked(task, "train", traces, 3))
        for name, shared in (
            ("tested", quickstart & tested),
            ("validated", asked(task, "train", 300, 100) & card),
            ("prompts", chosen & bench),
            ("traces", chosen & (bench | traced)),
        ):
            recurring.setdefault(name, []).append(len(shared))
    text = " ".join((ROOT / "lit_dlm" / "assets" / "tiny" / "README.md").read_text().split())
    assert "{} functions and {} word problems recur".format(*recurring["tested"]) in text
    validated = "{} of 300 functions and {} of 300 word problems are among"
    assert validated.format(*recurring["validated"]) in text
    text = " ".join(page("policies").split())
    assert (
        "of 300, by numbers and operations, {} of functions, {} of words".format(
            *recurring["prompts"]
        )
        in text
    )
    assert "traced problems {} of functions and {} of words".format(*recurring["traces"]) in text


def test_numbers_of_the_list_of_results_are_on_their_pages():
    rows = re.findall(
        r"^\| \[.*?\]\((\w+)/index.md\) \| .*? \| (.*?) \|",
        (RESULTS / "index.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(name for name, _ in rows) == sorted(
        one.name for one in RESULTS.iterdir() if one.is_dir()
    )
    assert not [
        (name, number)
        for name, told in rows
        for number in re.findall(r"\d+\.\d+", told)
        if number not in page(name)
    ]


@pytest.mark.parametrize(
    ("text", "part", "numbers", "source", "count"),
    [
        (
            "docs/how-to/finetune.md",
            r"on three seeds.*as well as TABOM",
            r"(\d+\.\d) %",
            "results/tuning/index",
            4,
        ),
        ("docs/how-to/benchmark.md", r"\n- TraceLock at.*", r"\b0\.\d{3}\b", "how-to/benchmark", 1),
        ("README.md", r"\n- \*\*On SmolLM2.*?\n- ", r"\d+\.\d\b", "results/real_model/index", 9),
        ("README.md", r"traces: \d+ to \d+ h", r"\d+", "how-to/tracelock", 2),
        ("README.md", r"\n- \*\*A commit.*?SmolLM2", r"\d+\.\d\b", "results/policies/index", 16),
    ],
)
def test_numbers_in_prose_are_those_of_the_tables(
    text: str, part: str, numbers: str, source: str, count: int
):
    """p-values are in printed comparisons, accuracies in tables (100 times a share)."""
    (prose,) = re.findall(part, (ROOT / text).read_text(), re.DOTALL)
    found = re.findall(numbers, prose)
    assert len(found) == count
    lines = (ROOT / "docs" / f"{source}.md").read_text().splitlines()
    tables = "\n".join(line for line in lines if re.match(r"\||  \w| *\w.*\d +\d", line))
    assert not set(found) - {*re.findall(r"\d+(?:\.\d+)?", tables)}
