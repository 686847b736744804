from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tarfile
import traceback
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from torch.utils.data import DataLoader, IterableDataset

from lit_dlm.trajectories.codec import decode_block
from lit_dlm.trajectories.errors import ShardError
from lit_dlm.trajectories.shards import (
    TrajectoryShardReader,
    TrajectoryShardWriter,
    completed_uids,
    merge_manifest,
)
from tests.trajectories.samples import assert_same, random_record
from tests.trajectories.test_provenance import run_record


def records_of(count: int, *, start: int = 0, **options):
    return [
        random_record(np.random.default_rng(i), f"task/split/{i:04d}", **options)
        for i in range(start, start + count)
    ]


def writer(folder: Path, **options) -> TrajectoryShardWriter:
    defaults = {"name": "demo", "split": "train", "rank": 0, "run": run_record(), "block_size": 4}
    return TrajectoryShardWriter(folder, **{**defaults, **options})


def write(folder: Path, records, **options) -> None:
    with writer(folder, **options) as shards:
        for record in records:
            shards.put(record)


def test_what_is_written_is_read(tmp_path):
    records = records_of(11, features=True, signals=True, remask=0.1)
    write(tmp_path, records, max_shard_records=8)
    names = sorted(path.name for path in tmp_path.glob("*.tar"))
    assert names == [f"demo-train-r00000-w000-{i:06d}.tar" for i in range(2)]
    reader = TrajectoryShardReader(tmp_path)
    assert reader.num_records == 11
    for before, after in zip(records, reader, strict=True):
        assert_same(before, after)
    plain = list(TrajectoryShardReader(tmp_path, features=False))
    assert all(record.features is None for record in plain)
    assert completed_uids(tmp_path) == {record.uid for record in records}
    assert not list(tmp_path.glob("*.tmp*"))


def test_member_names_have_no_dots_and_equal_content_gives_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, records_of(6, features=True))
    shard = "demo-train-r00000-w000-000000.tar"
    assert (tmp_path / "a" / shard).read_bytes() == (tmp_path / "b" / shard).read_bytes()
    with tarfile.open(tmp_path / "a" / shard) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == [
        "__run__/run.json",
        "r0w0s0b00000.trajb",
        "r0w0s0b00000.featb",
        "r0w0s0b00001.trajb",
        "r0w0s0b00001.featb",
    ]
    assert all(re.fullmatch(r"[a-z0-9_-]+", m.name.split(".")[0]) for m in members[1:])
    assert {(m.mtime, m.uid, m.mode) for m in members} == {(0, 0, 0o644)}


def test_plain_webdataset_sees_one_sample_per_block(tmp_path):
    write(tmp_path, records_of(6, features=True))
    shard = str(next(tmp_path.glob("*.tar")))
    samples = list(wds.WebDataset(shard, shardshuffle=False, empty_check=False))
    assert [sorted(k for k in s if not k.startswith("__")) for s in samples] == [
        ["featb", "trajb"]
    ] * 2
    assert [len(decode_block(sample["trajb"])) for sample in samples] == [4, 2]


@pytest.mark.parametrize("name", ["a.b", "A", "a/b", ""])
def test_names_with_dots_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="no dots"):
        writer(tmp_path, name=name)


def test_uids_may_hold_anything(tmp_path):
    records = [random_record(np.random.default_rng(0), uid) for uid in ("a/b.c", "../x", "ü 1")]
    write(tmp_path, records)
    assert [record.uid for record in TrajectoryShardReader(tmp_path)] == ["a/b.c", "../x", "ü 1"]


def test_a_repeated_uid_is_refused_by_name(tmp_path):
    (record,) = records_of(1)
    with writer(tmp_path) as shards:
        shards.put(record)
        with pytest.raises(ValueError, match=r"'task/split/0000': this uid is already in"):
            shards.put(record)
    with (
        writer(tmp_path, rank=1) as shards,
        pytest.raises(ValueError, match="'task/split/0000'"),
    ):
        shards.put(record)


def test_a_broken_record_is_refused_and_the_rest_is_kept(tmp_path):
    good, bad = records_of(2)
    bad.commit_step[0] = 99
    with writer(tmp_path) as shards:
        with pytest.raises(ValueError, match=r"'task/split/0001': commit_step"):
            shards.put(bad)
        shards.put(good)
    assert [record.uid for record in TrajectoryShardReader(tmp_path)] == [good.uid]


