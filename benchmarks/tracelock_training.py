"""Reading rate of feature shards against the policy's optimiser step.

    python benchmarks/tracelock_training.py [--json] [--shape tiny|dream] [--device cpu|cuda]

Synthetic traces in the shape of the embedded model (32 cells, head of 64) or of Dream-7B (256
cells, 835 features, head of 6.2 M parameters) are written by the real writer at the default tier.
One process then reads batches of 64 states through the data module as training does, and takes
optimiser steps on one such batch; both are timed in turn and the medians compared. A ratio above 1
means that one loader process keeps the step compute-bound; below 1, ``workers_needed`` of them do.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path

import measurement
import numpy as np
import torch

from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.heads.acceptance import AcceptanceConfig, AcceptanceHead, PositionState
from lit_dlm.losses.acceptance import acceptance_loss, acceptance_weights
from lit_dlm.modules.state_batch import StateBatch
from lit_dlm.trajectories.capture import KeptSteps
from lit_dlm.trajectories.format import only_masked
from lit_dlm.trajectories.record import StepFeatures, Trajectory
from lit_dlm.trajectories.store import RunRecord, TrajectoryShardWriter

SHAPES: dict[str, tuple[int, tuple[int, ...], AcceptanceConfig]] = {
    "tiny": (
        32,
        (48,) * 3 + (16,) * 2 + (1,) * 3,
        AcceptanceConfig(width=64, num_layers=1, num_heads=4, ffn_width=128, dropout=0.0),
    ),
    "dream": (256, (256,) * 3 + (32,) * 2 + (1,) * 3, AcceptanceConfig()),
}
"""Response cells, feature groups and network."""

MASK, BATCH = 2, 64


def write(folder: Path, *, length: int, groups: tuple[int, ...], traces: int, layout: str) -> None:
    """Writes traces of one token per step in random order.

    Gaussian features are kept at 10 % of the steps (tiny: 50 %).
    """
    empty: dict[str, str] = {}
    run = RunRecord(model=empty, tokenizer=empty, decode=empty, randomness=empty, data=empty)
    rng = np.random.default_rng(0)
    ratio = 0.5 if length < 64 else 0.1
    with TrajectoryShardWriter(folder, name="synthetic", split="train", rank=0, run=run) as writer:
        for number in range(traces):
            steps = KeptSteps(number, ratio=ratio).steps(length)
            record = Trajectory(
                uid=f"synthetic/train/{number:05d}@entropy",
                prompt_ids=rng.integers(3, 90, 20).astype(np.int32),
                tokens=rng.integers(3, 90, length).astype(np.int32),
                commit_step=rng.permutation(length).astype(np.int32),
                num_steps=length,
                mask_id=MASK,
                vocab_size=100,
                seed=number,
            )
            features = StepFeatures.quantize(
                rng.standard_normal((len(steps), length, sum(groups)), dtype=np.float32),
                kept_steps=np.array(steps),
                proposals=rng.integers(3, 90, (len(steps), length)),
                groups=groups,
            )
            if layout == "masked":
                features = only_masked(record, features)
            writer.put(replace(record, features=features))


class PolicyStep:
    """One optimiser step on a fixed batch."""

    def __init__(self, batch: StateBatch, config: AcceptanceConfig, device: str) -> None:
        assert batch.features is not None
        self.features = batch.features.to(device)
        self.masked = batch.masked[:, batch.start :].to(device)
        self.state = torch.where(self.masked, int(PositionState.GEN), int(PositionState.LOCKED))
        self.label = torch.rand(self.masked.shape, device=device) > 0.3
        self.head = AcceptanceHead(self.features.shape[-1], config).to(device)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-4)

    def __call__(self) -> None:
        """Forward, loss, backward, clip and update."""
        output = self.head(self.features, self.state, torch.ones_like(self.masked))
        weight = acceptance_weights(
            self.label, self.masked, torch.zeros_like(self.masked), torch.ones_like(self.masked)
        )
        loss = acceptance_loss(output.logits, output.tau, self.label, weight).total
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()


def measure(shape: str, options: argparse.Namespace) -> dict[str, float]:
    """Returns the median times of reading a batch and of a step, taken in turns."""
    length, groups, config = SHAPES[shape]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, length=length, groups=groups, traces=options.traces, layout=options.layout)
        data = TrajectoryDataModule(folder, batch_size=BATCH, val_fraction=0.1)
        data.setup("fit")
        batches = chain.from_iterable(data.train_dataloader() for _ in count())
        step = PolicyStep(next(batches), config, options.device)
        step()
        runs: dict[str, Callable[[], object]] = {"read": partial(next, batches), "step": step}
        seconds = measurement.in_turns(runs, options.repeats)
    read, policy = seconds["read"], seconds["step"]
    return {
        "read_ms_per_batch": round(1e3 * read, 3),
        "read_states_per_second": round(BATCH / read, 1),
        "policy_step_ms": round(1e3 * policy, 3),
        "step_over_read": round(policy / read, 3),
        "workers_needed": math.ceil(read / policy),
    }


def main() -> None:
    """Prints the figures."""
    options = measurement.options(
        __doc__,
        shape=sorted(SHAPES),
        device="cpu",
        layout=("masked", "or generation"),
        repeats=5,
        traces=40,
    )
    torch.manual_seed(0)
    figures = {
        f"{shape}: {name}": value
        for shape in options.shape
        for name, value in measure(shape, options).items()
    }
    measurement.tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
