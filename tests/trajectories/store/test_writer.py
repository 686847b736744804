import re
import resource
import tarfile

import numpy as np
import pytest

from lit_dlm.trajectories.record import TrajectoryFormatError
from lit_dlm.trajectories.store import TrajectoryShardReader, completed_uids
from tests.trajectories.samples import (
    assert_all_same,
    in_child,
    put_all,
    random_record,
    read_all,
    records_of,
    shard_writer,
    write_shards,
)


def test_what_is_written_is_read(tmp_path):
    """Eleven records in two shards; a block holds at most four, of one kind; a uid, anything."""
    records = [
        *records_of(6, features=True, signals=True, remask=0.1),
        *records_of(3, start=6, features=True),
        *records_of(1, start=9),
        random_record(np.random.default_rng(0), "../a b/c.ü"),
    ]
    write_shards(tmp_path, records, max_shard_records=8)
    names = sorted(path.name for path in tmp_path.glob("*.tar"))
    assert names == [f"demo-train-r00000-{i:06d}.tar" for i in range(2)]
    reader = TrajectoryShardReader(tmp_path)
    assert reader.num_records == 11
    assert [len(reader.read_block(*place)) for place in reader.blocks] == [4, 2, 3, 2]
    assert_all_same(records, reader)
    plain = list(TrajectoryShardReader(tmp_path, features=False))
    assert all(record.features is None for record in plain)
    assert completed_uids(tmp_path) == {record.uid for record in records}
    assert not list(tmp_path.glob("*.tmp*"))


def test_member_names_have_no_dots_and_equal_content_gives_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write_shards(tmp_path / name, records_of(6, features=True))
    shard = "demo-train-r00000-000000.tar"
    assert (tmp_path / "a" / shard).read_bytes() == (tmp_path / "b" / shard).read_bytes()
    with tarfile.open(tmp_path / "a" / shard) as tar:
        members = tar.getmembers()
    blocks = [f"r0s0b0000{i}.{kind}.arrow.zst" for i in (0, 1) for kind in ("features", "records")]
    assert [member.name for member in members] == ["__run__/run.json", *blocks]
    assert all(re.fullmatch(r"[a-z0-9_-]+", m.name.split(".")[0]) for m in members[1:])
    assert {(m.mtime, m.uid, m.mode) for m in members} == {(0, 0, 0o644)}


def test_a_repeated_or_broken_record_is_refused_by_name_and_the_rest_is_kept(tmp_path):
    """Of several records the first fault is named, and all others are added."""
    good, bad, worse, more = records_of(4)
    bad.commit_step[0] = worse.commit_step[0] = 99
    with shard_writer(tmp_path) as shards:
        shards.put()
        with pytest.raises(ValueError, match=r"'task/split/0001': commit_step"):
            shards.put(good, bad, worse, more)
        with pytest.raises(ValueError, match=r"'task/split/0000': this uid is already in"):
            shards.put(good)
    for held in (None, {good.uid}):  # as the folder says, and as given
        shards = shard_writer(tmp_path, rank=1, held=held)
        with shards, pytest.raises(ValueError, match=r"'task/split/0000': this uid is already in"):
            shards.put(good)
    assert [record.uid for record in read_all(tmp_path)] == [good.uid, more.uid]


@pytest.mark.parametrize("option", ["name", "records_per_block", "max_shard_records"])
def test_settings_out_of_range_are_refused(tmp_path, option):
    for value in ("a.b", "A", "a/b", "") if option == "name" else (0,):
        with pytest.raises(ValueError, match=option):
            shard_writer(tmp_path, **{option: value})


def test_an_empty_writer_leaves_no_shard(tmp_path):
    write_shards(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(TrajectoryFormatError, match="no trajectory shards"):
            TrajectoryShardReader(folder)


def test_a_full_disk_is_an_os_error_and_nothing_is_lost(tmp_path):
    """A file size limit stands in for the full disk: the third block does not fit, twice. When
    there is room again, the writer goes on, and all twelve records are there."""
    records = records_of(12)

    def action() -> None:
        shards = shard_writer(tmp_path)
        put_all(shards, records[:8])
        (path,) = tmp_path.glob("*.tmp-*")
        size = path.stat().st_size
        unlimited = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, unlimited))
        for attempt in (lambda: put_all(shards, records[8:]), shards.flush):
            with pytest.raises(OSError, match="File too large") as error:
                attempt()
            assert error.value.filename == str(path)
            assert path.stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
        shards.close()

    in_child(action)
    assert [record.uid for record in read_all(tmp_path)] == [r.uid for r in records]
