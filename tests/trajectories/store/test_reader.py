import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds

from lit_dlm.trajectories import TrajectoryFormatError
from lit_dlm.trajectories.format import decode_block
from lit_dlm.trajectories.store import TrajectoryShardReader, merge_manifest, stream
from lit_dlm.trajectories.store.files import shard_paths, uid_order
from tests.trajectories.samples import (
    assert_all_same,
    flip,
    random_record,
    read_all,
    records_of,
    write_shards,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "trajectories"


def written(folder: Path, count: int = 12, **options: Any) -> Path:
    """The one shard of a folder of blocks of four."""
    write_shards(folder, records_of(count, **options))
    (shard,) = folder.glob("*.tar")
    return shard


def test_a_stream_is_what_webdataset_reads_and_notices_where_it_ends(tmp_path, monkeypatch):
    """At a corrupt header of the archive WebDataset simply ends; reading by offset goes on."""
    records = records_of(12, features=True)
    write_shards(tmp_path, records, max_shard_records=8)
    urls = [f"file:{path}" for path in sorted(tmp_path.glob("*.tar"))]
    plain = list(wds.WebDataset(urls, shardshuffle=False))
    assert [len(decode_block(sample["records.arrow.zst"])) for sample in plain] == [4, 4, 4]
    assert_all_same(records, stream(urls))
    assert all(record.features is None for record in stream(urls, features=False))
    for own, all_of_them in (("RANK", "WORLD_SIZE"), ("WORKER", "NUM_WORKERS")):
        with monkeypatch.context() as patch:  # as in the second of two processes or workers
            patch.setenv(own, "1")
            patch.setenv(all_of_them, "2")
            assert_all_same(records[8:], stream(urls))
    shard = Path(urls[0].removeprefix("file:"))
    flip(shard, TrajectoryShardReader(tmp_path).side_file(shard).blocks[1].feature_offset - 507)
    with pytest.raises(TrajectoryFormatError, match="expected 2 blocks, got 1"):
        list(stream(urls))
    assert len(read_all(tmp_path)) == 12


def test_random_access_by_offset(tmp_path):
    records = records_of(10, features=True)
    write_shards(tmp_path, records)
    reader = TrajectoryShardReader(tmp_path)
    assert_all_same(records[8:], reader.read_block(reader.shards[0], 2))
    with pytest.raises(IndexError):
        reader.read_block(reader.shards[0], 3)
    found = reader.find({records[9].uid, records[1].uid})
    assert [r.uid for r in found] == [records[1].uid, records[9].uid]


def test_any_flipped_bit_of_a_member_is_reported_and_only_its_block_is_lost(tmp_path, caplog):
    shard = written(tmp_path, features=True)
    data, rng = shard.read_bytes(), np.random.default_rng(0)
    entry = TrajectoryShardReader(tmp_path).side_file(shard).blocks[1]
    message = rf"{shard.name}: block 'r0s0b00001' at byte {entry.offset}: .*checksum"
    for first, size in ((entry.offset, entry.size), (entry.feature_offset, entry.feature_size)):
        for bit in rng.integers(0, 8 * size, 100).tolist():
            shard.write_bytes(data)
            flip(shard, first + bit // 8, 1 << (bit % 8))
            with pytest.raises(TrajectoryFormatError, match=message):
                TrajectoryShardReader(tmp_path).read_block(shard, 1)
    with pytest.raises(TrajectoryFormatError, match="r0s0b00001"):
        read_all(tmp_path)
    reader = TrajectoryShardReader(tmp_path, on_error="skip")
    assert [int(r.uid[-4:]) for r in reader] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert "r0s0b00001" in caplog.text


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.97])
def test_a_truncated_shard_is_reported(tmp_path, keep):
    shard = written(tmp_path)
    shard.write_bytes(shard.read_bytes()[: int(shard.stat().st_size * keep)])
    with pytest.raises(TrajectoryFormatError, match=re.escape(str(shard))):
        read_all(tmp_path)
    list(TrajectoryShardReader(tmp_path, on_error="skip"))
    with pytest.raises(TrajectoryFormatError, match="bytes, got"):
        merge_manifest(tmp_path)


