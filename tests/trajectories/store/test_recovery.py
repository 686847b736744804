import os
import signal
import time
from contextlib import closing
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
from tests.trajectories.samples import (
    assert_all_same,
    flip,
    forked,
    in_child,
    put_all,
    read_all,
    records_of,
    shard_writer,
    write_shards,
)


def _resume(folder: Path, records, *, pause: float = 0.0, **options) -> None:
    """What a predict loop does: recover, then write what is missing, in a thread."""
    folder.mkdir(exist_ok=True)
    held = recover(folder)[1]
    assert held == completed_uids(folder)
    with closing(BackgroundWriter(shard_writer(folder, held=held, **options))) as shards:
        for record in records:
            if record.uid not in held:
                shards.put(record)
                time.sleep(pause)


def _killed(action, after: float) -> bool:
    """Whether a forked process had to be killed with SIGKILL after some seconds."""
    child, deadline = forked(action), time.monotonic() + after
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert status == 0
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _crashed_writer(folder: Path, records) -> Path:
    """Leaves an unfinished shard of a dead process, as SIGKILL would."""
    in_child(lambda: put_all(shard_writer(folder), records))
    (orphan,) = folder.glob("*.tmp-*")
    return orphan


@pytest.mark.slow
def test_killed_at_twenty_random_points_each_record_is_there_once(tmp_path):
    """An uninterrupted run pauses 0.3 s at least, so the first kills are in the middle of a run;
    the records are those of a run that nobody killed."""
    records = records_of(300, features=True)
    rng = np.random.default_rng(0)
    options = {"max_shard_records": 128, "records_per_block": 16}
    counts, num_killed = [], 0
    for _ in range(20):
        delay = float(rng.uniform(0.02, 0.2))
        num_killed += _killed(lambda: _resume(tmp_path, records, pause=1e-3, **options), delay)
        counts.append(len(completed_uids(tmp_path)))
    assert num_killed > 3
    assert counts[0] < 300
    assert counts == sorted(counts)
    _resume(tmp_path, records, **options)
    assert merge_manifest(tmp_path)["num_records"] == 300
    assert_all_same(records, sorted(read_all(tmp_path), key=lambda record: record.uid))
    assert not list(tmp_path.glob("*.tmp*"))


def test_whole_blocks_of_an_orphan_are_kept_once(tmp_path):
    """Ten records in blocks of four: two blocks are on disk, two records were in memory. After a
    crash during recovery the orphan is still there."""
    records = records_of(10)
    orphan = _crashed_writer(tmp_path, records)
    data = orphan.read_bytes()
    assert completed_uids(tmp_path) == set()
    (report,) = recover(tmp_path)[0]
    assert (report.path, report.num_records, report.num_dropped_blocks) == (orphan, 8, 0)
    assert report.shard.name == "demo-train-r00000-000001.tar"
    assert recover(tmp_path)[0] == []
    orphan.write_bytes(data)
    (report,) = recover(tmp_path)[0]
    assert (report.num_records, report.shard) == (0, None)
    assert merge_manifest(tmp_path)["num_records"] == 8
    assert_all_same(records[:8], read_all(tmp_path))


def test_an_orphan_cut_anywhere_keeps_its_whole_blocks(tmp_path):
    records = records_of(12, features=True)
    orphan = _crashed_writer(tmp_path, records)
    data, counts = orphan.read_bytes(), []
    for i, length in enumerate(np.linspace(0, len(data), 40).astype(int)):
        folder = tmp_path / f"cut{i}"
        folder.mkdir()
        (folder / orphan.name).write_bytes(data[:length])
        recover(folder)
        counts.append(len(completed_uids(folder)))
        if counts[-1]:
            assert_all_same(records[: counts[-1]], read_all(folder))
    assert (counts[0], counts[-1]) == (0, 12)
    assert set(counts) == {0, 4, 8, 12}


