"""Seconds, memory and bytes of a large set of synthetic trajectories, phase by phase.

    python benchmarks/trajectory_scale.py --records 1000000 --folder /tmp/scale

Every phase has its own process, and so its own peak memory: writing by two ranks one after the
other, merging the manifest, resuming (recovery and the list of completed uids), reading all
records, verifying up to level 2, and starting the data module of TraceLock's training on tokens, up
to its first batch (without the imports). A record has 24 prompt tokens, 48 response tokens from a
Zipf distribution and 16 to 48 steps; the set is removed at the end unless ``--keep`` is given.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.files import completed_uids, shards_in
from lit_dlm.trajectories.store.provenance import RunRecord
from lit_dlm.trajectories.store.reader import TrajectoryShardReader
from lit_dlm.trajectories.store.recovery import merge_manifest, recover
from lit_dlm.trajectories.store.writer import TrajectoryShardWriter

P, G, MASK, VOCAB = 24, 48, 2, 32_000


def synthetic(first: int, end: int) -> Iterator[Trajectory]:
    """Yields records ``first`` to ``end - 1``."""
    for start in range(first, end, 1000):
        size = min(1000, end - start)
        rng = np.random.default_rng(start)
        ids = np.minimum(3 + rng.zipf(1.3, (size, P + G)), VOCAB - 1).astype(np.int32)
        num_steps = rng.integers(G // 3, G + 1, size)
        commit_step = rng.integers(0, num_steps[:, None], (size, G)).astype(np.int32)
        for row in range(size):
            number = start + row
            yield Trajectory(
                uid=f"synthetic/train/{number:08d}@entropy",
                prompt_ids=ids[row, :P],
                tokens=ids[row, P:],
                commit_step=commit_step[row],
                num_steps=int(num_steps[row]),
                mask_id=MASK,
                vocab_size=VOCAB,
                seed=number,
                meta={"task": "synthetic", "method": "entropy", "correct": number % 3 > 0},
            )


def write(folder: Path, count: int) -> int:
    """Writes one half as each of two ranks."""
    run = RunRecord(model={}, tokenizer={}, decode={}, randomness={}, data={})
    for rank in range(2):
        with TrajectoryShardWriter(
            folder, name="scale", split="train", rank=rank, run=run
        ) as writer:
            for record in synthetic(count * rank // 2, count * (rank + 1) // 2):
                writer.put(record)
    return count


def merge(folder: Path, count: int) -> int:
    """Merges the manifest."""
    return int(merge_manifest(folder)["num_records"])


def resume(folder: Path, count: int) -> int:
    """Prepares a folder as a run does that resumes."""
    recover(folder)
    return len(completed_uids(folder))


def read(folder: Path, count: int) -> int:
    """Reads all records, checking the rules of the format and checksums."""
    return sum(1 for _ in TrajectoryShardReader(folder, strict=False))


def verify(folder: Path, count: int) -> int:
    """Verifies integrity, structure and authenticity."""
    from lit_dlm.trajectories.tools.verify import verify as verified

    problems = verified(shards_in(folder), level=2).problems
    if problems:
        raise ValueError(problems[0])
    return count


def start(folder: Path, count: int) -> int:
    """Starts the data module of training on tokens, up to its first batch."""
    from lit_dlm.datamodules.trajectories import TrajectoryDataModule

    module = TrajectoryDataModule(folder, source="tokens")
    module.setup("fit")
    next(iter(module.train_dataloader()))
    return count


PHASES: tuple[Callable[[Path, int], int], ...] = (write, merge, resume, read, verify, start)


def measured(phase: Callable[[Path, int], int], folder: Path, count: int, queue: Any) -> None:
    """Runs a phase and reports the records, seconds and peak memory of its process."""
    if phase is start:
        import_module("lit_dlm.datamodules.trajectories")
    begin = time.perf_counter()
    found = phase(folder, count)
    seconds = time.perf_counter() - begin
    queue.put((found, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def main() -> None:
    """Runs all phases and prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description="A large set of trajectories, phase by phase.")
    parser.add_argument("--records", type=int, default=1_000_000, help="default: a million")
    parser.add_argument("--folder", type=Path, help="where the set goes, below a new folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--keep", action="store_true", help="leave the set where it is")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="scale-", dir=options.folder))
    context = multiprocessing.get_context("spawn")
    rows = {}
    try:
        for phase in PHASES:
            queue = context.Queue()
            arguments = (phase, folder, options.records, queue)
            process = context.Process(target=measured, args=arguments)
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"{phase.__name__}: failed")
            found, seconds, peak = queue.get()
            if found != options.records:
                sys.exit(f"{phase.__name__}: expected {options.records} records, got {found}")
            rows[phase.__name__] = {"seconds": seconds, "records_per_second": found / seconds,
                                    "peak_bytes": peak}  # fmt: skip
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    finally:
        if not options.keep:
            shutil.rmtree(folder)
    if options.json:
        print(json.dumps({"records": options.records, "bytes": num_bytes, "phases": rows}))
        return
    print(f"{options.records:,} records, {num_bytes / 1e6:,.0f} MB on disk")
    print(f"{'phase':<8}{'seconds':>9}{'records/s':>12}{'peak MiB':>10}")
    for name, row in rows.items():
        print(f"{name:<8}{row['seconds']:>9.1f}{row['records_per_second']:>12,.0f}"
              f"{row['peak_bytes'] / 2**20:>10,.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
