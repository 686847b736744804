"""The report on a machine, through the command line."""

import sys
from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import cli
from lit_dlm.grading import SandboxError, cgroups
from lit_dlm.grading.sandbox import probe

pytestmark = pytest.mark.slow  # tries the sandboxes


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]):
    """Gives the lines of a report, without what aligns them."""

    def lines(*, status: int = 0) -> list[str]:
        with pytest.raises(SystemExit, match=str(status)) if status else nullcontext():
            cli.main(["doctor"])
        found = capsys.readouterr().out.splitlines()
        assert {line[:5] for line in found} <= {"ok   ", "note ", "bad  "}
        return [" ".join(line.split()) for line in found]

    return lines


def test_every_part_is_reported_and_the_sandboxes_are_tried(report):
    lines = report()
    subjects = {line.split()[1] for line in lines}
    assert subjects == {"versions", "extra", "GPU", "sandbox", "disk"}
    extras = {line.split()[2] for line in lines if line.split()[1] == "extra"}
    assert extras == set(metadata.metadata("lit-dlm").get_all("Provides-Extra"))
    assert lines[0].startswith("ok versions lit-dlm 0.1.0, Python 3.")
    for method in ("bubblewrap", "namespaces", "landlock"):
        told = f"ok sandbox {method} works"
        try:
            probe(method)
        except SandboxError as error:
            told = f"note sandbox {method} does not work ({error})"
        assert told in lines
    told = "note sandbox no memory cgroup can be made"
    assert any(line.startswith(told) for line in lines) is (cgroups.parent_folder() is None)


def test_what_is_missing_comes_with_its_consequence(report, monkeypatch: pytest.MonkeyPatch):
    """No sandbox, an old GPU and a small one, no evalplus, and a Lightning that is too old."""
    installed = metadata.version

    def version(name: str) -> str:
        if name == "evalplus":
            raise metadata.PackageNotFoundError(name)
        return "1.9" if name == "lightning" else installed(name)

    gpus = [
        SimpleNamespace(name=name, total_memory=memory * 10**9, major=major)
        for name, memory, major in (("Volta", 32, 7), ("Ampere", 12, 8), ("Hopper", 80, 9))
    ]
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    lines = report(status=1)
    (lowest,) = (one for one in metadata.requires("lit-dlm") if one.startswith("lightning>"))
    assert lines[0].startswith("bad versions")
    assert lines[0].endswith(f": pip install '{lowest}'")
    assert [line for line in lines if " GPU " in line] == [
        "note GPU Volta, 32 GB: computes no bfloat16: set trainer.precision to 32-true",
        "note GPU Ampere, 12 GB: too small for the 16 GB of an 8B model and its logits",
        "ok GPU Hopper, 80 GB",
    ]
    assert {
        "note extra code lacks evalplus==0.3.1: MBPP+ cannot be graded; "
        "pip install 'evalplus==0.3.1'",
        "note sandbox bubblewrap does not work (not installed)",
    } <= set(lines)
    assert lines[-3] == (
        "note sandbox none: tasks that run model-written code are refused, all others work"
    )


def test_without_namespaces_rl_on_code_is_told_what_to_set(report, monkeypatch: pytest.MonkeyPatch):
    only_landlock = Mock(side_effect=[SandboxError("forbidden")] * 2 + [None])
    monkeypatch.setattr("lit_dlm.commands.doctor.probe", only_landlock)
    told = "no namespaces: RL on code needs require_isolation: landlock, see SECURITY.md"
    assert f"note sandbox {told}" in report()
