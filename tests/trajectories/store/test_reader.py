from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from lit_dlm.trajectories.errors import ShardError
from lit_dlm.trajectories.format import decode_block
from lit_dlm.trajectories.store import (
    TrajectoryShardReader,
    merge_manifest,
)
from tests.traces import write_shards as write_set
from tests.trajectories.samples import (
    assert_same,
    random_record,
    records_of,
    write_shards,
)


def test_plain_webdataset_sees_one_sample_per_block(tmp_path):
    write_shards(tmp_path, records_of(6, features=True))
    shard = str(next(tmp_path.glob("*.tar")))
    samples = list(wds.WebDataset(shard, shardshuffle=False, empty_check=False))
    assert [sorted(k for k in s if not k.startswith("__")) for s in samples] == [
        ["featb", "trajb"]
    ] * 2
    assert [len(decode_block(sample["trajb"])) for sample in samples] == [4, 2]


def test_random_access_by_offset(tmp_path):
    records = records_of(10, features=True)
    write_shards(tmp_path, records)
    reader = TrajectoryShardReader(tmp_path)
    block = reader.read_block(reader.shards[0], 2)
    for before, after in zip(records[8:], block, strict=True):
        assert_same(before, after)
    with pytest.raises(IndexError):
        reader.read_block(reader.shards[0], 3)


def _damaged_header(path: Path, block: int) -> None:
    side = json.loads(path.with_name(path.name + ".json").read_text())
    with path.open("r+b") as file:
        file.seek(side["blocks"][block]["offset"] - 512 + 5)
        file.write(b"\xff")


def test_webdataset_alone_ends_silently_at_a_damaged_header(tmp_path):
    """Why counts are compared: the stream simply ends."""
    write_shards(tmp_path, records_of(12))
    shard = next(tmp_path.glob("*.tar"))
    _damaged_header(shard, 1)
    samples = wds.WebDataset(str(shard), shardshuffle=False, empty_check=False)
    assert sum(1 for _ in samples) == 1


def test_a_damaged_header_of_the_archive_costs_nothing(tmp_path):
    records = records_of(12)
    write_shards(tmp_path, records)
    _damaged_header(next(tmp_path.glob("*.tar")), 1)
    assert [r.uid for r in TrajectoryShardReader(tmp_path)] == [r.uid for r in records]


def test_a_damaged_payload_is_reported_and_only_its_block_is_lost(tmp_path, caplog):
    write_shards(tmp_path, records_of(12))
    shard = next(tmp_path.glob("*.tar"))
    side = TrajectoryShardReader(tmp_path).side_file(shard)
    with shard.open("r+b") as file:
        file.seek(side.blocks[1].offset + 100)
        byte = file.read(1)
        file.seek(side.blocks[1].offset + 100)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(ShardError, match="r0w0s0b00001"):
        list(TrajectoryShardReader(tmp_path))
    with pytest.raises(ShardError, match="checksum") as error:
        TrajectoryShardReader(tmp_path).read_block(shard, 1)
    assert (error.value.file, error.value.member) == (shard, "r0w0s0b00001")
    reader = TrajectoryShardReader(tmp_path, on_error="skip")
    assert [int(r.uid[-4:]) for r in reader] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert "r0w0s0b00001" in caplog.text


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.97])
def test_a_truncated_shard_is_reported(tmp_path, keep):
    write_shards(tmp_path, records_of(12))
    shard = next(tmp_path.glob("*.tar"))
    os.truncate(shard, int(shard.stat().st_size * keep))
    with pytest.raises(ShardError, match=re.escape(str(shard))):
        list(TrajectoryShardReader(tmp_path))
    list(TrajectoryShardReader(tmp_path, on_error="skip"))
    with pytest.raises(ShardError, match="bytes, got"):
        merge_manifest(tmp_path)


def test_a_lost_features_member_is_reported(tmp_path):
    write_shards(tmp_path, records_of(4, features=True))
    shard = next(tmp_path.glob("*.tar"))
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"b00000.featb", b"b00000.other"))
    with pytest.raises(ShardError, match=r"damaged|missing|expected"):
        list(TrajectoryShardReader(tmp_path))


def test_missing_files_are_named(tmp_path):
    write_shards(tmp_path, records_of(8), max_shard_records=4)
    shards = sorted(tmp_path.glob("*.tar"))
    shards[0].unlink()
    with pytest.raises(ShardError, match=r"000000\.tar: the shard of this side file is missing"):
        TrajectoryShardReader(tmp_path)
    (tmp_path / f"{shards[1].name}.json").unlink()
    with pytest.raises(ShardError, match="side file is missing; recover"):
        TrajectoryShardReader(shards[1:])


@pytest.mark.slow
def test_reading_refuses_to_unpickle():
    code = "import lit_dlm.trajectories.store, webdataset as w; print(w.utils.enforce_security)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize(
    "change",
    [
        {"size": 2**60},
        {"size": 10**30},
        {"size": "10"},
        {"offset": -1},
        {"offset": 1.5},
        {"feature_offset": 1},
    ],
)
def test_a_side_file_with_wild_sizes_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """Also where its shard is said to be as large; nothing of that size is allocated."""
    write_shards(tmp_path, records_of(4))
    (path,) = tmp_path.glob("*.tar.json")
    content = json.loads(path.read_text())
    content["blocks"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ShardError, match=re.escape(str(path))):
        TrajectoryShardReader(tmp_path)
    if isinstance(change.get("size"), int) and change["size"] < 2**62:
        path.write_text(json.dumps(content | {"bytes": 2**62}))
        reader = TrajectoryShardReader(tmp_path)
        for read in (reader.read_block, reader.outline):
            with pytest.raises(ShardError, match="r0w0s0b00000"):
                read(reader.shards[0], 0)


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
    return write_set(tmp_path, records)


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