def test_records_of_different_kinds_go_to_different_blocks(tmp_path):
    records = [*records_of(2), *records_of(2, start=2, signals=True)]
    write(tmp_path, records)
    reader = TrajectoryShardReader(tmp_path)
    assert [len(reader.read_block(reader.shards[0], i)) for i in range(2)] == [2, 2]


def test_an_empty_writer_leaves_no_shard(tmp_path):
    write(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(ShardError, match="there are no trajectory shards"):
        TrajectoryShardReader(tmp_path)
    with pytest.raises(ShardError, match="no such folder"):
        TrajectoryShardReader(tmp_path / "missing")


def test_blocks_flush_by_age(tmp_path):
    with writer(tmp_path, flush_seconds=0.0) as shards:
        for record in records_of(3):
            shards.put(record)
    side = TrajectoryShardReader(tmp_path).side_file(next(tmp_path.glob("*.tar")))
    assert [entry.num_records for entry in side.blocks] == [1, 1, 1]


def test_random_access_by_offset(tmp_path):
    records = records_of(10, features=True)
    write(tmp_path, records)
    reader = TrajectoryShardReader(tmp_path)
    block = reader.read_block(reader.shards[0], 2)
    for before, after in zip(records[8:], block, strict=True):
        assert_same(before, after)
    with pytest.raises(IndexError):
        reader.read_block(reader.shards[0], 3)


@pytest.mark.parametrize("split_by", ["shard", "block"])
def test_two_ranks_write_and_three_read_their_exact_union(tmp_path, split_by):
    write(tmp_path, records_of(13), rank=0, max_shard_records=4)
    write(tmp_path, records_of(5, start=13), rank=1, max_shard_records=4)
    parts = [
        [
            record.uid
            for record in TrajectoryShardReader(
                tmp_path, rank=rank, world_size=3, split_by=split_by
            )
        ]
        for rank in range(3)
    ]
    union = [uid for part in parts for uid in part]
    assert sorted(union) == [f"task/split/{i:04d}" for i in range(18)]
    assert all(parts)
    manifest = merge_manifest(tmp_path)
    assert (manifest["num_records"], len(manifest["shards"])) == (18, 6)
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest


class _Uids(IterableDataset):
    def __init__(self, folder: Path) -> None:
        self.reader = TrajectoryShardReader(folder)

    def __iter__(self):
        return (record.uid for record in self.reader)


def test_loader_workers_split_the_shards(tmp_path):
    write(tmp_path, records_of(12), max_shard_records=4)
    loader = DataLoader(_Uids(tmp_path), batch_size=None, num_workers=2)
    assert sorted(loader) == [f"task/split/{i:04d}" for i in range(12)]


def _damaged_header(path: Path, block: int) -> None:
    side = json.loads(path.with_name(path.name + ".json").read_text())
    with path.open("r+b") as file:
        file.seek(side["blocks"][block]["offset"] - 512 + 5)
        file.write(b"\xff")


def test_webdataset_alone_ends_silently_at_a_damaged_header(tmp_path):
    """Why counts are compared: the stream simply ends."""
    write(tmp_path, records_of(12))
    shard = next(tmp_path.glob("*.tar"))
    _damaged_header(shard, 1)
    samples = wds.WebDataset(str(shard), shardshuffle=False, empty_check=False)
    assert sum(1 for _ in samples) == 1


def test_a_damaged_header_is_reported_and_skipped_around(tmp_path):
    records = records_of(12)
    write(tmp_path, records)
    _damaged_header(next(tmp_path.glob("*.tar")), 1)
    with pytest.raises(ShardError, match="expected 3 blocks, got 1"):
        list(TrajectoryShardReader(tmp_path))
    reader = TrajectoryShardReader(tmp_path, on_error="skip")
    assert {r.uid for r in reader} == {r.uid for r in records}  # all blocks read by offset
    assert reader.num_damaged_blocks == 0
    assert len(list(TrajectoryShardReader(tmp_path, on_error="stop"))) == 4


def test_a_damaged_payload_is_reported_and_only_its_block_is_lost(tmp_path):
    write(tmp_path, records_of(12))
    shard = next(tmp_path.glob("*.tar"))
    side = TrajectoryShardReader(tmp_path).side_file(shard)
    with shard.open("r+b") as file:
        file.seek(side.blocks[1].offset + 100)
        byte = file.read(1)
        file.seek(side.blocks[1].offset + 100)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(ShardError, match="r0w0s0b00001"):
        list(TrajectoryShardReader(tmp_path))
    reader = TrajectoryShardReader(tmp_path, on_error="skip", max_bad_fraction=0.34)
    assert [int(r.uid[-4:]) for r in reader] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert (reader.num_damaged_blocks, reader.num_lost_records) == (1, 4)
    few = TrajectoryShardReader(tmp_path, on_error="skip", max_bad_fraction=0.33)
    with pytest.raises(ShardError, match="4 of 12 records are lost to damage") as error:
        list(few)
    cause = error.value.__cause__
    assert isinstance(cause, ShardError)
    assert (cause.file, cause.member) == (shard, "r0w0s0b00001")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.97])
