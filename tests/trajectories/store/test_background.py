from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lit_dlm.trajectories.store import (
    SizeLimitError,
    TrajectoryShardReader,
    completed_uids,
    merge_manifest,
    recover,
    writer as writer_module,
)
from lit_dlm.trajectories.store.writer import BackgroundWriter, record_bytes
from tests.trajectories.samples import assert_same, in_child, records_of, shard_writer


def background(folder: Path, **options) -> BackgroundWriter:
    return BackgroundWriter(shard_writer(folder, **options))


class Gate:
    """Holds the writer's thread at its next block until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        plain = writer_module.encode_block

        def encode_block(records, **options):
            self.reached.set()
            assert self.opened.wait(120)
            return plain(records, **options)

        monkeypatch.setattr(writer_module, "encode_block", encode_block)


def test_what_is_put_is_read_after_close(tmp_path):
    records = records_of(30, features=True, remask=0.1)
    with background(tmp_path, max_shard_records=8) as shards:
        for record in records:
            shards.put(record)
    for before, after in zip(records, TrajectoryShardReader(tmp_path), strict=True):
        assert_same(before, after)
    assert not list(tmp_path.glob("*.tmp*"))


def test_records_can_be_read_after_a_flush(tmp_path):
    """No block is full: the flush finishes the open shard with what was put before."""
    records = records_of(3)
    with background(tmp_path, records_per_block=64) as shards:
        for record in records[:2]:
            shards.put(record)
        shards.flush()
        assert [r.uid for r in TrajectoryShardReader(tmp_path)] == [r.uid for r in records[:2]]
        shards.put(records[2])
        shards.flush()
        assert len(list(TrajectoryShardReader(tmp_path))) == 3
        shards.flush()  # nothing new
    assert len(list(tmp_path.glob("*.tar"))) == 2


def test_the_thread_makes_the_records_of_a_batch(tmp_path):
    records, threads = records_of(5), []

    def make():
        threads.append(threading.current_thread().name)
        return records

    with background(tmp_path) as shards:
        shards.put_batch(make, nbytes=100)
        shards.flush()
        assert completed_uids(tmp_path) == {r.uid for r in records}
    assert threads == ["trajectory-writer"]


def test_a_full_queue_makes_the_caller_wait_and_counts_it(tmp_path, monkeypatch, caplog):
    """Room for three records: at no time do more wait, and all arrive."""
    records = records_of(40)
    limit = 3 * max(record_bytes(record) for record in records)
    gate = Gate(monkeypatch)

    def open_late():
        assert gate.reached.wait(120)
        while sum(put) < limit - max(put):  # until the queue is full
            time.sleep(0.002)
        time.sleep(1.0)
        gate.opened.set()

    put = [0]
    threading.Thread(target=open_late, daemon=True).start()
    with background(tmp_path, records_per_block=1) as shards:
        shards.max_queue_bytes = limit
        for record in records:
            shards.put(record)
            put.append(record_bytes(record))
    assert shards.blocked_seconds > 0.6
    assert "decoding waited" in caplog.text
    assert [r.uid for r in TrajectoryShardReader(tmp_path)] == [r.uid for r in records]


def _wait_for_end(shards: BackgroundWriter) -> None:
    deadline = time.monotonic() + 120
    while shards._thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not shards._thread.is_alive()


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
    _wait_for_end(shards)
    with pytest.raises(ValueError, match="'bad': meta"):
        shards.put(good[5])
    with pytest.raises(ValueError, match="'bad': meta"):
        shards.close()
    shards.close()  # once is enough
    assert completed_uids(tmp_path) == {r.uid for r in (*good[:2], good[3])}


def test_any_error_of_the_thread_surfaces(tmp_path):
    (record,) = records_of(1)

    def make():
        raise ZeroDivisionError("no OSError, no ValueError")

    shards = background(tmp_path)
    shards.put(record)
    shards.put_batch(make, nbytes=1)
    for call in (shards.flush, shards.close):
        with pytest.raises(ZeroDivisionError):
            call()
    assert completed_uids(tmp_path) == {record.uid}


def test_a_full_disk_surfaces_and_leaves_no_torn_final_name(tmp_path):
    """A file size limit stands in for the full disk. What was flushed before is recovered."""
    records = records_of(24)

    def action() -> None:
        shards = background(tmp_path)
        for record in records[:8]:
            shards.put(record)
        while not (found := list(tmp_path.glob("*.tmp-*"))) or b"b00001" not in (
            found[0].read_bytes()
        ):  # until both blocks are written
            time.sleep(0.002)
        (path,) = found
        limit = path.stat().st_size + 700
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        shards.put_batch(lambda: records[8:], nbytes=1)
        with pytest.raises(OSError, match="File too large") as error:
            shards.flush()
        assert error.value.filename == str(path)
        assert error.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="File too large"):
            shards.close()
        assert not list(tmp_path.glob("*.tar"))

    in_child(action)
    recover(tmp_path)
    assert completed_uids(tmp_path) == {r.uid for r in records[:8]}
    with background(tmp_path) as shards:
        for record in records[8:]:
            shards.put(record)
    assert sorted(r.uid for r in TrajectoryShardReader(tmp_path)) == [r.uid for r in records]


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
    for record in records:
        shards.put(record)
    with pytest.raises(OSError, match="Input/output error") as error:
        shards.close()
    assert ".tar.tmp-" in error.value.filename
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.tar"))
    (report,) = recover(tmp_path)
    assert report.num_records == 8


def test_the_size_limit_is_an_error_and_keeps_what_is_written(tmp_path):
    shards = background(tmp_path, max_total_bytes=100, records_per_block=2)
    for record in records_of(2):
        shards.put(record)
    with pytest.raises(SizeLimitError, match="limit of 100 bytes"):
        shards.close()
    assert len(completed_uids(tmp_path)) == 2


@pytest.mark.slow
def test_a_program_that_forgets_to_close_keeps_its_records(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from lit_dlm.trajectories.store import BackgroundWriter\n"
        "from tests.trajectories.samples import records_of, shard_writer\n"
        "shards = BackgroundWriter(shard_writer(Path(sys.argv[1])))\n"
        "for record in records_of(3): shards.put(record)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "was never closed" in done.stderr
    assert len(list(TrajectoryShardReader(tmp_path))) == 3


def test_ranks_write_unequal_shares_of_one_set(tmp_path):
    """Rank r writes 7 + 9 r records at the same time as the others; a reader sees each once."""
    counts = [7 + 9 * rank for rank in range(3)]
    starts = np.cumsum([0, *counts]).tolist()
    children = []
    for rank, count in enumerate(counts):
        child = os.fork()
        if child == 0:
            with background(tmp_path, rank=rank, max_shard_records=8) as shards:
                for record in records_of(count, start=starts[rank]):
                    shards.put(record)
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    assert merge_manifest(tmp_path)["num_records"] == sum(counts)
    found = sorted(record.uid for record in TrajectoryShardReader(tmp_path))
    assert found == [f"task/split/{i:04d}" for i in range(sum(counts))]


def test_a_closed_writer_takes_no_records(tmp_path):
    shards = background(tmp_path)
    shards.close()
    with pytest.raises(ValueError, match="the writer is closed"):
        shards.put(records_of(1)[0])
