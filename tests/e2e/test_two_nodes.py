"""Two nodes on the loopback address, as torchrun starts them; one dies, then both start anew."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.e2e.runs import QUIET, problems, run
from tests.processes import fork, free_port, in_two_processes

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

DDP = "--config=trainer/ddp_cpu"
PREDICT = f"""predict --config=exp/generate_tiny --data.batch_size=2
    --data.tasks={problems(8, "train")} --data.methods=[threshold_07] --model.level=tokens
    --model.projector_dir=null""".split()
FIT = f"""fit --config=exp/sft_gt_tiny {DDP} --trainer.max_steps=4
    --data.batch_size=2 --data.rows_per_update=4 --ckpt_path=last
    --data.sources.init_args.tasks.init_args.num_examples=40""".split()
PATIENCE_S = 30.0
"""Seconds for which a node may go on once the other one is gone, on a machine with other work."""


class LoseNode(Callback):
    """Kills the second node, its agent too, before a batch or an optimiser step."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._lose(trainer, batch_idx)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._lose(trainer, trainer.global_step)

    def _lose(self, trainer: Trainer, number: int) -> None:
        if number == self.number and os.environ["NODE"] == "1":
            os.killpg(0, signal.SIGKILL)


def saver(folder: Path) -> str:
    """The option that saves every second step."""
    init = {"dirpath": str(folder / "saved"), "filename": "last", "every_n_train_steps": 2}
    init |= {"enable_version_counter": False}
    saver = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": init}
    return f"--trainer.callbacks={json.dumps([saver])}"


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
    lose = {"class_path": f"{__name__}.LoseNode", "init_args": {"number": number}}
    flag = f"--trainer.callbacks+={json.dumps(lose)}"
    statuses, log, seconds = on_two_nodes(folder, *command, flag)
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
    in_two_processes(_process, *FIT, f"--run_dir={whole}", saver(whole))
    log = lost_and_found(broken, 3, *FIT, f"--run_dir={broken}", saver(broken))
    assert f"Restored all states from the checkpoint at {broken}" in log
    weights = [load_file(at / "adapter" / "adapter_model.safetensors") for at in (whole, broken)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[1][key].equal(value) for key, value in weights[0].items())


def test_decoding_goes_on_once_a_lost_node_is_back(tmp_path: Path) -> None:
    """With the same records, each once."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(*PREDICT, f"--run_dir={whole}", "--trainer.accelerator=cpu", *QUIET)
    # Its first batch: which node takes later ones from the queue depends on their speed.
    lost_and_found(broken, 0, *PREDICT, DDP, f"--run_dir={broken}")
    records = [
        sorted((one.uid, one.digest()) for one in TrajectoryShardReader(at / "traces"))
        for at in (whole, broken)
    ]
    assert records[0] == records[1]
    assert len(records[0]) == 8
