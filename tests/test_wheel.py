"""The installed wheel works in an empty folder: the quickstart and a user's own files."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
TRAIN = "[{class_path: WordProblems, init_args: {split: train, num_examples: 40}}]"
OWN_DATA = "[{class_path: ResponsesFile, init_args: {path: own.jsonl}}]"
IN_ONE_PROCESS = f"""
predict --config=exp/generate_tiny --run_dir=runs/tiny "--data.init_args.tasks={TRAIN}"
fit --config=exp/tracelock_tiny --run_dir=runs/tiny --trainer.max_steps=4
    --trainer.val_check_interval=2 --data.init_args.batch_size=8
fit --config=exp/sft_gt_tiny --run_dir=runs/sft --trainer.max_steps=2
    "--data.init_args.sources={OWN_DATA}"
"""  # which saves the imports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder beside a clean environment: the wheel and nothing of the checkout."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    source.mkdir()
    for name in ("lit_dlm", "datamodules", "callbacks", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "cli.py"):
        shutil.copy(ROOT / name, source)
    # The source distribution, and from that the wheel.
    _run(sys.executable, "-m", "build", "--no-isolation", f"--outdir={base}", source, cwd=base)
    (wheel,) = base.glob("*.whl")
    assert list(base.glob("*.tar.gz"))
    environment = base / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=base)
    python = environment / "bin" / "python"
    # What we depend on comes from this environment; a plain path leaves the checkout out.
    here = sysconfig.get_path("purelib", vars={"base": environment, "platbase": environment})
    (Path(here) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    _run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"),
        *("--no-index", wheel),
        cwd=base,
    )
    empty = base / "empty"
    empty.mkdir()
    return empty


def _run(*command: str | Path, cwd: Path) -> str:
    own = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in own}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**environment, "MASTER_PORT": str(free_port())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_installed_command_does_a_users_first_hour(folder: Path):
    """Traces, a policy, a benchmark on two processes with an own policy, own data, a report."""
    python, script = (folder.parent / "venv" / "bin" / name for name in ("python", "lit-dlm"))
    where = _run(python, "-c", "import lit_dlm, cli; print(lit_dlm.__file__)", cwd=folder)
    assert str(folder.parent / "venv") in where
    answer = {"prompt": "Tom has 3 pens, finds 4. How many pens?", "answer": "3+4=7\n#### 7"}
    (folder / "own.jsonl").write_text(8 * (json.dumps(answer) + "\n"))
    shutil.copy(ROOT / "examples" / "commit_policy.py", folder / "own_policy.py")
    commands = IN_ONE_PROCESS.strip().replace("\n    ", " ").splitlines()
    calls = f"import cli\nfor words in {list(map(shlex.split, commands))}:\n    cli.main(words)"
    _run(python, "-c", calls, cwd=folder)
    assert list(folder.glob("runs/sft/adapter/adapter_model.safetensors"))
    _run(
        *(script, "predict", "--config", "exp/benchmark_tiny", "--config", "trainer/ddp_cpu"),
        *("--run_dir", "runs/tiny", "--data.init_args.tasks", TRAIN.replace("train", "test")),
        "--model.init_args.decoders={own: {policy: own_policy.SurePrefix, quota: NoQuota}}",
        cwd=folder,
    )
    _run(script, "report", "runs/tiny", cwd=folder)
    rows = json.loads((folder / "runs/tiny/summary.json").read_text())
    complete = {row["method"]: row["n"] for row in rows}
    assert complete == dict.fromkeys(complete, 40)
    assert {"own", "tracelock_099"} <= complete.keys()
    assert (folder / "runs/tiny/report.html").exists()
    assert (folder / "runs/tiny/traces.html").exists()
