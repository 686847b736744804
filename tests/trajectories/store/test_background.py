import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lit_dlm.trajectories.store import (
    completed_uids,
    merge_manifest,
    recover,
    writer as writer_module,
)
from lit_dlm.trajectories.store.background import BackgroundWriter
from lit_dlm.trajectories.store.writer import record_bytes
from tests.trajectories.samples import (
    assert_all_same,
    forked,
    put_all,
    read_all,
    records_of,
    shard_writer,
)


def background(folder: Path, **options) -> BackgroundWriter:
    return BackgroundWriter(shard_writer(folder, **options))


def uids(folder: Path) -> list[str]:
    return [record.uid for record in read_all(folder)]


class Gate:
    """Holds the writer's thread at its next block until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        plain = writer_module.encode_members

        def encode_members(records, **options):
            self.reached.set()
            assert self.opened.wait(120)
            return plain(records, **options)

        monkeypatch.setattr(writer_module, "encode_members", encode_members)


def test_records_can_be_read_after_a_flush_and_after_close(tmp_path):
    """No block is full: a flush finishes the open shard with what was put before. The thread makes
    the records of a batch."""
    records, threads = records_of(5, features=True, remask=0.1), []

    def make():
        threads.append(threading.current_thread().name)
        return records[2:4]

    with closing(background(tmp_path, records_per_block=64)) as shards:
        put_all(shards, records[:2])
        shards.flush()
        assert_all_same(records[:2], read_all(tmp_path))
        shards.put_batch(make, nbytes=100)
        shards.flush()
        assert len(read_all(tmp_path)) == 4
        shards.flush()  # nothing new
        shards.put(records[4])
    assert_all_same(records, read_all(tmp_path))
    assert len(list(tmp_path.glob("*.tar"))) == 3
    assert not list(tmp_path.glob("*.tmp*"))
    assert threads == ["trajectory-writer"]
    with pytest.raises(ValueError, match="the writer is closed"):
        shards.put(records[0])


def test_a_full_queue_makes_the_caller_wait_and_counts_it(tmp_path, monkeypatch, caplog):
    """Room for three records: at no time do more wait, and all arrive."""
    records = records_of(40)
    limit = 3 * max(record_bytes(record) for record in records)
    gate = Gate(monkeypatch)

    def open_late():
        assert gate.reached.wait(120)
        while sum(put) < limit - max(put):  # until the queue is full
            time.sleep(0.002)
        time.sleep(0.6)
        gate.opened.set()

    put = [0]
    threading.Thread(target=open_late, daemon=True).start()
    with closing(background(tmp_path, records_per_block=1)) as shards:
        shards.max_queue_bytes = limit
        for record in records:
            shards.put(record)
            put.append(record_bytes(record))
    assert shards.blocked_seconds > 0.5
    assert "decoding waited" in caplog.text
    assert uids(tmp_path) == [r.uid for r in records]


def test_a_broken_record_surfaces_at_put_and_close_and_costs_nobody_else(tmp_path, monkeypatch):
    good = records_of(7)
    bad = replace(good[3], uid="bad", meta={"x": {1, 2}})  # a set is not JSON
    broken = replace(good[4], uid="broken")
    broken.commit_step[0] = 99
    gate = Gate(monkeypatch)  # until all are put, or a late one would meet the error already
    shards = background(tmp_path)
    for record in (*good[:2], bad, good[3], broken):
        shards.put(record)
    gate.opened.set()
    with pytest.raises(ValueError, match="'bad': meta is not JSON"):
        shards.flush()
    shards._thread.join(120)
    with pytest.raises(ValueError, match="'bad': meta"):
        shards.put(good[5])
    with pytest.raises(ValueError, match="'bad': meta"):
        shards.close()
    shards.close()  # once is enough
    assert completed_uids(tmp_path) == {r.uid for r in (*good[:2], good[3])}


def test_a_failed_wait_for_the_disk_gives_the_shard_up_to_recovery(tmp_path, monkeypatch):
    """After a failed fsync a second one may succeed although pages are lost, so the file must be
    read again before anybody trusts it."""
    records, plain, calls = records_of(8), os.fsync, []

    def fsync(handle):
        calls.append(handle)
        if len(calls) > 1:  # the first is that of the run record in the shard
            raise OSError(errno.EIO, "Input/output error")
        plain(handle)

    shards = background(tmp_path, records_per_block=8)
    monkeypatch.setattr(os, "fsync", fsync)
    put_all(shards, records)
    with pytest.raises(OSError, match="Input/output error") as error:
        shards.close()
    assert ".tar.tmp-" in error.value.filename
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.tar"))
    (report,) = recover(tmp_path)[0]
    assert report.num_records == 8


def test_the_size_limit_is_an_error_and_keeps_what_is_written(tmp_path):
    shards = background(tmp_path, max_total_bytes=100, records_per_block=2)
    put_all(shards, records_of(2))
    with pytest.raises(OSError, match="limit of 100 bytes"):
        shards.close()
    assert len(completed_uids(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("meta", ["{}", "{'x': {1}}"])
def test_a_program_that_forgets_to_close_keeps_its_records_or_says_which_not(tmp_path, meta):
    """Threads can import little once the program has ended, so nothing is left to import."""
    code = (
        "import atexit, sys; from pathlib import Path\n"
        "from lit_dlm.trajectories.store import BackgroundWriter\n"
        "from tests.trajectories.samples import records_of, shard_writer\n"
        "shards = BackgroundWriter(shard_writer(Path(sys.argv[1])))\n"
        "known = set(sys.modules)\n"
        "atexit.register(lambda: print(set(sys.modules) - known))\n"
        "*good, last = records_of(3)\n"
        f"for record in (*good, last.with_meta(**{meta})): shards.put(record)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
    assert "the writer was never closed" in done.stderr
    is_broken = "x" in meta
    assert ("records are lost: trajectory 'task/split/0002': meta" in done.stderr) == is_broken
    assert len(uids(tmp_path)) == 3 - is_broken


def test_ranks_write_unequal_shares_of_one_set(tmp_path):
    """Rank r writes 7 + 9 r records at the same time as the others; a reader sees each once."""

    def share(rank: int) -> None:
        with closing(background(tmp_path, rank=rank, max_shard_records=8)) as shards:
            put_all(shards, records_of(7 + 9 * rank, start=[0, 7, 23][rank]))

    children = [forked(partial(share, rank)) for rank in range(3)]
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    assert merge_manifest(tmp_path)["num_records"] == 48
    assert sorted(uids(tmp_path)) == [f"task/split/{i:04d}" for i in range(48)]
