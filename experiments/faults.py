"""Faults through the command line: what a run loses or does twice when it is ended at any moment.

Every run is a process of its own, which a fault ends at a seeded moment; the same command then goes
on until it exits with 0. What it leaves is compared with an uninterrupted run, sample by sample and
weight by weight::

    python experiments/faults.py --times 20 --out runs/faults

The jobs are small: records of 24 problems (generate), TraceLock on them (fit), a benchmark of 24.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

import cli
import lit_dlm.trainer_command  # noqa: F401 - once, before the runs are forked
from lit_dlm.reports.results import ResultFolder
from lit_dlm.trajectories.store import TrajectoryShardReader

ROOT = Path(__file__).resolve().parents[1]
EXP = ROOT / "configs" / "exp"
ONE = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false"]
TASK = "[{class_path: WordProblems, init_args: {split: %s, num_examples: 24}}]"
JOBS = {
    "generate": [
        "predict", f"--config={EXP / 'generate_tiny.yaml'}", *ONE,
        f"--data.init_args.tasks={TASK % 'train'}", "--data.init_args.batch_size=4",
        "--data.init_args.assignment=each", "--model.init_args.projector_prompts=8",
        "--model.init_args.decoders={entropy: {policy: EntropyPolicy}}",
        "--model.init_args.hidden_rank=8", "--model.init_args.delta_rank=4",
        "--trainer.callbacks.init_args.grade=true", "--trainer.callbacks.init_args.block_size=1",
    ],
    "fit": [
        "fit", f"--config={EXP / 'tracelock_tiny.yaml'}", *ONE, "--trainer.max_steps=60",
        "--trainer.val_check_interval=10", "--data.init_args.batch_size=8",
        "--data.init_args.val_fraction=0.3", "--ckpt_path=last",
    ],
    "benchmark": [
        "predict", f"--config={EXP / 'benchmark_tiny.yaml'}", *ONE,
        f"--data.init_args.tasks={TASK % 'test'}", "--data.init_args.batch_size=4",
        "--data.init_args.methods=[entropy, threshold_09]",
    ],
}  # fmt: skip
FAULTS = ("SIGKILL", "SIGTERM", "SIGINT", "file limit")


def start(job: str, folder: Path, limit: int | None) -> int:
    """Forks a process that runs a job, whose files may not grow beyond ``limit`` bytes."""
    process = os.fork()
    if process:
        return process
    status = 70
    try:
        with (folder / f"{job}.log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        cli.main([*JOBS[job], f"--run_dir={folder}"])
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    finally:
        os._exit(status)


def run(job: str, folder: Path) -> int:
    """Runs a job to its end and returns its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(start(job, folder, None), 0)[1])


def left(job: str, folder: Path) -> Counter[tuple[str, str]]:
    """What a job has left: how often each sample or weight, with a digest of it."""
    if job == "fit":
        weights = load_file(folder / "policy" / "model.safetensors")
        return Counter(
            (name, hashlib.sha256(value.numpy().tobytes()).hexdigest())
            for name, value in weights.items()
        )
    if job == "generate":
        return Counter((one.uid, one.digest()) for one in TrajectoryShardReader(folder / "traces"))
    results = ResultFolder(folder / "results")
    return Counter(
        (f"{row.uid}@{row.method}", f"{row.completion} {row.correct} {row.nfe}")
        for pair in results.pairs()
        for row in results.rows(*pair)
    )


def strike(job: str, folder: Path, fault: str, rng: random.Random, seconds: float) -> bool:
    """Starts a job and ends it by a fault; whether the fault came before the job's own end."""
    limit = round(10 ** rng.uniform(2, 5.5)) if fault == "file limit" else None
    process = start(job, folder, limit)
    if limit is None:
        deadline = time.monotonic() + rng.uniform(0, seconds)
        while time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(process, signal.Signals[fault])
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0


def prepared(job: str, base: Path, folder: Path) -> None:
    """Makes a run folder with what the job needs of earlier ones."""
    folder.mkdir(parents=True)
    for name in {"generate": (), "fit": ("traces", "projector"), "benchmark": ("policy",)}[job]:
        shutil.copytree(base / name, folder / name)


def measured(out: Path, times: int, seed: int, show: Callable[[str], object]) -> list[str]:
    """Rows of the table: fault, job, times, survived, lost, doubled."""
    base = out / "base"
    base.mkdir(parents=True)
    seconds = {}
    for job in JOBS:
        began = time.monotonic()
        if run(job, base) != 0:
            raise SystemExit(f"{job}: the uninterrupted run failed; see {base / f'{job}.log'}")
        seconds[job] = time.monotonic() - began
    rows = []
    for fault in FAULTS:
        for job in JOBS:
            rng = random.Random(f"{seed} {fault} {job}")
            wanted, count = left(job, base), Counter[str]()
            while count["times"] < times and count["missed"] < 3 * times:
                folder = out / f"{job}-{count['times'] + count['missed']}"
                prepared(job, base, folder)
                is_hit = strike(job, folder, fault, rng, seconds[job])
                count["times" if is_hit else "missed"] += 1
                if is_hit and run(job, folder) == 0:
                    found = left(job, folder)
                    lost, more = wanted - found, found - wanted
                    count["lost"] += len(lost)
                    count["doubled or other"] += len(more)
                    count["survived"] += not lost and not more
                shutil.rmtree(folder)
            cells = [
                fault,
                job,
                *(count[n] for n in ("times", "survived", "lost", "doubled or other")),
            ]
            rows.append(f"| {' | '.join(map(str, cells))} |")
            show(rows[-1] + "\n")
    return rows


def main() -> None:
    """Runs all faults and writes the table and its numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="faults of each kind in each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    options = parser.parse_args()
    os.chdir(ROOT)
    shutil.rmtree(options.out, ignore_errors=True)
    rows = measured(options.out, options.times, options.seed, sys.stdout.write)
    text = json.dumps({"seed": options.seed, "rows": rows}, indent=2)
    (options.out / "faults.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
