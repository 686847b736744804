"""States of recorded decodes, as training examples of the acceptance policy.

Two sources: ``features`` reads what was captured at the kept steps; ``tokens`` rebuilds states from
the records alone (any step, and finished answers masked again at random) and leaves the features
to the module, which runs the backbone.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from lit_dlm.datamodules.epoch_plan import ExampleRef
from lit_dlm.datamodules.resuming import ResumableDataModule, refuse_overfit_batches
from lit_dlm.heads.features import feature_groups
from lit_dlm.modules.state_batch import StateBatch, collate_states, remasked, states_at
from lit_dlm.modules.tracelock import TraceLockModule
from lit_dlm.ops.options import within
from lit_dlm.pictures import look_in, take_up
from lit_dlm.trajectories.format import FeatureFacts
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import TrajectoryShardReader
from lit_dlm.trajectories.store.files import shards_in

Source = Literal["features", "tokens"]

REMASKED = -1
"""Stands for a step in :class:`StateIndex`: the finished answer, masked again at random."""

_BLOCKS_PER_GROUP = 64
"""Stored blocks whose examples are mixed, at most."""
_GROUP_BYTES = 2**30
"""Stored blocks with features are large (30 MB of a released model): a group takes less."""
_CACHED_RECORD_BLOCKS = 1024
"""Blocks of records without features in memory: about 200 MB at 256 + 256 tokens."""


@dataclass(frozen=True, eq=False)
class StateIndex:
    """Every example of a set of shards, by number only: the records stay on disk."""

    uids: list[str]
    """Uid of each record; one that is left out has no example."""
    tasks: list[str]
    """Task of each record, empty where its meta names none."""
    num_steps: NDArray[np.int32]
    """``(number of records,)`` executed steps."""
    lengths: NDArray[np.int32]
    """``(number of records, 2)`` tokens of prompt and response."""
    blocks: NDArray[np.int32]
    """``(number of records,)`` ascending: stored block of each record, counted over all shards."""
    starts: NDArray[np.int64]
    """``(number of records + 1,)`` first example of each record, and the number of all."""
    steps: NDArray[np.int32]
    """``(number of examples,)`` step of each; a record's in order, then :data:`REMASKED` ones."""

    def records_of(self, examples: NDArray[np.integer]) -> NDArray[np.int64]:
        """``(N,)`` number of each example's record."""
        return np.searchsorted(self.starts, examples, side="right") - 1


class StateDataset(Dataset[StateBatch]):
    """Whole batches by lists of example references.

    Blocks are read when an example needs them, and kept while there is room. The plan of training
    mixes the examples of few stored blocks at a time, so each is read about once per pass.
    """

    def __init__(
        self,
        reader: TrajectoryShardReader,
        index: StateIndex,
        *,
        seed: int,
        cached_blocks: int,
    ) -> None:
        """Sets up the dataset.

        Args:
            reader: random access to the blocks.
            index: all examples.
            seed: seed of random masks.
            cached_blocks: blocks that stay in memory, per loader worker.
        """
        self.reader = reader
        self.index = index
        self.seed = seed
        self.cached_blocks = cached_blocks
        self._block_names = reader.blocks
        self._firsts = np.searchsorted(index.blocks, np.arange(len(self._block_names)))
        self._cache: OrderedDict[int, list[Trajectory]] = OrderedDict()

    def states(self, numbers: NDArray[np.integer]) -> list[tuple[Trajectory, int, int]]:
        """Examples by number.

        Returns:
            The record of each, its step or :data:`REMASKED`, and its place in the record's.
        """
        traces = self.index.records_of(numbers)
        blocks = self.index.blocks[traces]
        rows = traces - self._firsts[blocks]
        places = numbers - self.index.starts[traces]
        columns = (blocks.tolist(), rows.tolist(), self.index.steps[numbers].tolist())
        return [
            (self._block(block)[row], step, place)
            for block, row, step, place in zip(*columns, places.tolist(), strict=True)
        ]

    def __getitem__(self, batch: Sequence[ExampleRef]) -> StateBatch:
        """The collated states of a batch."""
        found = self.states(np.array([ref.number for ref in batch]))
        records, steps, kept = (list(part) for part in zip(*found, strict=True))
        states = states_at(records, [max(step, 0) for step in steps])
        for place, (ref, record, step) in enumerate(zip(batch, records, steps, strict=True)):
            if step == REMASKED:
                rng = np.random.default_rng([self.seed, ref.epoch, ref.number])
                states[place] = remasked(record, rng)
        features = None
        if self.reader.features:
            features = [_features_at(*pair) for pair in zip(records, kept, strict=True)]
        return collate_states(
            records, states, is_real=[ref.is_real for ref in batch], features=features
        )

    def _block(self, block: int) -> list[Trajectory]:
        records = self._cache.get(block)
        if records is None:
            while len(self._cache) >= self.cached_blocks:  # before memory for another is taken
                self._cache.popitem(last=False)
            records = self._cache[block] = self.reader.read_block(*self._block_names[block])
        else:
            self._cache.move_to_end(block)
        return records


