"""What the README shows works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import cli

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow  # every case builds the whole command line
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def _commands() -> list[str]:
    """Every lit-dlm command, with continued lines joined and comments dropped."""
    text = "\n".join(body for kind, body in BLOCKS if kind != "python").replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*", "", line).removeprefix("$ ") for line in text.splitlines()]
    return [
        line[line.index("lit-dlm ") :] for line in lines if re.search(r"(^|[ /])lit-dlm ", line)
    ]


@pytest.mark.parametrize(
    "command", [c for c in _commands() if c.split()[1] in ("fit", "validate", "test", "predict")]
)
def test_command_parses(command: str, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, *arguments = shlex.split(command)
    with pytest.raises(SystemExit) as done:
        cli.main([*arguments, "--print_config"])
    error = capsys.readouterr().err
    shown = re.search(r"lit-dlm: error: .*", README)
    if done.value.code:
        # The one wrong command is shown together with its error.
        assert shown is not None
        assert error.strip().splitlines()[-1] == shown[0]


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trajectories of a small benchmark run, as the README's commands leave them."""
    run_dir = tmp_path_factory.mktemp("readme")
    cli.main(
        [
            "predict",
            f"--config={ROOT / 'configs' / 'exp' / 'benchmark_tiny.yaml'}",
            f"--run_dir={run_dir}",
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
            "--model.init_args.sweep=null",
            f"--model.init_args.decoders={{confidence: {ROOT}/configs/decode/confidence.yaml, "
            f"threshold_095: {ROOT}/configs/decode/threshold_095.yaml}}",
            "--data.init_args.tasks=[{class_path: WordProblems, init_args: {split: test, "
            "num_examples: 3}}]",
        ]
    )
    return run_dir / "trajectories"


@pytest.mark.parametrize("command", [c for c in _commands() if c.split()[1] == "traj"])
def test_trajectory_command_runs(command: str, trajectories: Path, capsys):
    _, *arguments = shlex.split(command)
    assert arguments[2].endswith("/trajectories")
    arguments[2] = str(trajectories)
    if "--uid" in arguments:  # the small run has no TraceLock
        uid = arguments.index("--uid") + 1
        arguments[uid] = arguments[uid].partition("@")[0] + "@confidence"
    cli.main(arguments)
    if "verify" in arguments:
        assert "passed: level 3 (teacher-forced), 6 records" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [c for c in _commands() if c.split()[1] in ("view", "report", "compare")]
)
def test_report_command_runs(command: str, trajectories: Path, capsys):
    """The small run stands for the quickstart's, and its other method for TraceLock."""
    _, *arguments = shlex.split(command)
    run_dir = trajectories.parent
    arguments = [str(run_dir) if "runs/" in word else word for word in arguments]
    arguments = ["confidence" if "tracelock" in word else word for word in arguments]
    cli.main(arguments)
    written = {"view": "traces.html", "report": "report.html"}.get(arguments[0])
    if written is None:
        assert "word_problems" in capsys.readouterr().out
    else:
        assert "word_problems/test/00000" in (run_dir / written).read_text()


@pytest.mark.parametrize("command", [c for c in _commands() if c.split()[1] == "generate"])
def test_generate_command_runs(command: str, capsys):
    _, *arguments = shlex.split(command)
    cli.main(arguments)
    assert "#### 36" in capsys.readouterr().out


def test_python_examples_run(capsys):
    for code in (body for kind, body in BLOCKS if kind == "python"):
        exec(compile(code, "README.md", "exec"), {})
    output = capsys.readouterr().out
    assert "#### 36" in output
    assert re.search(r"forwards: \d+", output)


def test_make_targets_and_files_exist():
    targets = set(re.findall(r"`?make ([a-z-]+)", README))
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= known
    for path in re.findall(r"\]\((docs/[^)]+)\)|`(configs/[\w/.]+|lit_dlm/[\w/-]+)`", README):
        name = next(part for part in path if part)
        assert (ROOT / name).exists(), name
