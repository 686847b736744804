"""The installed wheel works in an empty folder: what a user does in the first hour, own files too.

Each thing is at most three commands; imports cost more than all of them, so most share a process.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
TRAIN = "[{class_path: WordProblems, init_args: {split: train, num_examples: 40}}]"
OWN_DATA = "[{class_path: ResponsesFile, init_args: {path: own.jsonl}}]"
IN_ONE_PROCESS = f"""
generate "Tom has 3 pens, finds 4. How many pens?" --config=mine --response_length=16
predict --config=exp/generate_tiny --run_dir=runs/tiny "--data.init_args.tasks={TRAIN}"
fit --config=exp/tracelock_tiny --run_dir=runs/tiny --trainer.max_steps=4
    --trainer.val_check_interval=2 --data.init_args.batch_size=8
fit --config=exp/sft_gt_tiny --run_dir=runs/sft --trainer.max_steps=2
    "--data.init_args.sources={OWN_DATA}"
merge tiny merged --adapter=runs/sft/adapter --dtype=float32
"""
LOADED = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from lit_dlm.backbones import HFBackbone
ids = torch.tensor([AutoTokenizer.from_pretrained("merged")("Tom has 3 pens")["input_ids"]])
theirs = AutoModelForCausalLM.from_pretrained("merged", attn_implementation="sdpa")
ours = HFBackbone("tiny", adapter="runs/sft/adapter")
with torch.no_grad():
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)
"""
OWN = {
    "own.jsonl": 8
    * '{"prompt": "Tom has 3 pens, finds 4. How many?", "answer": "3+4=7\\n#### 7"}\n',
    "own_policy.py": """
from lit_dlm.decoding import Selection


class Leftmost:
    def __init__(self, count=2):
        self.count = count

    def select(self, state, candidates, proposal, quota):
        rank = candidates.cumsum(1)
        return Selection(candidates & (rank <= self.count), -rank.float())
""",
    "mine.yaml": "policy: {class_path: own_policy.Leftmost, init_args: {count: 4}}\nquota: NoQuota",
}
"""Files of a user: data, a policy without annotations or base class."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder beside a clean environment: the wheel and nothing of the checkout."""
    base = tmp_path
    source, environment, empty = (base / name for name in ("source", "venv", "empty"))
    source.mkdir()
    empty.mkdir()
    for name in ("lit_dlm", "datamodules", "callbacks", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # The source distribution, and from that the wheel.
    _run(sys.executable, "-m", "build", "--no-isolation", f"--outdir={base}", source, cwd=base)
    (wheel,) = base.glob("*.whl")
    assert list(base.glob("*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top.partition("-")[0] for top in tops} == {"lit_dlm"}
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
    return empty


def _run(*command: str | Path, cwd: Path) -> str:
    own = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in own}
    environment["MASTER_PORT"] = str(free_port())
    environment["HF_DATASETS_CACHE"] = str(cwd.parent / "cache")
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, timeout=300,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_installed_command_does_a_users_first_hour(folder: Path):
    """Traces, a policy, a benchmark on two processes with an own policy, own data, a report."""
    for name, text in OWN.items():
        (folder / name).write_text(text)
    lines = IN_ONE_PROCESS.strip().replace("\n    ", " ").splitlines()
    code = (
        f"import lit_dlm\nfrom lit_dlm import cli\nprint(lit_dlm.__file__)\n"
        f"for words in {[shlex.split(line) for line in lines]}: cli.main(words)\n{LOADED}"
    )
    binaries = folder.parent / "venv" / "bin"
    printed = _run(binaries / "python", "-c", code, cwd=folder)
    assert printed.startswith(str(folder.parent / "venv"))
    assert (folder / "runs/sft/adapter/adapter_model.safetensors").exists()
    script = binaries / "lit-dlm"
    _run(
        *(script, "predict", "--config", "exp/benchmark_tiny", "--config", "trainer/ddp_cpu"),
        *("--run_dir", "runs/tiny", "--data.init_args.tasks", TRAIN.replace("train", "test")),
        *("--model.decoders={own: mine.yaml}", "--data.methods=[own, tracelock_099]"),
        cwd=folder,
    )
    _run(script, "report", "runs/tiny", cwd=folder)
    rows = json.loads((folder / "runs/tiny/summary.json").read_text())
    assert {row["method"]: row["n"] for row in rows} == {"own": 40, "tracelock_099": 40}
    assert {row["nfe"] for row in rows if row["method"] == "own"} == {8.0}  # 32 cells, 4 a step
    assert (folder / "runs/tiny/report.html").exists()
    assert (folder / "runs/tiny/traces.html").exists()


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path):
    """They know nothing of import hooks, which setuptools installs unless it is told otherwise."""
    code = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".pth")]
        assert files.read(name).decode().strip() == str(ROOT)
