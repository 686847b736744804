"""What the README and the pages of the documentation show works."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import cli
from tests.e2e.runs import OWN_PAGES, problems

QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")
ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow  # every case builds the whole command line
README = (ROOT / "README.md").read_text()
TRAINER = ("fit", "validate", "test", "predict")
STUBS = """
lit-dlm() { printf '%s\\0' lit-dlm "$@"; printf '\\n\\0'; }
srun() { shift; "$@"; }
torchrun() { while [ "$1" != lit-dlm ]; do shift; done; "$@"; }
SLURM_NTASKS=32 HEAD=node1
names="cp make python chromium tensorboard pip docker evalplus.evaluate"
for name in $names; do eval "$name() { :; }"; done
"""
"""The shell gives the arguments of every command, with its own rules for quotes and variables."""


def blocks(path: Path) -> list[tuple[str, str]]:
    """Language and text of every block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@cache
def commands(path: Path) -> list[list[str]]:
    """Every lit-dlm command of a page, as its arguments; where output is shown, of its prompts."""
    found: list[list[str]] = []
    texts = [text for kind, text in blocks(path) if kind in ("", "sh", "bash", "console")]
    if path.name == "README.md":
        texts += re.findall(r"`(lit-dlm [^`]+)`", path.read_text())
    for text in texts:
        if "lit-dlm" not in text:
            continue
        script = text.replace(".venv/bin/", "")
        if "$ " in text and re.search(r"^\$ ", text, re.MULTILINE):
            script = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", script, re.MULTILINE))
        command = ["bash", "-c", STUBS + script]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert not done.stderr, f"{path}: {done.stderr}"
        found += [words.split("\0")[1:-1] for words in done.stdout.split("\n\0")[:-1]]
    return found


def essence(words: list[str]) -> str:
    """What decides whether a command parses: where its run lies does not."""
    plain = re.sub(r"--(run_dir|ckpt_path)[ =]\S+", "", " ".join(words)).strip()
    return re.sub(r"configs/(\S+)\.yaml", r"\1", plain)


DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TRAINED = {
    essence(words): words
    for path in PAGES
    if path not in OWN_PAGES
    for words in commands(path)
    if words[:1] and words[0] in TRAINER
}


PLAIN = re.compile(r"\w+ --config exp/(?:\w+/)?(\w+)")
"""A command of an experiment as it is: tests/e2e/test_experiments.py runs all of these."""
OTHERS = [words for told, words in TRAINED.items() if not PLAIN.fullmatch(told)]


def test_experiments_of_pages_exist():
    named = [found[1] for told in TRAINED if (found := PLAIN.fullmatch(told))]
    assert len(named) > 20
    assert not set(named) - {path.stem for path in (ROOT / "configs" / "exp").rglob("*.yaml")}


@pytest.mark.parametrize("words", OTHERS, ids=range(len(OTHERS)))
def test_command_parses(words: list[str], capsys, monkeypatch, tmp_path: Path):
    """Of all pages; files that a reader makes are made here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "mine.yaml").write_text("{policy: ConfidencePolicy}")
    if "my_advantage.BestOnly" in words:
        words = [word.replace("my_advantage.BestOnly", "GroupZScore") for word in words]
    with pytest.raises(SystemExit) as done:
        cli.main([*words, "--print_config"])
    error = capsys.readouterr().err
    if done.value.code:
        # The one wrong command is shown together with its error.
        shown = re.search(r"lit-dlm: error: .*", (DOCS / "start" / "quickstart.md").read_text())
        assert shown is not None
        assert error.strip().splitlines()[-1] == shown[0]


OTHERWISE = re.compile(r"--[\w.]+\.(?:init_args\.\w|\w+=)")


def test_an_option_has_one_spelling():
    """A path without ``init_args``, then a space; results tell commands as they were given."""
    told = [path for path in PAGES if "results" not in path.parts]
    told += sorted((ROOT / "configs").rglob("*.yaml"))
    found = {path.name: OTHERWISE.findall(path.read_text()) for path in told}
    assert not {name: hits for name, hits in found.items() if hits}


def test_other_commands_exist():
    for path in PAGES:
        unknown = [words for words in commands(path) if words and words[0] not in cli.COMMANDS]
        assert not unknown, path


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trajectories of a small benchmark run, as the README's commands leave them."""
    run_dir = tmp_path_factory.mktemp("readme")
    decoders = {name: f"decode/{name}.yaml" for name in ("confidence", "threshold_09")}
    cli.main(
        [
            *("predict", "--config=exp/benchmark_tiny", f"--run_dir={run_dir}", *QUIET),
            *("--model.init_args.sweep=null", f"--data.init_args.tasks={problems(3)}"),
            f"--model.init_args.decoders={json.dumps(decoders)}",
        ]
    )
    return run_dir / "trajectories"