def test_a_truncated_shard_is_reported(tmp_path, keep):
    write(tmp_path, records_of(12))
    shard = next(tmp_path.glob("*.tar"))
    os.truncate(shard, int(shard.stat().st_size * keep))
    with pytest.raises(ShardError, match=re.escape(str(shard))):
        list(TrajectoryShardReader(tmp_path))
    list(TrajectoryShardReader(tmp_path, on_error="skip", max_bad_fraction=1.0))
    with pytest.raises(ShardError, match="bytes, got"):
        merge_manifest(tmp_path)


def test_a_lost_features_member_is_reported(tmp_path):
    write(tmp_path, records_of(4, features=True))
    shard = next(tmp_path.glob("*.tar"))
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"b00000.featb", b"b00000.other"))
    with pytest.raises(ShardError, match=r"damaged|missing|expected"):
        list(TrajectoryShardReader(tmp_path))


def test_missing_files_are_named(tmp_path):
    write(tmp_path, records_of(8), max_shard_records=4)
    shards = sorted(tmp_path.glob("*.tar"))
    shards[0].unlink()
    with pytest.raises(ShardError, match=r"000000\.tar: the shard of this side file is missing"):
        TrajectoryShardReader(tmp_path)
    (tmp_path / f"{shards[1].name}.json").unlink()
    with pytest.raises(ShardError, match="side file is missing; recover"):
        TrajectoryShardReader(shards[1:])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder nobody may write")
def test_a_read_only_folder_is_an_os_error_with_the_path():
    """Permissions do not stop a superuser, a kernel file system does."""
    with pytest.raises(OSError, match="/proc/self/trajectories") as error:
        writer(Path("/proc/self/trajectories"))
    assert error.value.filename == "/proc/self/trajectories"


def test_a_full_disk_is_an_os_error_and_nothing_is_lost(tmp_path):
    """A file size limit stands in for the full disk: the third block does not fit, twice. When
    there is room again, the writer goes on, and all twelve records are there."""
    records = records_of(12)

    def action() -> None:
        shards = writer(tmp_path)
        for record in records[:8]:
            shards.put(record)
        (path,) = tmp_path.glob("*.tmp-*")
        size = path.stat().st_size
        unlimited = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, unlimited))
        for attempt in (lambda: [shards.put(r) for r in records[8:]], shards.flush):
            with pytest.raises(OSError, match="File too large") as error:
                attempt()
            assert error.value.filename == str(path)
            assert path.stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
        shards.close()

    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [record.uid for record in TrajectoryShardReader(tmp_path)] == [r.uid for r in records]


@pytest.mark.slow
def test_reading_refuses_to_unpickle():
    code = (
        "import lit_dlm.trajectories.shards as s, webdataset as w; print(w.utils.enforce_security)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_settings_out_of_range_are_refused(tmp_path):
    with pytest.raises(ValueError, match="block_size: expected 1 to 65535, got 0"):
        writer(tmp_path, block_size=0)
    write(tmp_path, records_of(1))
    with pytest.raises(ValueError, match=r"rank: expected 0\.\.1, got 2"):
        TrajectoryShardReader(tmp_path, rank=2, world_size=2)
    with pytest.raises(ValueError, match="on_error"):
        TrajectoryShardReader(tmp_path, on_error="ignore")  # type: ignore[arg-type]
