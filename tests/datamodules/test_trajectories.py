import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lit_dlm.datamodules import trajectories
from lit_dlm.datamodules.resuming import EpochPlan
from lit_dlm.datamodules.trajectories import TrajectoryDataModule, is_validation
from lit_dlm.trajectories import Trajectory
from lit_dlm.trajectories.record import TrajectoryFormatError
from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.finetuning.runs import quiet
from tests.projectors import random_orthogonal
from tests.traces import (
    PROJECTOR,
    feature_capture,
    recorded,
    small_backbone,
    small_projector,
    tracelock,
    write_shards,
)


@pytest.fixture(scope="module")
def records() -> list[Trajectory]:
    return recorded(small_backbone(), 24, features=feature_capture(small_projector()))


@pytest.fixture(scope="module")
def shards(records: list[Trajectory], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), records)


def ready(
    shards: Path, *, rank: int = 0, world_size: int = 1, accumulate: int = 1, **options: object
) -> TrajectoryDataModule:
    values: dict[str, object] = {"batch_size": 8, "val_fraction": 0.3}
    module = TrajectoryDataModule(shards, **{**values, **options})  # type: ignore[arg-type]
    module.setup("fit")
    module.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_rank=rank,
        world_size=world_size,
        global_step=0,
        accumulate_grad_batches=accumulate,
        callbacks=[],
    )
    return module


def test_split_is_the_hash_of_the_prompt_uid() -> None:
    digest = hashlib.sha256(b"7:gsm8k/train/00012").digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    for end in ("", "@entropy", "@random", "#3", "#12@random", "@plain/000001.0002.003"):
        uid = f"gsm8k/train/00012{end}"
        assert is_validation(uid, seed=7, fraction=fraction + 1e-6)
        assert not is_validation(uid, seed=7, fraction=fraction - 1e-6)


def test_stored_features_belong_to_their_state(records: list[Trajectory], shards: Path) -> None:
    """Every batch row equals the record's own kept step, found by its canvas."""
    originals = {
        t.prompt_ids.tobytes() + t.state_at(int(step)).tobytes(): (t.features, kept)
        for t in records
        for kept, step in enumerate(t.features.kept_steps)
    }
    batches = list(ready(shards).train_dataloader())
    for batch in batches:
        for row, ids in enumerate(batch.ids):
            canvas = ids[batch.pad_mask[row]].numpy().astype(np.int32)
            features, kept = originals[canvas.tobytes()]
            expected = torch.from_numpy(features.dequantized()[kept])
            torch.testing.assert_close(batch.features[row], expected)
            assert batch.proposals[row].tolist() == features.proposals[kept].tolist()
    assert sum(len(batch.ids) for batch in batches) >= 80


def test_stored_and_recomputed_features_agree(shards: Path) -> None:
    """Capture in the decode loop against the module's own forward on the same states."""
    module = tracelock(small_projector())
    stored = next(iter(ready(shards).train_dataloader()))
    bare = type(stored)(**{**vars(stored), "features": None, "proposals": None})
    with_features, without = module.observe(stored), module.observe(bare)
    # Stored as float16.
    torch.testing.assert_close(with_features.features, without.features, atol=1e-2, rtol=1e-2)
    assert torch.equal(with_features.label, without.label)
    assert torch.equal(with_features.state, without.state)