SHORT = [
    words
    for page in (
        "README",
        "docs/start/quickstart",
        "docs/how-to/trajectories",
        "docs/how-to/benchmark",
    )
    for words in commands(ROOT / f"{page}.md")
    if words and words[0] in ("traj", "view", "report", "compare", "generate")
]


@pytest.mark.parametrize("words", SHORT, ids=str)
def test_short_command_runs(words: list[str], trajectories: Path, capsys):
    """The small run stands for the quickstart's, and its two methods for those of the page."""
    run_dir = trajectories.parent
    places = {True: str(trajectories), False: str(run_dir)}
    words = [places[word.endswith("/trajectories")] if "runs/" in word else word for word in words]
    words = [re.sub("@.*", "@confidence", word) for word in words]
    for flag, method in {"--a": "threshold_09", "--b": "confidence"}.items():
        if flag in words:
            words[words.index(flag) + 1] = method
    cli.main(words)
    told = capsys.readouterr().out
    expected = {"generate": "#### 36", "compare": "word_problems"}.get(words[0], "")
    if words == SHORT[0]:  # README's first command, with its output
        (expected,) = re.findall(r"^\$ lit-dlm generate .*\n((?:[^`].*\n)+)", README, re.MULTILINE)
    assert expected in told
    if "verify" in words:
        assert "passed: level 3 (teacher-forced), 6 records" in told
    if written := {"view": "traces.html", "report": "report.html"}.get(words[0]):
        assert "word_problems/test/00000" in (run_dir / written).read_text()


def test_the_command_of_gsm8k_runs_after_the_quickstart(trajectories: Path, monkeypatch):
    """Beside the quickstart's folder, with longer responses; a prompt is too long, as most are."""
    found = commands(DOCS / "how-to" / "benchmark.md")
    (command,) = [words for words in found if "data/gsm8k" in words]
    source = trajectories.parent / "test.jsonl"
    questions = ["2+2?", "2+3-1?", f"2{200 * '+0'}+2?"]
    rows = [json.dumps({"question": one, "answer": "4\n#### 4"}) for one in questions]
    source.write_text("\n".join(rows))
    monkeypatch.chdir(trajectories.parent)
    monkeypatch.setenv("GSM8K_PATH", str(source))
    cli.main([*command, *QUIET])
    found = (trajectories.parent / "runs" / "gsm8k" / "summary.md").read_text()
    assert "### gsm8k" in found
    (row,) = [line for line in found.splitlines() if line.startswith("| threshold_09 |")]
    assert row.endswith("| 2 | 1 |")
    assert "| n | skipped |" in found


def test_python_examples_run(capsys):
    for page in ("README.md", "docs/how-to/models.md"):
        for code in (body for kind, body in blocks(ROOT / page) if kind == "python"):
            exec(compile(code, page, "exec"), {})
    output = capsys.readouterr().out
    assert "#### 36" in output
    assert re.search(r"forwards: \d+", output)


def test_make_targets_exist():
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"[`\n]make ([a-z-]+)", page.read_text())
    }
    assert len(named) > 7
    assert not named - known