def test_what_is_saved_already_or_damaged_is_left_out_of_an_orphan(tmp_path):
    """Two records of the second block are in another shard; the third block is damaged."""
    records = records_of(12, features=True)
    orphan = _crashed_writer(tmp_path / "a", records)
    flip(orphan, orphan.read_bytes().index(b"b00002.records") + 700)
    write_shards(tmp_path / "b", records[5:7])
    orphan.rename(tmp_path / "b" / orphan.name.replace("000000", "000005"))
    (report,) = recover(tmp_path / "b")[0]
    assert (report.num_records, report.num_dropped_blocks) == (6, 1)
    assert_all_same(records[:8], sorted(read_all(tmp_path / "b"), key=lambda record: record.uid))


@pytest.mark.parametrize("num_whole", [12, 4])
def test_a_shard_without_side_file_gets_one_or_is_kept_aside(tmp_path, num_whole):
    """A damaged header ends the scan behind the first of three blocks."""
    records = records_of(12)
    write_shards(tmp_path, records)
    (shard,) = tmp_path.glob("*.tar")
    shard.with_name(f"{shard.name}.json").unlink()
    if num_whole == 4:
        flip(shard, shard.read_bytes().index(b"b00001.records") + 3, 0xFF)
    data = shard.read_bytes()
    with pytest.raises(TrajectoryFormatError, match="without side file"):
        merge_manifest(tmp_path)
    (report,) = recover(tmp_path)[0]
    assert report.num_records == num_whole
    assert_all_same(records[:num_whole], read_all(tmp_path))
    aside = list(tmp_path.glob("*.damaged"))
    assert [path.read_bytes() for path in aside] == ([data] if num_whole == 4 else [])


def test_the_file_of_a_living_writer_is_left_alone(tmp_path):
    def another_process() -> None:
        OPEN_FILES.clear()  # the lock tells
        assert recover(tmp_path)[0] == []

    with shard_writer(tmp_path) as shards:
        put_all(shards, records_of(5))
        assert recover(tmp_path)[0] == []  # our own
        in_child(another_process)
    assert len(read_all(tmp_path)) == 5


def test_a_doubled_folder_is_refused_by_readers_and_repaired(tmp_path):
    """Two processes wrote records 0 to 7 and 4 to 11, in blocks of four."""
    records, folder = records_of(12, features=True), tmp_path / "a"
    write_shards(folder, records[:8], max_shard_records=8)
    write_shards(tmp_path / "b", records[4:], rank=1, max_shard_records=8)
    for path in (tmp_path / "b").glob("*.tar*"):
        path.rename(folder / path.name)
    for use in (TrajectoryShardReader, merge_manifest):
        with pytest.raises(
            TrajectoryFormatError, match=r"0004' is in both .* `lit-dlm traj recover"
        ):
            use(folder)
    (report,), held = recover(folder)
    assert (report.num_records, report.num_dropped_blocks) == (4, 0)
    assert held == {record.uid for record in records}
    assert recover(folder)[0] == []
    assert merge_manifest(folder)["num_records"] == 12
    assert_all_same(records, read_all(folder))


def test_a_shard_that_is_deleted_while_it_grows_is_noticed(tmp_path):
    writer, records = shard_writer(tmp_path, records_per_block=1), records_of(2)
    writer.put(records[0])
    next(tmp_path.glob("*.tmp-*")).unlink()
    with pytest.raises(FileNotFoundError, match="was deleted during the run"):
        writer.put(records[1])


def test_shards_of_stale_records_go_as_a_whole(tmp_path):
    records = records_of(6)
    uids = [record.uid for record in records]
    for first in (0, 2, 4):
        write_shards(tmp_path, records[first : first + 2])
    merge_manifest(tmp_path)
    with pytest.raises(TrajectoryFormatError, match=f"1 to keep .*{uids[2]}.* of 2"):
        drop_shards(tmp_path, lambda uid: uid in uids[3:])
    assert merge_manifest(tmp_path)["num_records"] == 6
    assert drop_shards(tmp_path, lambda uid: uid in uids[2:]) == 4
    assert sorted(completed_uids(tmp_path)) == sorted(uids[:2])
    assert drop_shards(tmp_path, lambda uid: uid in uids[2:]) == 0
    assert merge_manifest(tmp_path)["num_records"] == 2