def test_validation_subset_is_spread_over_time_and_fixed(shards: Path) -> None:
    """Eight of the validation states in four quarters of time: two of each. Two processes take
    equally many of them."""
    module = ready(shards, max_val_examples=8)
    steps = np.array([step for _, step, _ in module.states.states(module.val_indices)])
    assert np.bincount(steps // 2).tolist() == [2, 2, 2, 2]
    assert not set(module.val_indices) & set(module.train_indices)
    ranks = [ready(shards, rank=rank, world_size=2, max_val_examples=8) for rank in range(2)]
    parts = [list(one.val_dataloader().sampler) for one in ranks]
    assert len(parts[0]) == len(parts[1])
    real = [ref.number for part in parts for batch in part for ref in batch if ref.is_real]
    assert sorted(real) == module.val_indices.tolist()


def test_wrong_answers_and_records_that_kept_no_step_give_no_examples(
    records: list[Trajectory], shards: Path, tmp_path: Path
) -> None:
    """Rows 0, 3, 6, ... are wrong: 16 of 24 remain."""
    without = write_shards(tmp_path, [*records[:11], replace(records[11], features=None)])
    for folder, options, expected in (
        (shards, {"only_correct": True}, [row for row in range(24) if row % 3 > 0]),
        (without, {"val_fraction": 0.4}, list(range(11))),
    ):
        index = ready(folder, **options).states.index
        used = [index.uids[record] for record in np.flatnonzero(np.diff(index.starts))]
        assert [int(uid.partition("@")[0][-5:]) for uid in used] == expected


def test_position_in_the_stream_follows_from_the_optimiser_steps(shards: Path) -> None:
    """Accumulation of two: step seven begins with the batch that a fresh run would see then."""
    module = ready(shards, batch_size=4, accumulate=2)
    plan = module.train_dataloader().sampler
    module.trainer.global_step = 7  # type: ignore[union-attr,misc]
    assert len(plan) % 2 == 0
    assert next(iter(plan)) == plan.batch(14)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """Lists the blocks that were read since the last call, in whatever process."""
    file, original = tmp_path / "reads", TrajectoryShardReader.read_block
    file.touch()

    def counted(self: TrajectoryShardReader, shard: Path, index: int) -> list[Trajectory]:
        with file.open("a") as log:
            log.write(f"{shard.name} {index}\n")
        return original(self, shard, index)

    def found() -> list[str]:
        lines = file.read_text().splitlines()
        file.write_text("")
        return lines

    monkeypatch.setattr(TrajectoryShardReader, "read_block", counted)
    return found


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """180 records of two mixed tasks, which three processes wrote in blocks of two."""
    folder = tmp_path_factory.mktemp("dealt")
    capture = feature_capture(small_projector(), step_ratio=0.5)
    records = [
        replace(record, uid=f"t{number % 2}/{record.uid}", meta={"task": f"t{number % 2}"})
        for number, record in enumerate(recorded(small_backbone(), 180, features=capture))
    ]
    for rank in range(3):
        write_shards(folder, records[rank::3], records_per_block=2, rank=rank)
    return folder


@pytest.mark.parametrize(
    ("source", "num_workers"), [("features", 0), ("tokens", 1), ("features", 3)]
)
@pytest.mark.slow  # starts loader workers
def test_a_pass_reads_each_block_about_once(
    dealt: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: Callable[[], list[str]],
    source: str,
    num_workers: int,
) -> None:
    """90 blocks, of which groups of 8 are mixed and as many kept: at most 1.1 reads of each."""
    monkeypatch.setattr(trajectories, "_BLOCKS_PER_GROUP", 8)
    monkeypatch.setattr(trajectories, "_CACHED_RECORD_BLOCKS", 8)
    options: dict[str, object] = {"source": source, "num_workers": num_workers, "batch_size": 4}
    module = ready(dealt, val_fraction=0.1, **options)
    assert reads() == []  # the index needs small columns only
    loader = module.train_dataloader()
    assert isinstance(loader.sampler, EpochPlan)
    for number in range(2):
        loader.sampler.batches_done = lambda number=number: number * len(loader.sampler)
        assert sum(len(batch.ids) for batch in loader) > 100
        found = reads()
        assert len(set(found)) > 80
        assert len(found) <= 1.1 * 90


@pytest.mark.parametrize("world_size", [1, 2])
def test_processes_and_workers_share_a_pass_without_overlap(
    dealt: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """Batches are as many on every rank, of different states; each reader's blocks are its own."""
    monkeypatch.setattr(trajectories, "_BLOCKS_PER_GROUP", 8)
    seen: list[int] = []
    owners: dict[int, set[tuple[int, int]]] = {}
    lengths = set()
    options: dict[str, object] = {"num_workers": 2, "batch_size": 4, "step_ratio": 0.5}
    for rank in range(world_size):
        module = ready(dealt, rank=rank, world_size=world_size, source="tokens", **options)
        index = module.states.index
        batches = list(module.train_dataloader().sampler)
        lengths.add(len(batches))
        for number, batch in enumerate(batches):
            numbers = np.array([ref.number for ref in batch])
            seen += numbers.tolist()
            for block in index.blocks[index.records_of(numbers)].tolist():
                owners.setdefault(block, set()).add((rank, number % 2))
    assert len(lengths) == 1
    assert len(seen) == len(set(seen)) > 0.95 * len(module.train_indices)
    shared = [block for block, readers in owners.items() if len(readers) > 1]
    assert len(shared) < 2 * world_size  # cut between two readers


def test_memory_is_bounded_by_the_group(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six blocks of a few kB each: a limit of about two of them."""
    largest = max(
        one.size + (one.feature_size or 0)
        for one in TrajectoryShardReader(shards).side_file(next(shards.glob("*.tar"))).blocks
    )
    monkeypatch.setattr(trajectories, "_GROUP_BYTES", 2 * largest + 1)
    module = ready(shards)
    open_blocks = [len(module.states._cache) for _ in module.train_dataloader()]
    assert max(open_blocks) == 2


def test_states_of_a_batch_equal_those_of_one_record_at_a_time(shards: Path) -> None:
    """A share of them or all. The batch replays its records together; the reference goes through
    ``state_at``."""
    half = ready(shards, source="tokens", step_ratio=0.5)
    assert set(np.diff(half.states.index.starts).tolist()) == {4}
    module = ready(shards, source="tokens", step_ratio=1.0)
    by_uid = {r.uid: r for r in TrajectoryShardReader(shards)}
    batch_refs = module.train_dataloader().sampler.batch(0)
    batch = module.states.batch(batch_refs)
    assert batch.features is None
    for row, ref in enumerate(batch_refs):
        ((found, step, _),) = module.states.states(np.array([ref.number]))
        record = by_uid[found.uid]
        state = record.state_at(step)
        assert batch.ids[row, batch.start :].tolist() == state.tolist()
        assert batch.ids[row, batch.pad_mask[row]].tolist() == [*record.prompt_ids, *state]


@pytest.mark.parametrize(
    ("folder", "options", "name"),
    [
        ("nothing_here", {}, "nothing_here"),
        ("", {}, "no traj"),
        ("", {"val_fraction": 0.0}, "val_fraction"),
        ("", {"step_ratio": 2.0}, "step_ratio"),
        ("", {"batch_size": 0}, "batch_size: expected at least 1"),
    ],
)
def test_a_folder_without_shards_and_bad_options_are_named(
    tmp_path: Path, folder: str, options: dict[str, object], name: str
) -> None:
    with pytest.raises((TrajectoryFormatError, ValueError), match=name):
        ready(tmp_path / folder, **options)


def test_records_of_another_folder_are_mixed_in(
    records: list[Trajectory], shards: Path, tmp_path: Path
) -> None:
    """Such as those of a second round, of the same prompts, which stay on their side."""
    second = [replace(record, uid=f"{record.uid}_2") for record in records]
    mixed = ready(shards, more_shards=write_shards(tmp_path, second))
    index = mixed.states.index
    assert set(index.uids) == {record.uid for record in [*records, *second]}
    for part in (mixed.train_indices, mixed.val_indices):
        uids = {index.uids[number] for number in index.records_of(part)}
        assert {uid.removesuffix("_2") for uid in uids} == {u for u in uids if u[-2:] != "_2"}


def test_shards_without_what_is_needed_are_refused(shards: Path, tmp_path: Path) -> None:
    """Features, grades, or features of the model's own projector."""
    bare = [replace(record, meta={"task": "fake"}) for record in recorded(small_backbone(), 8)]
    write_shards(tmp_path, bare)
    with pytest.raises(ValueError, match="8 of 8 records are used and none of them holds features"):
        ready(tmp_path)
    with pytest.raises(ValueError, match="was not graded"):
        ready(tmp_path, source="tokens", only_correct=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: there is no such shard or folder with shards"):
        ready(shards, more_shards=tmp_path / "empty")
    module = tracelock(random_orthogonal(PROJECTOR, seed=6))
    data = TrajectoryDataModule(shards, val_fraction=0.3)
    with pytest.raises(ValueError, match="another projector digest"):
        quiet(tmp_path, max_steps=1).fit(module, datamodule=data)
