"""Runs that go on: on two nodes of which one dies, and on another number of processes."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lit_dlm.trajectories.store import completed_uids
from tests.e2e.runs import QUIET, RECORD, added, assert_same_weights, problems, run, traces
from tests.processes import fork, free_port, in_processes, in_two_processes

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

DDP = "--config=trainer/ddp_cpu"
FIT = f"""fit --config=exp/sft_gt_tiny {DDP} --trainer.max_steps=4
    --data.batch_size=2 --data.rows_per_update=4 --ckpt_path=last
    --data.sources.init_args.tasks.init_args.num_examples=40""".split()
PATIENCE_S = 30.0
"""Seconds for which a node may go on once the other one is gone, on a machine with other work."""


def predict(count: int) -> list[str]:
    """Of so many problems of unequal length, in batches of 2."""
    return [*RECORD, f"--data.tasks={problems(count, 'train')}", "--data.batch_size=2"]


def saver(folder: Path) -> list[str]:
    """The options that save every second step, and do nothing else."""
    init = {"dirpath": str(folder / "saved"), "filename": "last", "every_n_train_steps": 2}
    path = "lightning.pytorch.callbacks.ModelCheckpoint"
    return ["--trainer.callbacks=[]", added(path, **init, enable_version_counter=False)]


def on_two_nodes(folder: Path, *command: str) -> tuple[list[int | None], str, float]:
    """Runs a command on two nodes of one process each.

    Returns:
        The nodes' exit statuses, what the first one wrote, and how many seconds it went on without
        the second one.
    """
    port, logs = free_port(), [folder.with_name(f"{folder.name}{n}") for n in range(2)]
    nodes = [fork(log, _node, n, port, folder.name, command) for n, log in enumerate(logs)]
    nodes[1].join(200)
    began = time.monotonic()
    nodes[0].join(100)
    seconds = time.monotonic() - began
    for node in nodes:
        node.kill()
        node.join()
    return [node.exitcode for node in nodes], (logs[0] / "err").read_text(), seconds


def _node(number: int, port: int, name: str, command: tuple[str, ...]) -> None:
    """What torchrun does, with forked processes."""
    os.environ["NODE"] = str(number)  # which rank it gets is another thing
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"is_host": number == 0},
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, _worker)(*command)


def _worker(*command: str) -> None:
    rank_zero_only.rank = int(os.environ["RANK"])  # it read the environment when it was imported
    _process(0, *command, "--trainer.num_nodes=2", "--trainer.devices=1")


def _process(rank: int, *command: str) -> None:
    torch.set_num_threads(1)
    run(*command, *QUIET)


def lost_and_found(folder: Path, number: int, *command: str) -> str:
    """A run whose second node is lost and then back; what the first one says the second time."""
    lose = added("tests.e2e.killing.LoseNode", batch=number)
    statuses, log, seconds = on_two_nodes(folder, *command, lose)
    assert statuses == [1, -signal.SIGKILL]
    assert seconds < PATIENCE_S
    told = [line for line in log.splitlines() if line.startswith("lit-dlm: error: ")]
    assert len(told) == 1
    assert "another process of this run has ended, so this one ends, too" in told[0]
    statuses, log, _ = on_two_nodes(folder, *command)
    assert statuses == [0, 0], log
    return log


def test_training_goes_on_once_a_lost_node_is_back(tmp_path: Path) -> None:
    """From the last checkpoint, to the weights of a run without a break."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    in_two_processes(_process, *FIT, f"--run_dir={whole}", *saver(whole))
    log = lost_and_found(broken, 3, *FIT, f"--run_dir={broken}", *saver(broken))
    assert f"Restored all states from the checkpoint at {broken}" in log
    weights = "adapter/adapter_model.safetensors"
    assert_same_weights(whole / weights, broken / weights)


def test_decoding_goes_on_once_a_lost_node_is_back(tmp_path: Path) -> None:
    """With the same records, each once."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(*predict(8), f"--run_dir={whole}", "--trainer.accelerator=cpu", *QUIET)
    # Its first batch: which node takes later ones from the queue depends on their speed.
    lost_and_found(broken, 0, *predict(8), DDP, f"--run_dir={broken}")
    assert traces(whole / "traces") == traces(broken / "traces")
    assert len(traces(whole / "traces")) == 8


def test_decoding_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    """13 prompts of 7 to 20 steps on 2, 1, then 3; a stop after each process's first batch."""
    run(*predict(13), f"--run_dir={tmp_path}", "--trainer.accelerator=cpu", *QUIET)
    command, done = [*predict(13), DDP, f"--run_dir={tmp_path / 'moved'}"], []
    for count in (2, 1, 3):
        flags = [f"--trainer.devices={count}"]
        flags += [] if count == 3 else ["--trainer.limit_predict_batches=1"]
        in_processes(count, _process, *command, *flags, seconds=100)
        done.append(len(completed_uids(tmp_path / "moved/traces")))
    # How much a stop leaves depends on the processes' speed; under load it may be nothing.
    assert 0 < done[0] <= done[1] <= done[2] == 13
    whole = traces(tmp_path / "traces")
    assert traces(tmp_path / "moved/traces") == whole
    assert len({steps for _, _, steps in whole.values()}) > 3
