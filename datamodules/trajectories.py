"""States of recorded decodes, as training examples of the acceptance policy."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lit_dlm.backbones.projection import feature_groups
from lit_dlm.datamodules.resuming import ExampleRef, ResumableDataModule, refuse_overfit_batches
from lit_dlm.system.options import at_least, refuse, within
from lit_dlm.tracelock.module import TraceLockModule
from lit_dlm.tracelock.states import StateBatch, collate_states, states_at
from lit_dlm.trajectories.format import FeatureMetadata
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import TrajectoryShardReader
from lit_dlm.trajectories.store.files import prompt_uid, shard_paths
from lit_dlm.vision.base import add_picture_folders, find_pictures

Source = Literal["features", "tokens"]

_BLOCKS_PER_GROUP = 64  # stored blocks whose examples are mixed, at most
_GROUP_BYTES = 2**30
"""Most bytes of a group's stored blocks; one with features of a released model has 30 MB."""
_CACHED_RECORD_BLOCKS = 1024
"""Blocks of records without features kept in memory: about 200 MB at 256 + 256 tokens."""


@dataclass(frozen=True, eq=False)
class StateIndex:
    """Every example of a set of shards, by number only: the records stay on disk."""

    uids: list[str]  # uid of each record; a record that is left out has no examples
    tasks: list[str]  # task of each record, empty where its meta names none
    num_steps: NDArray[np.int32]  # ``(number of records,)`` executed steps
    blocks: NDArray[np.int32]
    """``(number of records,)`` ascending: stored block of each record, counted over all shards."""
    starts: NDArray[np.int64]
    """``(number of records + 1,)`` first example of each record, then the number of all."""
    steps: NDArray[np.int32]  # ``(number of examples,)`` step of each, ascending within a record

    def records_of(self, examples: NDArray[np.integer]) -> NDArray[np.int64]:
        """``(N,)`` number of each example's record."""
        return np.searchsorted(self.starts, examples, side="right") - 1


class StateReader:
    """Makes batches of states from records on disk.

    Blocks are read when an example needs them, and ``cached_blocks`` of them are kept per loader
    worker. The training plan mixes the examples of few stored blocks at a time, so each is read
    about once per pass.
    """

    def __init__(
        self, reader: TrajectoryShardReader, index: StateIndex, *, cached_blocks: int
    ) -> None:
        self.reader = reader
        self.index = index
        self.cached_blocks = cached_blocks
        self._block_names = reader.blocks
        self._firsts = np.searchsorted(index.blocks, np.arange(len(self._block_names)))
        self._cache: OrderedDict[int, list[Trajectory]] = OrderedDict()

    def states(self, numbers: NDArray[np.integer]) -> list[tuple[Trajectory, int, int]]:
        """Returns record and step of each example, and how many of the record's precede it."""
        records = self.index.records_of(numbers)
        blocks = self.index.blocks[records]
        columns = (
            blocks.tolist(),
            (records - self._firsts[blocks]).tolist(),
            self.index.steps[numbers].tolist(),
            (numbers - self.index.starts[records]).tolist(),
        )
        return [
            (self._block(block)[row], step, kept)
            for block, row, step, kept in zip(*columns, strict=True)
        ]

    def batch(self, refs: Sequence[ExampleRef]) -> StateBatch:
        states = self.states(np.array([ref.number for ref in refs]))
        records, steps, kept = (list(part) for part in zip(*states, strict=True))
        features = None
        if self.reader.features:
            features = [_features_at(*pair) for pair in zip(records, kept, strict=True)]
        return collate_states(
            records,
            states_at(records, steps),
            is_real=[ref.is_real for ref in refs],
            features=features,
        )

    def _block(self, block: int) -> list[Trajectory]:
        # Least recently used first: workers read in the plan's order, so a block that is left is
        # not met again in this pass.
        records = self._cache.get(block)
        if records is None:
            while len(self._cache) >= self.cached_blocks:  # before another takes memory
                self._cache.popitem(last=False)
            records = self._cache[block] = self.reader.read_block(*self._block_names[block])
        else:
            self._cache.move_to_end(block)
        return records


def _features_at(trace: Trajectory, kept: int) -> tuple[NDArray[np.floating], NDArray[np.int32]]:
    """Features and proposals of a trace's kept step number ``kept``."""
    features = trace.features
    assert features is not None, f"{trace.uid} is in the index but has no features"
    return features.dequantized(kept), features.proposals[kept]


