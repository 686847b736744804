from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from lit_dlm.trajectories.record import TrajectoryFormatError
from lit_dlm.trajectories.store import (
    BackgroundWriter,
    TrajectoryShardReader,
    completed_uids,
    drop_shards,
    merge_manifest,
    recover,
)
from lit_dlm.trajectories.store.writer import OPEN_FILES
from tests.trajectories.samples import assert_same, in_child, records_of, shard_writer, write_shards


def _resume(folder: Path, records, *, pause: float = 0.0, **options) -> None:
    """What a predict loop does: recover, then write what is missing, in a thread."""
    recover(folder)
    done = completed_uids(folder)
    with BackgroundWriter(shard_writer(folder, **options)) as shards:
        for record in records:
            if record.uid not in done:
                shards.put(record)
                time.sleep(pause)


def _killed(action, after: float) -> bool:
    """Runs ``action`` in a forked process; kills it with SIGKILL after some seconds.

    Returns:
        Whether it ended by itself before.
    """
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert status == 0
            return True
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _crashed_writer(folder: Path, records, **options) -> Path:
    """Leaves an unfinished shard of a dead process, as SIGKILL would."""

    def action() -> None:
        shards = shard_writer(folder, **options)
        for record in records:
            shards.put(record)

    in_child(action)
    (orphan,) = folder.glob("*.tmp-*")
    return orphan


@pytest.mark.slow
@pytest.mark.parametrize(("count", "features"), [(1000, False), (200, True)])
def test_killed_at_twenty_random_points_each_record_is_there_once(tmp_path, count, features):
    """An uninterrupted run pauses ``count`` x 1 ms at least, so every kill is in the middle of the
    first runs; the digests are those of a run that nobody killed."""
    records = records_of(count, features=features)
    rng = np.random.default_rng(0)
    options = {"max_shard_records": 128, "records_per_block": 16}
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    write_shards(whole, records, **options)
    counts, num_killed = [], 0
    for _ in range(20):
        delay = float(rng.uniform(0.02, 0.2))
        num_killed += not _killed(lambda: _resume(folder, records, pause=1e-3, **options), delay)
        counts.append(len(completed_uids(folder)))
    assert num_killed > 3
    assert counts[0] < count
    assert counts == sorted(counts)
    _resume(folder, records, **options)
    assert merge_manifest(folder)["num_records"] == count
    found = list(TrajectoryShardReader(folder))
    assert len(found) == len({record.uid for record in found}) == count
    digests = {record.uid: record.digest() for record in found}
    assert digests == {record.uid: record.digest() for record in TrajectoryShardReader(whole)}
    if features:
        by_uid = {record.uid: record for record in found}
        for record in records:
            assert_same(record, by_uid[record.uid])
    assert not list(folder.glob("*.tmp*"))


def test_whole_blocks_of_an_orphan_are_kept(tmp_path):
    """Ten records in blocks of four: two blocks are on disk, two records were in memory."""
    records = records_of(10)
    orphan = _crashed_writer(tmp_path, records)
    assert completed_uids(tmp_path) == set()
    (report,) = recover(tmp_path)
    assert (report.path, report.num_records, report.num_dropped_blocks) == (orphan, 8, 0)
    assert report.shard is not None
    assert report.shard.name == "demo-train-r00000-000001.tar"
    for before, after in zip(records[:8], TrajectoryShardReader(tmp_path), strict=True):
        assert_same(before, after)
    assert recover(tmp_path) == []


@pytest.mark.parametrize("features", [False, True])
def test_an_orphan_cut_anywhere_keeps_its_whole_blocks(tmp_path, features):
    source = tmp_path / "source"
    orphan = _crashed_writer(source, records_of(12, features=features))
    data = orphan.read_bytes()
    counts = []
    for i, length in enumerate(np.linspace(0, len(data), 40).astype(int)):
        folder = tmp_path / f"cut{i}"
        folder.mkdir()
        (folder / orphan.name).write_bytes(data[:length])
        recover(folder)
        uids = sorted(completed_uids(folder))
        assert uids == [f"task/split/{k:04d}" for k in range(len(uids))]
        if uids:
            read = list(TrajectoryShardReader(folder))
            assert len(read) == len(uids)
            assert all((record.features is not None) == features for record in read)
        counts.append(len(uids))
    assert counts[0] == 0
    assert counts[-1] == 12
    assert set(counts) == {0, 4, 8, 12}


def test_a_damaged_block_of_an_orphan_is_dropped_alone(tmp_path):
    orphan = _crashed_writer(tmp_path, records_of(12))
    data = bytearray(orphan.read_bytes())
    data[data.index(b"b00001.records") + 700] ^= 1
    orphan.write_bytes(data)
    (report,) = recover(tmp_path)
    assert (report.num_records, report.num_dropped_blocks) == (8, 1)


