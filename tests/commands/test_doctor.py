"""The report on a machine, through the command line."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import cli
from lit_dlm.grading import SandboxError
from lit_dlm.grading.sandbox import probe

# It tries the sandboxes.
pytestmark = pytest.mark.slow


def _lines(capsys: pytest.CaptureFixture[str], *, status: int = 0) -> list[str]:
    if status:
        with pytest.raises(SystemExit, match=str(status)):
            cli.main(["doctor"])
    else:
        cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert {line[:5] for line in lines} <= {"ok   ", "note ", "bad  "}
    return [" ".join(line.split()) for line in lines]


def test_every_part_is_reported_and_the_sandboxes_are_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = _lines(capsys)
    subjects = [line.split()[1] for line in lines]
    assert set(subjects) == {"versions", "extra", "GPU", "sandbox", "disk"}
    assert lines[0].startswith("ok versions lit-dlm 0.1.0, Python 3.")
    for method in ("bubblewrap", "namespaces", "landlock"):
        told = f"ok sandbox {method} works"
        try:
            probe(method)  # type: ignore[arg-type]
        except SandboxError as error:
            told = f"note sandbox {method} does not work ({error})"
        assert told in lines


def test_what_is_missing_comes_with_its_consequence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sandbox, an old GPU and a small one, no evalplus, and a Lightning that is too old."""
    installed = metadata.version

    def version(name: str) -> str:
        if name == "evalplus":
            raise metadata.PackageNotFoundError(name)
        return "1.9" if name == "lightning" else installed(name)

    gpus = [
        SimpleNamespace(name="Volta", total_memory=32 * 10**9, major=7),
        SimpleNamespace(name="Ampere", total_memory=12 * 10**9, major=8),
        SimpleNamespace(name="Hopper", total_memory=80 * 10**9, major=9),
    ]
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    lines = _lines(capsys, status=1)
    (lowest,) = (
        text for text in metadata.requires("lit-dlm") or () if text.startswith("lightning>")
    )
    assert lines[0].endswith(f": pip install --upgrade '{lowest}'")
    assert lines[0].startswith("bad versions")
    assert (
        "note extra code lacks evalplus==0.3.1: MBPP+ cannot be graded; pip install 'lit-dlm[code]'"
    ) in lines
    assert [line for line in lines if " GPU " in line] == [
        "note GPU Volta, 32 GB: computes no bfloat16: set trainer.precision to 32-true",
        "note GPU Ampere, 12 GB: too small for the 16 GB of an 8B model and its logits",
        "ok GPU Hopper, 80 GB",
    ]
    assert "note sandbox bubblewrap does not work (not installed)" in lines
    assert lines[-3] == (
        "note sandbox none: tasks that run model-written code are refused, all others work"
    )


def test_without_namespaces_rl_on_code_is_told_what_to_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_landlock(method: str) -> None:
        if method != "landlock":
            raise SandboxError("forbidden")

    monkeypatch.setattr("lit_dlm.commands.doctor.probe", only_landlock)
    assert (
        "note sandbox no namespaces: RL on code needs require_isolation: landlock, see SECURITY.md"
    ) in _lines(capsys)