@dataclass(eq=False)
class TrajectoryDataModule(ResumableDataModule):
    """Training and validation states from trajectory shards.

    The split is by a hash of the prompt's uid, so that several decodes of one prompt are on the
    same side. The order of training examples depends only on the seed, the optimiser step, the
    stored blocks and their readers: every process, and each of its loader workers, has blocks of
    its own. A run that is killed and resumed sees what an uninterrupted one would have seen.

    Args:
        shards: folder of trajectory shards.
        more_shards: another folder whose records are mixed in, such as those of a second round
            that the policy itself decoded.
        source: ``features`` takes the stored features of kept steps, ``tokens`` rebuilds states
            from the records and leaves the features to the module, which runs the backbone.
        batch_size: states per batch and process.
        step_ratio: share of each record's steps that become examples; with ``tokens`` only.
        only_correct: leave out records whose ``meta["correct"]`` is false or null (ungraded).
        val_fraction: share of prompts kept for validation.
        max_val_examples: size of the fixed validation subset, spread evenly over tasks and over
            the course of the decodes.
        seed: seed of split and order.
        num_workers: loader processes.
    """

    shards: str | Path
    _: KW_ONLY
    more_shards: str | Path | None = None
    source: Source = "features"
    batch_size: int = 64
    step_ratio: float = 0.3
    only_correct: bool = False
    val_fraction: float = 0.1
    max_val_examples: int = 2048
    seed: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        at_least(1, batch_size=self.batch_size)
        within("(0, 1)", val_fraction=self.val_fraction)
        within("[0, 1]", step_ratio=self.step_ratio)
        self._folders = [Path(one) for one in (self.shards, self.more_shards) if one is not None]
        self._name = ", ".join(map(str, self._folders))
        self._states: StateReader | None = None

    # -- examples --------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        refuse_overfit_batches(self.trainer, instead="shards with few records")
        if self._states is not None:
            return
        shards = self._folders[0] if len(self._folders) == 1 else shard_paths(self._folders)
        reader = TrajectoryShardReader(shards, features=self.source == "features")
        index = self._build_index(reader)
        # Decided for records, of which all examples go to one side: states of one decode are nearly
        # copies of each other.
        is_val = np.repeat(
            [is_validation(uid, seed=self.seed, fraction=self.val_fraction) for uid in index.uids],
            np.diff(index.starts),
        )
        self.train_indices = np.flatnonzero(~is_val).astype(np.int32)
        val = np.flatnonzero(is_val)
        for name, part in (("training", self.train_indices), ("validation", val)):
            if not len(part):
                raise ValueError(
                    f"{self._name}: no {name} examples among {len(index.uids)} records; give "
                    f"more prompts or another val_fraction than {self.val_fraction}"
                )
        self.val_indices = _spread_evenly(index, val, self.max_val_examples, self.seed)
        self._blocks_per_group, cached = _BLOCKS_PER_GROUP, _CACHED_RECORD_BLOCKS
        if self.source == "features":
            # Blocks of features are large and as wide as the model: their bytes bound them.
            largest = max(
                entry.size + (entry.feature_size or 0)
                for shard in reader.shards
                for entry in reader.side_file(shard).blocks
            )
            self._blocks_per_group = max(1, min(_BLOCKS_PER_GROUP, _GROUP_BYTES // largest))
            cached = self._blocks_per_group
        self._states = StateReader(reader, index, cached_blocks=cached)

    @property
    def states(self) -> StateReader:
        """What reads the examples; available after ``setup``."""
        assert self._states is not None
        return self._states

    def _build_index(self, reader: TrajectoryShardReader) -> StateIndex:
        backbone = getattr(getattr(self.trainer, "lightning_module", None), "backbone", None)
        add_picture_folders(backbone, *self._folders)
        sees_pictures = self.source == "tokens" or getattr(backbone, "vision", None) is not None
        # Outlines are read block by block and only numbers are kept: millions of records do not fit
        # into memory as objects.
        uids = reader.uids
        tasks: list[str] = []
        num_steps, blocks, counts, chosen = array("i"), array("i"), array("i"), array("i")
        num_left_out = 0
        for block, (shard, number) in enumerate(reader.blocks):
            stored, records = reader.outline(shard, number)
            if self.source == "features" and stored.features is not None:
                self._check_features(uids[len(tasks)], stored.features)
            for record, kept in zip(records, stored.kept_steps, strict=True):
                if sees_pictures:
                    find_pictures(backbone, record.uid, record.meta)
                # One string for each task, not for each record.
                tasks.append(sys.intern(str(record.meta.get("task", ""))))
                num_steps.append(record.num_steps)
                blocks.append(block)
                steps = kept if self.source == "features" else self._chosen_steps(record)
                if self.only_correct and not is_correct(record, self._name):
                    num_left_out += 1
                    steps = steps[:0]
                # A record that is left out keeps its row: the numbers are those of the files.
                counts.append(len(steps))
                chosen.extend(steps.tolist())
        starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        if not starts[-1]:
            hint = ""
            if self.source == "features":
                hint = "; generate them with level: features, or train with source: tokens"
            raise ValueError(
                f"{self._name}: {len(uids) - num_left_out} of {len(uids)} records are used and "
                f"none of them holds {self.source} of a step{hint}"
            )
        return StateIndex(
            uids,
            tasks,
            np.array(num_steps, dtype=np.int32),
            np.array(blocks, dtype=np.int32),
            starts,
            np.array(chosen, dtype=np.int32),
        )

    def _chosen_steps(self, record: Trajectory) -> NDArray[np.integer]:
        """Returns the steps of a record that become examples, ascending, drawn by its uid."""
        # A generator of the record's own: more or other shards do not change the steps of this one.
        rng = np.random.default_rng(_hash(f"steps:{self.seed}:{record.uid}"))
        count = round(self.step_ratio * record.num_steps)
        return np.sort(rng.choice(record.num_steps, size=count, replace=False))

    def _check_features(self, uid: str, features: FeatureMetadata) -> None:
        module = self.trainer.lightning_module if self.trainer is not None else None
        # Modules from outside may use the features in their own way.
        if not isinstance(module, TraceLockModule):
            return
        if features.layout == "logits":
            hint = "; generate with level: features, or train with source: tokens"
            refuse(f"{self._name}: record {uid!r}", "features", "logits", hint)
        scorer = module.scorer
        if not scorer.settings.features.log_odds:
            wanted = "tokens, with a policy that sees probabilities and not the stored log-odds"
            refuse("data.source", wanted, "features")
        groups = feature_groups(scorer.projector.config, scorer.settings.features)
        for name, expected, stored in (
            ("projector digest", scorer.projector.digest(), features.projector),
            ("layout", scorer.settings.layout, features.layout),
            ("feature groups", groups, features.groups),
        ):
            if expected != stored:
                block = f"{self._name}: features of the block of record {uid!r}"
                refuse(f"{block} have another {name} than the model", expected, stored)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks whose decodes are trained on; available after ``setup``."""
        return sorted(set(self._states.index.tasks) - {""}) if self._states else []

    @property
    def _update(self) -> dict[str, int]:
        # Each loader worker reads blocks of its own.
        return {**super()._update, "num_workers": self.num_workers}

    # -- loaders ---------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader[StateBatch]:
        index = self.states.index
        return self.planned_training(
            self.states.batch,
            index.blocks[index.records_of(self.train_indices)],
            self.train_indices,
            blocks_per_group=self._blocks_per_group,
            readers=max(1, self.num_workers),
        )

    def val_dataloader(self) -> DataLoader[StateBatch]:
        return self.planned_validation(
            self.states.batch, self.val_indices, batch_size=self.batch_size
        )


def is_correct(record: Trajectory, origin: str) -> bool | None:
    """Returns a record's grade, which ``only_correct`` needs; ``None`` if no grader could judge."""
    if "correct" not in record.meta:
        raise ValueError(
            f"only_correct: record {record.uid!r} in {origin} was not graded when it was made (its "
            "meta has no 'correct')"
        )
    correct = record.meta["correct"]
    return None if correct is None else bool(correct)


def is_validation(uid: str, *, seed: int, fraction: float) -> bool:
    """Returns whether a record belongs to the validation side, a ``fraction`` of all prompts.

    It does if the first eight bytes (big endian) of ``sha256("{seed}:{prompt uid}")``, as a
    fraction of their range, are below ``fraction``: the split of the TraceLock release.
    """
    return _hash(f"{seed}:{prompt_uid(uid)}") / 2**64 < fraction


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _spread_evenly(
    index: StateIndex, chosen: NDArray[np.int64], limit: int, seed: int
) -> NDArray[np.int64]:
    """Returns at most ``limit`` chosen examples, in turn from every task and quarter of time."""
    records, steps = index.records_of(chosen), index.steps[chosen]
    kept = chosen - index.starts[records]
    quarters = 4 * steps // np.maximum(index.num_steps[records], 1)
    _, tasks = np.unique(index.tasks, return_inverse=True)
    columns = (records.tolist(), steps.tolist(), kept.tolist())
    # By hashes of stable names: the subset stays nearly the same when shards are added.
    order = np.fromiter(
        (
            _hash(f"val:{seed}:{index.uids[record]}:{step}:{number}")
            for record, step, number in zip(*columns, strict=True)
        ),
        dtype=np.uint64,
    )
    _, queue = np.unique(8 * tasks[records] + quarters, return_inverse=True)
    sort = np.lexsort((chosen, order, queue))
    queue = queue[sort]
    turn = np.arange(len(sort)) - np.searchsorted(queue, queue)
    # Ascending, so that validation reads block after block.
    return np.sort(chosen[sort][np.lexsort((chosen[sort], queue, turn))[:limit]])