def test_missing_files_are_named(tmp_path):
    write_shards(tmp_path, records_of(8), max_shard_records=4)
    shards = sorted(tmp_path.glob("*.tar"))
    shards[0].unlink()
    with pytest.raises(TrajectoryFormatError, match=r"000000\.tar: is missing"):
        TrajectoryShardReader(tmp_path)
    assert shard_paths([tmp_path]) == shards
    (tmp_path / f"{shards[1].name}.json").unlink()
    with pytest.raises(TrajectoryFormatError, match=r"000001\.tar\.json: is missing; .* recover"):
        TrajectoryShardReader(shards[1:])


def test_a_set_of_the_older_format_is_refused_in_one_line():
    with pytest.raises(TrajectoryFormatError, match="of the older format 1") as error:
        TrajectoryShardReader(GOLDEN / "format_1")
    assert "\n" not in str(error.value)
    assert len(shard_paths([GOLDEN / "format_1"])) == 1  # found, so that the reader can say so


def block(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["blocks"][0].update(changes)


def top(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (block(size=2**60), "do not fit"),
        (block(size=10**30), "not a side file"),
        (block(size="10"), "not a side file"),
        (block(offset=-1), "not a side file"),
        (block(offset=1.5), "not a side file"),
        (block(feature_offset=1), "checksum"),
        (block(key=["x"]), "not a side file"),
        (top(shard=["x"]), "not a side file"),
        (top(bytes=None), "not a side file"),
        (top(num_records=5), "do not fit"),
        (top(version=3), r"not a side file.*shard of .*3\)"),
        (top(run_digest="00"), "not those of the side file"),
        (lambda content: content["uids"].__setitem__(1, content["uids"][0]), "do not fit"),
        (lambda content: content["uids"].__setitem__(1, None), "do not fit"),
        (lambda content: content["uids"].reverse(), "not those of the side file"),
        (block(feature_offset=None, feature_size=None, feature_crc32=None), "is missing"),
        (lambda content: (block(size=2**60)(content), top(bytes=2**62)(content)), "checksum"),
    ],
)
def test_a_side_file_that_lies_is_refused(tmp_path, change, message):
    """Also where its shard is said to be as large; nothing of that size is allocated."""
    shard = written(tmp_path, 4, features=True)
    path = shard.with_name(f"{shard.name}.json")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(TrajectoryFormatError, match=message):
        TrajectoryShardReader(tmp_path).read_block(shard, 0)


def test_an_outline_says_what_the_block_says_and_reads_no_features(tmp_path):
    """Blocks of four: the third has two records, and these have no features."""
    rng = np.random.default_rng(0)
    records = [
        random_record(rng, f"u{i}", num_steps=5 + i % 3, given=0.3, features=i < 8)
        for i in range(10)
    ]
    write_shards(tmp_path, records)
    reader = TrajectoryShardReader(tmp_path)
    for path, index in reader.blocks:
        whole = reader.read_block(path, index)
        entry = reader.side_file(path).blocks[index]
        if index < 2:
            flip(path, entry.feature_offset + entry.feature_size - 100)
            with pytest.raises(TrajectoryFormatError, match="checksum"):
                reader.read_block(path, index)
        block, outlined = reader.outline(path, index)
        assert [r.digest() for r in outlined] == [r.digest() for r in whole]
        kept = [[] if r.features is None else r.features.kept_steps.tolist() for r in whole]
        assert [steps.tolist() for steps in block.kept_steps] == kept
        facts = block.features
        found = facts and (facts.layout, facts.groups, facts.projector)
        assert found == (("generation", (4, 2, 1), "digest") if index < 2 else None)


def test_rollouts_are_in_the_order_of_their_prompts_and_rl_steps() -> None:
    """Rank 0 wrote all RL steps of prompt 2 before those of prompt 1 by rank 1."""
    uids = [f"t/train/{n}@m/00000{step}.0000.000" for n in (2, 1) for step in (1, 0)]
    assert [uids[number] for number in uid_order(uids)] == sorted(uids)
    uids = ["t/test/1@b", "t/test/0@b", "t/test/0#1@b", "t/test/0@a"]
    assert uid_order(uids) == [1, 2, 0, 3]  # methods as the run had them
