"""What the README shows works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def _commands() -> list[str]:
    """Every lit-dlm command, with continued lines joined and comments dropped."""
    text = "\n".join(body for kind, body in BLOCKS if kind != "python").replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*", "", line).removeprefix("$ ") for line in text.splitlines()]
    return [
        line[line.index("lit-dlm ") :] for line in lines if re.search(r"(^|[ /])lit-dlm ", line)
    ]


@pytest.mark.parametrize("command", [c for c in _commands() if "error" not in c])
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


def test_python_example_runs(capsys):
    (code,) = (body for kind, body in BLOCKS if kind == "python")
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
