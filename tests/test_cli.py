import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cli
import lit_dlm
from lit_dlm.config.files import packaged

ROOT = Path(__file__).resolve().parents[1]
TRAINER_COMMANDS = {"fit", "validate", "predict"}
HEAVY = {
    *("torch", "lightning", "transformers", "jsonargparse", "matplotlib"),
    *("webdataset", "datasets", "huggingface_hub"),
}


def test_help_is_one_screen_that_names_every_command(capsys):
    cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    cells = [line.strip().split("  ")[0] for line in lines if line.startswith("  ")]
    listed = [name for cell in cells for name in re.findall(r"^\w+|(?<=, )\w+", cell)]
    assert listed == list(cli.COMMANDS)
    assert set(listed) > TRAINER_COMMANDS | {"generate", "report", "compare", "view", "traj"}


def test_help_of_commands_imports_nothing_that_takes_seconds():
    """Eleven of them in one process, so that none does."""
    commands = ("fit", "predict", "traj", "view", "report", "compare", "profile", "evalplus", "new")
    commands += ("plan", "push")
    code = (
        "import sys, cli\n"
        f"for command in {commands}:\n"
        "    try:\n"
        "        cli.main([command, '--help'])\n"
        "    except SystemExit as stop:\n"
        "        assert not stop.code\n"
        "print('imported', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    help_text, _, modules = done.stdout.rpartition("imported ")
    assert not [command for command in commands if f"lit-dlm {command}" not in help_text]
    assert not HEAVY & set(modules.split())


def test_bash_completes_commands_and_experiments_with_the_line_of_the_quickstart():
    page = (ROOT / "docs" / "start" / "quickstart.md").read_text()
    (line,) = re.findall(r"^complete .* lit-dlm$", page, re.MULTILINE)
    code = (
        f'lit-dlm() {{ "{sys.executable}" -c "import cli; cli.main()" "$@"; }}\n{line}\ncomplete -p'
    )
    done = subprocess.run(
        ["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (words,) = re.findall(r"-W '([^']*)' lit-dlm", done.stdout)
    assert words.split() == [*cli.COMMANDS, *packaged("exp")]


IMPORTS = """
import os, sys
class Count:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with open(os.environ["IMPORTS"], "a") as file:
                file.write("torch\\n")
sys.meta_path.insert(0, Count())
"""
"""Of every process that starts with it on its path, one line when it imports torch."""


@pytest.mark.slow  # starts the command line
@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("fit --config exp/tracelok_tiny", 0),
        ("fit", 0),
        ("fit --config exp/tracelock_tiny --data '{class_path: TrajectoryData}'", 0),
        ("plan --config exp/tracelok_tiny", 0),
        ("fit --config exp/tracelock_tiny --run_dir '${nowhere}'", 0),
        ("predict --config exp/evaluate_tiny --print_config", 1),
        ("predict --config exp/evaluate_tiny --model.levl tokens", 1),
    ],
)
def test_names_are_looked_up_before_torch_is_imported(command: str, count: int, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(IMPORTS)
    environment = {"PYTHONPATH": str(tmp_path), "IMPORTS": str(tmp_path / "imports")}
    done = subprocess.run(
        [sys.executable, "cli.py", *shlex.split(command)], cwd=ROOT, env=os.environ | environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert bool(done.returncode) != ("--print_config" in command), done.stderr
    imported = tmp_path / "imports"
    assert (imported.read_text().splitlines() if imported.exists() else []) == ["torch"] * count


def test_the_version_is_told(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"lit-dlm {lit_dlm.__version__}\n"


@pytest.mark.slow  # builds the parser of every option
@pytest.mark.parametrize("command", ["fit", "predict"])
def test_the_short_help_names_options_of_the_parser(command: str, capsys):
    cli.main([command, "--help"])
    short = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help_all"])
    known = capsys.readouterr().out
    options = {line.split()[0] for line in short.splitlines() if line.startswith("  --")}
    assert len(options) > 6
    for option in options - {"--help_all", "--model.X", "--data.X"}:
        assert f" {option}" in known


def test_a_reader_that_has_seen_enough_gets_no_error():
    """As in ``lit-dlm recipes | head``: nobody reads the other end of the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "import cli; cli.main(['recipes'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch):
    def interrupt(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_dlm.commands.recipes.main", interrupt)
    with pytest.raises(SystemExit, match="130"):
        cli.main(["recipes"])