def test_a_crash_during_recovery_does_not_double_records(tmp_path):
    """The orphan is still there after its records were saved: they are not saved again."""
    orphan = _crashed_writer(tmp_path, records_of(12))
    data = orphan.read_bytes()
    recover(tmp_path)
    orphan.write_bytes(data)
    (report,) = recover(tmp_path)
    assert (report.num_records, report.shard) == (0, None)
    assert merge_manifest(tmp_path)["num_records"] == 12


def test_blocks_that_are_partly_saved_are_completed(tmp_path):
    records = records_of(12, features=True)
    orphan = _crashed_writer(tmp_path / "a", records)
    write_shards(tmp_path / "b", records[5:7])
    (tmp_path / "b" / orphan.name.replace("000000", "000005")).write_bytes(orphan.read_bytes())
    (report,) = recover(tmp_path / "b")
    assert report.num_records == 10
    found = {record.uid: record for record in TrajectoryShardReader(tmp_path / "b")}
    for record in records:
        assert_same(record, found[record.uid])


def test_a_shard_without_side_file_gets_one(tmp_path):
    records = records_of(6)
    write_shards(tmp_path, records)
    next(tmp_path.glob("*.tar.json")).unlink()
    with pytest.raises(TrajectoryFormatError, match="without side file"):
        merge_manifest(tmp_path)
    (report,) = recover(tmp_path)
    assert report.num_records == 6
    assert [r.uid for r in TrajectoryShardReader(tmp_path)] == [r.uid for r in records]


def test_a_damaged_shard_without_side_file_is_kept_aside(tmp_path):
    write_shards(tmp_path, records_of(12))
    shard = next(tmp_path.glob("*.tar"))
    next(tmp_path.glob("*.tar.json")).unlink()
    data = bytearray(shard.read_bytes())
    data[data.index(b"b00001.records") + 3] ^= 0xFF  # damages the header: the scan ends here
    shard.write_bytes(data)
    (report,) = recover(tmp_path)
    assert report.num_records == 4
    assert shard.with_name(shard.name + ".damaged").read_bytes() == bytes(data)


def test_the_file_of_a_living_writer_is_left_alone(tmp_path):
    with shard_writer(tmp_path) as shards:
        for record in records_of(5):
            shards.put(record)
        assert recover(tmp_path) == []  # our own

        def another_process() -> None:
            OPEN_FILES.clear()  # the lock tells
            assert recover(tmp_path) == []

        in_child(another_process)
    assert len(list(TrajectoryShardReader(tmp_path))) == 5


def test_a_doubled_folder_is_refused_by_readers_and_repaired(tmp_path):
    """Two processes wrote records 0 to 7 and 4 to 11, in blocks of four."""
    records = records_of(12, features=True)
    write_shards(tmp_path / "a", records[:8], max_shard_records=8)
    write_shards(tmp_path / "b", records[4:], rank=1, max_shard_records=8)
    for path in (tmp_path / "b").glob("*.tar*"):
        path.rename(tmp_path / "a" / path.name)
    folder = tmp_path / "a"
    for use in (TrajectoryShardReader, merge_manifest):
        with pytest.raises(
            TrajectoryFormatError, match=r"0004' is in both .* `lit-dlm traj recover"
        ):
            use(folder)
    (report,) = recover(folder)
    assert (report.num_records, report.num_dropped_blocks) == (4, 0)
    assert recover(folder) == []
    found = list(TrajectoryShardReader(folder))
    assert merge_manifest(folder)["num_records"] == len(found) == 12
    for before, after in zip(records, found, strict=True):
        assert_same(before, after)


def test_a_shard_that_is_deleted_while_it_grows_is_noticed(tmp_path):
    writer = shard_writer(tmp_path, records_per_block=1)
    records = records_of(2)
    writer.put(records[0])
    next(tmp_path.glob("*.tmp-*")).unlink()
    with pytest.raises(FileNotFoundError, match="was deleted during the run"):
        writer.put(records[1])


def test_shards_of_stale_records_go_as_a_whole(tmp_path):
    records = records_of(6)
    uids = [record.uid for record in records]
    for part in (records[:2], records[2:4], records[4:]):
        write_shards(tmp_path, part)
    merge_manifest(tmp_path)
    with pytest.raises(TrajectoryFormatError, match=f"1 to keep .*{uids[2]}.* of 2"):
        drop_shards(tmp_path, lambda uid: uid in uids[3:])
    assert merge_manifest(tmp_path)["num_records"] == 6
    assert drop_shards(tmp_path, lambda uid: uid in uids[2:]) == 4
    assert sorted(completed_uids(tmp_path)) == sorted(uids[:2])
    assert drop_shards(tmp_path, lambda uid: uid in uids[2:]) == 0
    assert merge_manifest(tmp_path)["num_records"] == 2
