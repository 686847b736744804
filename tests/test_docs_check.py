"""The long commands of the documents give the numbers that stand there (``make docs-check``).

About half an hour of one core. What ``DOCS_RUN`` (``runs/docs_check``) holds is not made again.
Other processors or versions round differently, so accuracies may differ by two problems.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lit_dlm.reports.summary import MethodSummary
from tests.quickstart import ROOT, kept_summaries

pytestmark = [pytest.mark.docs, pytest.mark.slow, pytest.mark.timeout(7200)]
FOLDER = Path(os.environ.get("DOCS_RUN", ROOT / "runs" / "docs_check")).resolve()


def run(words: list[str]) -> str:
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "110"}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def summaries(path: str) -> dict[tuple[str, str], MethodSummary]:
    found = [MethodSummary(**record) for record in json.loads((FOLDER / path).read_text())]
    return {(one.task, one.method): one for one in found}


@pytest.fixture(scope="module")
def quickstart() -> None:
    folder = FOLDER / "runs" / "quickstart"
    subprocess.run(["make", "-C", ROOT, "quickstart", f"RUN_DIR={folder}"], check=True)


@pytest.mark.usefixtures("quickstart")
def test_the_quickstart_gives_the_table():
    found = summaries("runs/quickstart/summary.json")
    assert list(found) == [(one.task, one.method) for one in kept_summaries()]
    for kept in kept_summaries():
        one = found[kept.task, kept.method]
        assert one.accuracy == pytest.approx(kept.accuracy, abs=2.01 / kept.n), one
        assert one.nfe == pytest.approx(kept.nfe, abs=0.05 * kept.nfe), one


@pytest.mark.usefixtures("quickstart")
@pytest.mark.parametrize(
    "page", ["docs/how-to/trajectories.md", "docs/how-to/view.md", "docs/how-to/benchmark.md"]
)
def test_what_a_command_prints_is_what_the_page_shows(page: str):
    text = (ROOT / page).read_text()
    prompted = r"\$ (lit-dlm (?:traj|compare) (?:.*\\\n)*.*)\n((?:(?!```|\$ ).*\n)+)"
    shown = re.findall(prompted, text)
    assert shown
    for command, lines in shown:
        printed = {
            " ".join(line.split())
            for line in run(shlex.split(command.replace("\\\n", " "))[1:]).splitlines()
        }
        wanted = {
            " ".join(line.split())
            for line in lines.splitlines()
            if re.search("^[^─]*[^─\\s]", line)
        }
        assert wanted - printed == set(), command


def test_fine_tuning_the_shipped_model_changes_little_as_the_page_says():
    page = (ROOT / "docs" / "how-to" / "finetune.md").read_text()
    (block,) = re.findall(
        r"```(?:sh)?\n(lit-dlm predict --config exp/distill_tiny.*?)```", page, re.DOTALL
    )
    base = "lit-dlm predict --config exp/evaluate_tiny --run_dir runs/evaluate_base"
    for line in [*block.replace("\\\n", " ").splitlines(), base]:
        run(shlex.split(line.partition("#")[0])[1:])
    assert "little left to gain on these problems" in page
    before, after = (
        summaries(f"runs/{folder}/summary.json")["word_problems", "entropy"].accuracy
        for folder in ("evaluate_base", "evaluate_tiny")
    )
    assert after == pytest.approx(before, abs=0.03)  # 15 of 500


def test_caches_are_as_much_faster_as_the_page_says():
    """Ratios of one process; 15 % to either side for what else a machine does."""
    page = (ROOT / "docs" / "how-to" / "models.md").read_text()
    prefix, low, high = map(
        float, re.findall(r"([\d.]+) times as\nmany .*and ([\d.]+) to ([\d.]+) times", page)[0]
    )
    script = [sys.executable, str(ROOT / "benchmarks" / "decode.py"), "--json"]
    done = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT)
    speed = json.loads(done.stdout)["tokens_per_second_by_scheme"]
    assert speed["prefix"] / speed["none"] == pytest.approx(prefix, rel=0.15)
    assert 0.85 * low < speed["dual"] / speed["none"] < 1.15 * high
