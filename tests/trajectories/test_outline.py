from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lit_dlm.trajectories.errors import ShardError
from lit_dlm.trajectories.shards import TrajectoryShardReader
from tests.traces import write_shards
from tests.trajectories.samples import random_record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    records = [
        random_record(
            rng,
            f"u{i}",
            num_steps=5 + i % 3,
            given=0.3,
            fill=0.0 if i % 4 == 0 else 0.7,
            features=i < 8,
        )
        for i in range(10)
    ]
    return write_shards(tmp_path, records)


def test_an_outline_says_what_the_records_say(folder: Path) -> None:
    """Blocks of four: the third has two records, and these have no features."""
    reader = TrajectoryShardReader(folder)
    assert reader.blocks == [(reader.shards[0], i) for i in range(3)]
    for path, index in reader.blocks:
        records = reader.read_block(path, index)
        outline = reader.outline(path, index, written=True)
        assert outline.uids == [r.uid for r in records]
        assert outline.num_steps.tolist() == [r.num_steps for r in records]
        assert outline.metas == [r.meta for r in records]
        assert outline.has_written is not None
        assert outline.has_written.tolist() == [r.num_committed > 0 for r in records]
        if index == 2:
            assert outline.features is None
            continue
        assert outline.features is not None
        for steps, record in zip(outline.features.steps, records, strict=True):
            assert record.features is not None
            assert steps.tolist() == record.features.kept_steps.tolist()
        assert outline.features.groups == (4, 2, 1)
        assert outline.features.projector_digest == "digest"


def test_an_outline_does_not_read_the_features(folder: Path) -> None:
    """The last kB of the features member is overwritten; only reading the block finds out."""
    reader = TrajectoryShardReader(folder)
    path, index = reader.blocks[0]
    entry = reader.side_file(path).blocks[index]
    before = reader.outline(path, index)
    assert before.has_written is None
    with path.open("r+b") as file:
        file.seek(entry.feature_offset + entry.feature_size - 100)
        file.write(bytes(84))
    assert reader.outline(path, index).uids == before.uids
    with pytest.raises(ShardError, match="checksum of column 'FEAT'"):
        reader.read_block(path, index)
    plain = TrajectoryShardReader(folder, features=False)
    assert plain.outline(path, index).features is None


def test_a_damaged_small_column_is_located(folder: Path) -> None:
    reader = TrajectoryShardReader(folder)
    path, index = reader.blocks[1]
    entry = reader.side_file(path).blocks[index]
    with path.open("r+b") as file:
        file.seek(entry.offset + 60)
        byte = file.read(1)
        file.seek(entry.offset + 60)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ShardError, match=r"block 'r0w0s0b00001' at byte \d+: .*checksum") as error:
        reader.outline(path, index)
    assert (error.value.file, error.value.member) == (path, "r0w0s0b00001")
    assert error.value.offset >= entry.offset


def test_a_side_file_that_names_a_uid_twice_is_refused(folder: Path) -> None:
    (side,) = folder.glob("*.tar.json")
    side.write_text(side.read_text().replace('"u3"', '"u2"'))
    with pytest.raises(ShardError, match=r"\.tar\.json: its uids and block counts do not fit"):
        TrajectoryShardReader(folder)