def _features_at(trace: Trajectory, kept: int) -> tuple[NDArray[np.floating], NDArray[np.int32]]:
    """Features and proposals of a trace's kept step number ``kept``."""
    features = trace.features
    assert features is not None, f"{trace.uid} is in the index but has no features"
    one = replace(
        features,
        kept_steps=features.kept_steps[kept : kept + 1],
        features=features.features[kept : kept + 1],
        scales=None if features.scales is None else features.scales[kept : kept + 1],
        proposals=features.proposals[kept : kept + 1],
    )
    return one.dequantized()[0], features.proposals[kept]


class TrajectoryDataModule(ResumableDataModule):
    """Training and validation states from trajectory shards.

    The split is by a hash of the prompt's uid, so that several decodes of one prompt are on the
    same side. The order of training examples is a function of the seed, the optimiser step, the
    stored blocks and who reads them: every process, and each of its loader workers, has blocks of
    its own. A run that is killed and resumed sees what an uninterrupted one would have seen.
    """

    def __init__(
        self,
        shards: str | Path,
        *,
        more_shards: str | Path | None = None,
        source: Source = "features",
        batch_size: int = 64,
        max_tokens_per_batch: int | None = None,
        step_ratio: float = 0.3,
        remasks_per_trace: int = 0,
        only_correct: bool = False,
        val_fraction: float = 0.1,
        max_val_examples: int = 2048,
        val_batch_size: int | None = None,
        strict: bool = False,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        """Sets up the data.

        Args:
            shards: folder of trajectory shards.
            more_shards: another folder whose records are mixed in, such as those of a second round
                that the policy itself decoded.
            source: ``features`` takes the stored features of kept steps, ``tokens`` rebuilds states
                from the records.
            batch_size: states per batch and process.
            max_tokens_per_batch: training batches hold as many states of similar length as fit into
                so many tokens, padding included, instead of ``batch_size``.
            step_ratio: share of each record's steps that become examples; with ``tokens`` only.
            remasks_per_trace: randomly masked copies of each finished record, masked anew in every
                pass; with ``tokens`` only.
            only_correct: leave out records whose ``meta["correct"]`` is false.
            val_fraction: share of prompts kept for validation.
            max_val_examples: size of the fixed validation subset, spread evenly over tasks and
                over the course of the decodes.
            val_batch_size: states per validation batch; ``batch_size`` by default.
            strict: compute the content digest of every record that is read anew, at about twice
                the cost of reading. Checksums and the rules of the format are always checked.
            seed: seed of split, order and random masks.
            num_workers: loader processes.
        """
        super().__init__()
        within("(0, 1)", val_fraction=val_fraction)
        within("[0, 1]", step_ratio=step_ratio)
        if remasks_per_trace < 0 or (remasks_per_trace and source == "features"):
            raise ValueError(
                "remasks_per_trace: expected 0 with stored features and 0 or more with source "
                f"'tokens', got {remasks_per_trace}"
            )
        folders = [shards] if more_shards is None else [shards, more_shards]
        self.folders = [Path(folder) for folder in folders]
        self.shards = ", ".join(str(folder) for folder in folders)
        self.source: Source = source
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.step_ratio = step_ratio
        self.remasks_per_trace = remasks_per_trace
        self.only_correct = only_correct
        self.val_fraction = val_fraction
        self.max_val_examples = max_val_examples
        self.val_batch_size = val_batch_size or batch_size
        self.strict = strict
        self.seed = seed
        self.num_workers = num_workers
        self._dataset: StateDataset | None = None

    # -- examples --------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Lists the examples; features are read later."""
        del stage
        refuse_overfit_batches(self.trainer, instead="shards with few records")
        if self._dataset is not None:
            return
        reader = TrajectoryShardReader(
            self._all_shards(), features=self.source == "features", strict=self.strict
        )
        index, is_val = self._build_index(reader)
        is_val = np.repeat(is_val, np.diff(index.starts))
        self.train_indices = np.flatnonzero(~is_val).astype(np.int32)
        val = np.flatnonzero(is_val)
        for name, part in (("training", self.train_indices), ("validation", val)):
            if not len(part):
                raise ValueError(
                    f"{self.shards}: no {name} examples among {len(index.uids)} records; give "
                    f"more prompts or another val_fraction than {self.val_fraction}"
                )
        self.val_indices = _spread_evenly(index, val, self.max_val_examples, self.seed)
        self._blocks_per_group, cached = _BLOCKS_PER_GROUP, _CACHED_RECORD_BLOCKS
        if self.source == "features":
            largest = max(
                entry.size + (entry.feature_size or 0)
                for shard in reader.shards
                for entry in reader.side_file(shard).blocks
            )
            self._blocks_per_group = max(1, min(_BLOCKS_PER_GROUP, _GROUP_BYTES // largest))
            cached = self._blocks_per_group
        self._dataset = StateDataset(reader, index, seed=self.seed, cached_blocks=cached)

    def _all_shards(self) -> Path | list[Path]:
        """What the reader takes: one folder, or the shards of several."""
        if len(self.folders) == 1:
            return self.folders[0]
        for folder in self.folders:
            if not folder.is_dir():
                raise ValueError(f"shards: there is no folder {folder}")
        return [shard for folder in self.folders for shard in shards_in(folder)]

    def _build_index(self, reader: TrajectoryShardReader) -> tuple[StateIndex, NDArray[np.bool_]]:
        """The index, and ``(number of records,)`` the validation side."""
        uids = reader.uids
        n = len(uids)
        tasks: list[str] = []
        num_steps, blocks, counts = (np.zeros(n, dtype=np.int32) for _ in range(3))
        lengths = np.zeros((n, 2), dtype=np.int32)
        is_used, is_val = np.ones(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
        chosen: list[NDArray[np.int32]] = []
        backbone = getattr(getattr(self.trainer, "lightning_module", None), "backbone", None)
        look_in(backbone, *self.folders)
        at = 0
        for block, (shard, number) in enumerate(reader.blocks):
            stored, records = reader.outline(shard, number)
            if self.source == "features" and stored.features is not None:
                self._check_features(uids[at], stored.features)
            for record, kept in zip(records, stored.kept_steps, strict=True):
                steps = self._steps(record, kept)
                blocks[at] = block
                lengths[at] = record.num_prompt, record.num_generated
                num_steps[at] = record.num_steps
                if self.source == "tokens" or getattr(backbone, "vision", None) is not None:
                    take_up(backbone, record.uid, record.meta)
                tasks.append(sys.intern(str(record.meta.get("task", ""))))
                if self.only_correct and not self._is_correct(record.uid, record.meta):
                    is_used[at] = False
                else:
                    counts[at] = len(steps)
                    chosen.append(np.array(steps, dtype=np.int32))
                    is_val[at] = is_validation(
                        record.uid, seed=self.seed, fraction=self.val_fraction
                    )
                at += 1
        starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        if not starts[-1]:
            hint = (
                "; generate them with level: features, or train with source: tokens"
                if self.source == "features"
                else ""
            )
            raise ValueError(
                f"{self.shards}: {is_used.sum()} of {n} records are used and "
                f"none of them holds {self.source} of a step{hint}"
            )
        all_steps = np.concatenate(chosen)
        return StateIndex(uids, tasks, num_steps, lengths, blocks, starts, all_steps), is_val

    def _is_correct(self, uid: str, meta: dict[str, Any]) -> bool:
        if "correct" not in meta:
            raise ValueError(
                f"only_correct: record {uid!r} in {self.shards} was not graded when it was "
                "made (its meta has no 'correct')"
            )
        return bool(meta["correct"])

    def _steps(self, record: Trajectory, kept: NDArray[np.int32]) -> list[int]:
        """Step of every example of a record; a short one may have kept none."""
        if self.source == "features":
            return kept.tolist()
        steps = _chosen_steps(record.uid, record.num_steps, self.step_ratio, seed=self.seed)
        if self.remasks_per_trace and record.num_committed:
            steps += [REMASKED] * self.remasks_per_trace
        return steps

    def _check_features(self, uid: str, features: FeatureFacts) -> None:
        module = self.trainer.lightning_module if self.trainer is not None else None
        if not isinstance(module, TraceLockModule):
            return
        scorer = module.scorer
        for name, expected, found in (
            ("projector digest", scorer.projector.digest(), features.projector),
            ("layout", scorer.settings.layout, features.layout),
            (
                "feature groups",
                feature_groups(scorer.projector.config, scorer.settings.features),
                features.groups,
            ),
        ):
            if expected != found:
                raise ValueError(
                    f"{self.shards}: features of the block of record {uid!r} have another {name} "
                    f"than the model: expected {expected}, got {found}"
                )

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks whose decodes are trained on; known after ``setup``."""
        return sorted(set(self._dataset.index.tasks) - {""}) if self._dataset else []

    @property
    def _update(self) -> dict[str, int]:
        # Each loader worker reads blocks of its own.
        return {**super()._update, "num_workers": self.num_workers}

    # -- loaders ---------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader[StateBatch]:
        """Shuffled states; starts where training stands."""
        assert self._dataset is not None
        index = self._dataset.index
        records = index.records_of(self.train_indices)
        return self.planned_training(
            self._dataset,
            index.blocks[records],
            self.train_indices,
            lengths=None if self.max_tokens_per_batch is None else index.lengths[records],
            blocks_per_group=self._blocks_per_group,
            own_blocks=True,
        )

    def val_dataloader(self) -> DataLoader[StateBatch]:
        """The fixed validation subset."""
        assert self._dataset is not None
        return self.planned_validation(
            self._dataset, self.val_indices, batch_size=self.val_batch_size
        )


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


def _chosen_steps(uid: str, num_steps: int, ratio: float, *, seed: int) -> list[int]:
    """Steps of a record that become examples, ascending: a share of them, by its uid."""
    rng = np.random.default_rng(_hash(f"steps:{seed}:{uid}"))
    steps = rng.choice(num_steps, size=round(ratio * num_steps), replace=False)
    return np.sort(steps).tolist()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _spread_evenly(
    index: StateIndex,
    chosen: NDArray[np.int64],
    limit: int,
    seed: int,
) -> NDArray[np.int64]:
    """At most ``limit`` of the chosen examples, in turn from every task and quarter of time."""
    traces, steps = index.records_of(chosen), index.steps[chosen]
    kept = chosen - index.starts[traces]
    num_steps = np.maximum(index.num_steps[traces], 1)
    quarters = np.where(steps == REMASKED, -1, 4 * steps // num_steps)
    names = {name: place for place, name in enumerate(sorted(set(index.tasks)))}
    tasks = np.array([names[name] for name in index.tasks], dtype=np.int64)[traces]
    order = np.fromiter(
        (
            _hash(f"val:{seed}:{index.uids[trace]}:{step}:{place}")
            for trace, step, place in zip(
                traces.tolist(), steps.tolist(), kept.tolist(), strict=True
            )
        ),
        dtype=np.uint64,
    )
    _, queue = np.unique(8 * tasks + quarters, return_inverse=True)
    sort = np.lexsort((chosen, order, queue))
    queue = queue[sort]
    turn = np.arange(len(sort)) - np.searchsorted(queue, queue)
    # Ascending, so that validation reads block after block.
    return np.sort(chosen[sort][np.lexsort((chosen[sort], queue, turn))[:limit]])
