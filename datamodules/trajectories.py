"""States of recorded decodes, as training examples of the acceptance policy.

Two sources: ``features`` reads what was captured at the kept steps; ``tokens`` rebuilds states from
the records alone (any step, and finished answers masked again at random) and leaves the features
to the module, which runs the backbone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from datamodules.epoch_plan import EpochPlan, ExampleRef, FixedPlan
from lit_dlm.heads.features import feature_groups
from lit_dlm.modules.state_batch import (
    StateBatch,
    StateExample,
    collate_states,
    remasked_state,
    trace_state,
)
from lit_dlm.modules.tracelock import TraceLockModule
from lit_dlm.trajectories.features import StepFeatures
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shards import TrajectoryShardReader

Source = Literal["features", "tokens"]

REMASKED = -1
"""Stands for a step in :class:`StateIndex`: the finished answer, masked again at random."""


@dataclass(frozen=True, eq=False)
class StateIndex:
    """Every example of a set of shards, without its features."""

    traces: list[Trajectory]
    """The records, without features."""
    trace: NDArray[np.int64]
    """``(N,)`` number of each example's record."""
    step: NDArray[np.int64]
    """``(N,)`` step of each example, or :data:`REMASKED`."""
    kept: NDArray[np.int64]
    """``(N,)`` place of the step among the record's kept steps (source ``features``)."""
    blocks: NDArray[np.int64]
    """``(number of records,)`` block of each record, counted over all shards."""

    def __len__(self) -> int:
        return len(self.trace)


class StateDataset(Dataset[StateBatch]):
    """Whole batches by lists of example references."""

    def __init__(
        self, reader: TrajectoryShardReader, index: StateIndex, *, seed: int, cached_blocks: int
    ) -> None:
        """Sets up the dataset.

        Args:
            reader: random access to the blocks.
            index: all examples.
            seed: seed of random masks.
            cached_blocks: blocks whose features stay in memory, per loader worker.
        """
        self.reader = reader
        self.index = index
        self.seed = seed
        self.cached_blocks = cached_blocks
        self._block_names = [
            (shard, number)
            for shard in reader.shards
            for number in range(len(reader.side_file(shard).blocks))
        ]
        self._cache: OrderedDict[int, dict[str, StepFeatures | None]] = OrderedDict()

    def __getitem__(self, batch: Sequence[ExampleRef]) -> StateBatch:
        """The collated states of a batch."""
        return collate_states([self.example(ref) for ref in batch])

    def example(self, ref: ExampleRef) -> StateExample:
        """One state."""
        index = self.index
        number, step = int(index.trace[ref.number]), int(index.step[ref.number])
        trace = index.traces[number]
        if step == REMASKED:
            rng = np.random.default_rng([self.seed, ref.epoch, ref.number])
            example = remasked_state(trace, rng)
        else:
            example = trace_state(trace, step)
        if self.reader.features:
            features = self._features(int(index.blocks[number]), trace.uid)
            kept = int(index.kept[ref.number])
            one = replace(
                features,
                kept_steps=features.kept_steps[kept : kept + 1],
                features=features.features[kept : kept + 1],
                scales=None if features.scales is None else features.scales[kept : kept + 1],
                proposals=features.proposals[kept : kept + 1],
            )
            example = replace(
                example, features=one.dequantized()[0], proposals=features.proposals[kept]
            )
        return example if ref.is_real else replace(example, is_real=False)

    def _features(self, block: int, uid: str) -> StepFeatures:
        if block not in self._cache:
            shard, number = self._block_names[block]
            records = self.reader.read_block(shard, number)
            self._cache[block] = {record.uid: record.features for record in records}
            while len(self._cache) > self.cached_blocks:
                self._cache.popitem(last=False)
        self._cache.move_to_end(block)
        features = self._cache[block][uid]
        assert features is not None, f"{uid} is in the index but has no features"
        return features


