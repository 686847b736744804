"""A decode that goes on with another number of processes, 2, 1, then 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_dlm.trajectories.store import TrajectoryShardReader, completed_uids
from tests.e2e.runs import QUIET, problems, run
from tests.processes import in_processes

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

PREDICT = f"""predict --config=exp/generate_tiny --data.batch_size=2
    --data.tasks={problems(13, "train")} --data.methods=[threshold_07] --model.level=tokens
    --model.projector_dir=null""".split()


def decode(rank: int, count: int, folder: Path, *flags: str) -> None:
    torch.set_num_threads(1)
    on = ("--config=trainer/ddp_cpu", f"--trainer.devices={count}")
    run(*PREDICT, *on, f"--run_dir={folder}", *QUIET, *flags)


def test_decoding_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    """13 prompts of unequal length and 7 to 20 steps; a stop after each process's first batch."""
    run(*PREDICT, f"--run_dir={tmp_path}", "--trainer.accelerator=cpu", *QUIET)
    moved, done = tmp_path / "moved", []
    for count in (2, 1, 3):
        flags = [] if count == 3 else ["--trainer.limit_predict_batches=1"]
        in_processes(count, decode, count, moved, *flags, seconds=100)
        done.append(len(completed_uids(moved / "traces")))
    assert 0 < done[0] < done[1] < done[2] == 13
    whole, parts = (
        {
            one.uid: (one.digest(), one.meta["correct"], one.num_steps)
            for one in TrajectoryShardReader(at / "traces")
        }
        for at in (tmp_path, moved)
    )
    assert parts == whole
    assert len({steps for _, _, steps in whole.values()}) > 3