class TrajectoryDataModule(LightningDataModule):
    """Training and validation states from trajectory shards.

    The split is by a hash of the prompt's uid, so that several decodes of one prompt are on the
    same side. The order of training examples is a function of the seed and of the optimiser step:
    a run that is killed and resumed sees what an uninterrupted one would have seen.
    """

    def __init__(
        self,
        shards: str | Path,
        *,
        source: Source = "features",
        batch_size: int = 64,
        step_ratio: float = 0.3,
        remasks_per_trace: int = 0,
        only_correct: bool = False,
        val_fraction: float = 0.1,
        max_val_examples: int = 2048,
        val_batch_size: int | None = None,
        blocks_per_group: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        """Sets up the data.

        Args:
            shards: folder of trajectory shards.
            source: ``features`` takes the stored features of kept steps, ``tokens`` rebuilds states
                from the records.
            batch_size: states per batch and process.
            step_ratio: share of each record's steps that become examples; with ``tokens`` only.
            remasks_per_trace: randomly masked copies of each finished record, masked anew in every
                pass; with ``tokens`` only.
            only_correct: leave out records whose ``meta["correct"]`` is false.
            val_fraction: share of prompts kept for validation.
            max_val_examples: size of the fixed validation subset, spread evenly over tasks and
                over the course of the decodes.
            val_batch_size: states per validation batch; ``batch_size`` by default.
            blocks_per_group: shard blocks whose examples are mixed in training.
            seed: seed of split, order and random masks.
            num_workers: loader processes.
        """
        super().__init__()
        if source not in ("features", "tokens"):
            raise ValueError(f"source: expected 'features' or 'tokens', got {source!r}")
        if not 0.0 < val_fraction < 1.0:
            raise ValueError(f"val_fraction: expected a number between 0 and 1, got {val_fraction}")
        if not 0.0 <= step_ratio <= 1.0:
            raise ValueError(f"step_ratio: expected a number in 0..1, got {step_ratio}")
        if remasks_per_trace < 0 or (remasks_per_trace and source == "features"):
            raise ValueError(
                "remasks_per_trace: expected 0 with stored features and 0 or more with source "
                f"'tokens', got {remasks_per_trace}"
            )
        self.shards = Path(shards)
        self.source: Source = source
        self.batch_size = batch_size
        self.step_ratio = step_ratio
        self.remasks_per_trace = remasks_per_trace
        self.only_correct = only_correct
        self.val_fraction = val_fraction
        self.max_val_examples = max_val_examples
        self.val_batch_size = val_batch_size or batch_size
        self.blocks_per_group = blocks_per_group
        self.seed = seed
        self.num_workers = num_workers
        self._dataset: StateDataset | None = None

    # -- examples --------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Reads the shards once and lists the examples.

        Raises:
            ValueError: the shards are missing or empty, hold no features although they should, or
                were made with another projector than the module's; or one side of the split is
                empty.
        """
        del stage
        if self._dataset is not None:
            return
        reader = TrajectoryShardReader(self.shards, features=self.source == "features")
        index = self._build_index(reader)
        is_val = np.array(
            [is_validation(t.uid, seed=self.seed, fraction=self.val_fraction) for t in index.traces]
        )[index.trace]
        self.train_indices = np.flatnonzero(~is_val)
        val = np.flatnonzero(is_val)
        for name, part in (("training", self.train_indices), ("validation", val)):
            if not len(part):
                raise ValueError(
                    f"{self.shards}: no {name} examples among {len(index.traces)} records; give "
                    f"more prompts or another val_fraction than {self.val_fraction}"
                )
        self.val_indices = _spread_evenly(index, val, self.max_val_examples, self.seed)
        self._dataset = StateDataset(
            reader, index, seed=self.seed, cached_blocks=2 * self.blocks_per_group
        )

    def _build_index(self, reader: TrajectoryShardReader) -> StateIndex:
        traces: list[Trajectory] = []
        trace: list[int] = []
        step: list[int] = []
        kept: list[int] = []
        blocks: list[int] = []
        block = 0
        for shard in reader.shards:
            for number in range(len(reader.side_file(shard).blocks)):
                for record in reader.read_block(shard, number):
                    if self.only_correct and not self._is_correct(record):
                        continue
                    steps = self._steps(record)
                    trace += [len(traces)] * len(steps)
                    step += steps
                    kept += range(len(steps))
                    blocks.append(block)
                    traces.append(replace(record, features=None))
                block += 1
        if not trace:
            hint = (
                "; generate them with level: features, or train with source: tokens"
                if self.source == "features"
                else ""
            )
            raise ValueError(
                f"{self.shards}: {len(traces)} of {reader.num_records} records are used and "
                f"none of them holds {self.source} of a step{hint}"
            )
        return StateIndex(traces, np.array(trace), np.array(step), np.array(kept), np.array(blocks))

    def _is_correct(self, record: Trajectory) -> bool:
        if "correct" not in record.meta:
            raise ValueError(
                f"only_correct: record {record.uid!r} in {self.shards} was not graded when it was "
                "made (its meta has no 'correct')"
            )
        return bool(record.meta["correct"])

    def _steps(self, record: Trajectory) -> list[int]:
        """Steps of a record that become examples."""
        if self.source == "features":
            features = record.features
            if features is None:
                # A decode of few steps may have kept none of them.
                return []
            self._check_features(record.uid, features)
            return [int(s) for s in features.kept_steps]
        count = min(record.num_steps, round(self.step_ratio * record.num_steps))
        rng = np.random.default_rng(_hash(f"steps:{self.seed}:{record.uid}"))
        steps = np.sort(rng.choice(record.num_steps, size=count, replace=False)).tolist()
        written = (record.commit_step >= 0) & (record.tokens != record.mask_id)
        return steps + [REMASKED] * (self.remasks_per_trace if written.any() else 0)

    def _check_features(self, uid: str, features: StepFeatures) -> None:
        module = self.trainer.lightning_module if self.trainer is not None else None
        if not isinstance(module, TraceLockModule):
            return
        scorer = module.scorer
        for name, expected, found in (
            ("projector digest", scorer.projector.digest(), features.projector_digest),
            ("layout", scorer.settings.layout, features.layout),
            (
                "feature groups",
                feature_groups(scorer.projector.config, scorer.settings.features),
                features.groups,
            ),
        ):
            if expected != found:
                raise ValueError(
                    f"{self.shards}: features of record {uid!r} have another {name} than the "
                    f"model: expected {expected}, got {found}"
                )

    # -- loaders ---------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader[StateBatch]:
        """Shuffled states; starts where training stands."""
        assert self._dataset is not None
        index = self._dataset.index
        rank, world_size = self._place()
        plan = EpochPlan(
            index.blocks[index.trace[self.train_indices]],
            batch_size=self.batch_size,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            blocks_per_group=self.blocks_per_group,
            batches_done=lambda: self._batches_done(len(plan)),
        )
        return self._loader(_Renumbered(self._dataset, self.train_indices), plan)

    def val_dataloader(self) -> DataLoader[StateBatch]:
        """The fixed validation subset."""
        assert self._dataset is not None
        rank, world_size = self._place()
        plan = FixedPlan(
            self.val_indices, batch_size=self.val_batch_size, rank=rank, world_size=world_size
        )
        return self._loader(self._dataset, plan)

    def _loader(
        self, dataset: Dataset[StateBatch], plan: EpochPlan | FixedPlan
    ) -> DataLoader[StateBatch]:
        return _ResumableLoader(
            dataset,
            sampler=plan,
            batch_size=None,
            collate_fn=_as_is,
            num_workers=self.num_workers,
            persistent_workers=False,
        )

    def _place(self) -> tuple[int, int]:
        """Rank and number of processes."""
        trainer = self.trainer
        return (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)

    def _batches_done(self, batches_per_pass: int) -> int:
        """Training batches that each process has consumed, from the optimiser steps taken.

        An incomplete accumulation at the end of a pass also ends in a step.
        """
        if self.trainer is None:
            return 0
        accumulate = self.trainer.accumulate_grad_batches
        steps_per_pass = -(-batches_per_pass // accumulate)
        passes, steps = divmod(self.trainer.global_step, steps_per_pass)
        return passes * batches_per_pass + min(steps * accumulate, batches_per_pass)


class _ResumableLoader(DataLoader[StateBatch]):
    """A loader that a checkpoint need not describe: the optimiser step says where it stands."""

    def state_dict(self) -> dict[str, int]:
        """Nothing to keep; having the method tells Lightning that resuming is exact."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to restore."""
        del state


class _Renumbered(Dataset[StateBatch]):
    """A part of a dataset under its own example numbers."""

    def __init__(self, dataset: StateDataset, indices: NDArray[np.int64]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __getitem__(self, batch: Sequence[ExampleRef]) -> StateBatch:
        return self.dataset[[ref._replace(number=int(self.indices[ref.number])) for ref in batch]]


def is_validation(uid: str, *, seed: int, fraction: float) -> bool:
    """Whether a record belongs to the validation side.

    The first eight bytes (big endian) of ``sha256("{seed}:{prompt uid}")``, read as a fraction of
    their range, are compared with ``fraction``: the split of the TraceLock release.

    Args:
        uid: uid of the record; a decoding method behind ``@`` is left out.
        seed: seed of the split.
        fraction: share of the validation side.
    """
    prompt_uid = uid.rpartition("@")[0] or uid
    return _hash(f"{seed}:{prompt_uid}") / 2**64 < fraction


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _spread_evenly(
    index: StateIndex, chosen: NDArray[np.int64], limit: int, seed: int
) -> NDArray[np.int64]:
    """At most ``limit`` of the chosen examples, in turn from every task and quarter of time."""
    strata: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for at in chosen.tolist():
        trace, step = index.traces[index.trace[at]], int(index.step[at])
        quarter = -1 if step == REMASKED else 4 * step // max(trace.num_steps, 1)
        key = (str(trace.meta.get("task", "")), quarter)
        order = _hash(f"val:{seed}:{trace.uid}:{step}:{index.kept[at]}")
        strata.setdefault(key, []).append((order, at))
    queues = [sorted(strata[key]) for key in sorted(strata)]
    turns = [
        (turn, queue_number, at)
        for queue_number, queue in enumerate(queues)
        for turn, (_, at) in enumerate(queue)
    ]
    return np.array([at for _, _, at in sorted(turns)[:limit]])


def _as_is(batch: Any) -> Any:
    """The dataset collates; the loader must not."""
    return batch
