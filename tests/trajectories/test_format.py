from __future__ import annotations

import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_dlm.trajectories import Trajectory, TrajectoryFormatError
from lit_dlm.trajectories import container as layout
from lit_dlm.trajectories.errors import ChecksumError, InvariantError, UnsupportedFormatError
from lit_dlm.trajectories.format import decode_block, encode_block
from tests.trajectories.samples import (
    MASK,
    VOCAB,
    assert_same,
    random_record,
    sparse_record,
)


def small_block(**options) -> tuple[list[Trajectory], bytes]:
    rng = np.random.default_rng(0)
    records = [random_record(rng, f"u{i}", **options) for i in range(3)]
    return records, encode_block(records)


def rebuilt(data: bytes, change) -> bytes:
    """The block with its columns changed by ``change(columns)`` and all checksums made anew."""
    header, columns = layout.unpack(data, known=_AllTags())
    columns = change(columns) or columns
    return layout.pack(header, list(columns.values()), level=3)


class _AllTags(tuple):
    def __contains__(self, tag: object) -> bool:
        return True


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 6),
    num_generated=st.sampled_from([0, 1, 2, 13, 64]),
    num_steps=st.sampled_from([0, 1, 7, 30, 256, 257]),
    num_prompt=st.sampled_from([0, 1, 20]),
    remask=st.sampled_from([0.0, 0.05]),
    fixed=st.sampled_from([0.0, 0.3]),
    fill=st.sampled_from([1.0, 0.5]),
    signals=st.booleans(),
)
def test_decoding_undoes_encoding(
    seed, count, num_generated, num_steps, num_prompt, remask, fixed, fill, signals
):
    rng = np.random.default_rng(seed)
    records = [
        random_record(
            rng,
            f"task/split/{i}ü",
            num_prompt=num_prompt + i,
            num_generated=num_generated + 3 * i,
            num_steps=num_steps,
            remask=remask,
            given=fixed,
            fill=fill,
            signals=signals,
        )
        for i in range(count)
    ]
    for level in (1, 9):
        decoded = decode_block(encode_block(records, level=level))
        for before, after in zip(records, decoded, strict=True):
            assert_same(before, after)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_generated=st.integers(1, 4096),
    num_steps=st.integers(1, 1024),
    num_prompt=st.integers(0, 3000),
    remasks=st.integers(0, 200),
    fixed=st.sampled_from([0.0, 0.1]),
)
def test_long_records_round_trip(seed, num_generated, num_steps, num_prompt, remasks, fixed):
    """Two records of random lengths, ``remasks`` random rewrites each; their states agree, too."""
    rng = np.random.default_rng(seed)
    before = [
        sparse_record(
            rng,
            f"u{i}",
            num_generated=max(1, num_generated >> i),
            num_steps=num_steps,
            num_prompt=num_prompt,
            num_rewrites=remasks,
            fixed=fixed,
        )
        for i in range(2)
    ]
    after = decode_block(encode_block([record for record, _ in before], level=1))
    for (record, truth), read in zip(before, after, strict=True):
        assert_same(record, read)
        for step in rng.integers(0, num_steps + 1, 4).tolist():
            np.testing.assert_array_equal(read.state_at(step), truth(step))


def test_a_long_record_round_trips():
    record = random_record(
        np.random.default_rng(1), num_prompt=3000, num_generated=4096, num_steps=1024, remask=1e-4
    )
    assert_same(record, decode_block(encode_block([record]))[0])


def test_the_block_begins_and_ends_as_published():
    """Magic, version 1.0, column count, 3 records, flags, mask id, vocabulary, no dictionary."""
    records, _ = small_block()
    data = encode_block(records, run_digest=bytes(range(16)))
    assert data[:8] == b"\x89LDT\r\n\x1a\n"
    major, minor, columns, n, flags, mask, vocab, dictionary = struct.unpack_from(
        "<BBHIIIII", data, 8
    )
    assert (major, minor, n, flags, mask, vocab, dictionary) == (1, 0, 3, 0, MASK, VOCAB, 0)
    assert data[32:48] == bytes(range(16))
    assert data[-4:] == b"LDTE"
    assert struct.unpack_from("<Q", data, len(data) - 16) == (len(data),)
    crc = zlib.crc32(data[: 48 + 28 * columns])
    assert data[48 + 28 * columns :][:4] == data[-8:-4] == struct.pack("<I", crc)
    tags = [data[48 + 28 * i :][:4].decode() for i in range(columns)]
    assert " ".join(tags[:10]) == "SMID PLEN GLEN NSTP PTOK GTOK CSTP SEED CDIG STAT"


def test_equal_records_give_equal_bytes():
    assert small_block()[1] == small_block()[1]


def test_every_truncation_is_detected():
    _, data = small_block(remask=0.1, given=0.2, signals=True)
    for length in range(len(data)):
        with pytest.raises(TrajectoryFormatError):
            decode_block(data[:length])
    with pytest.raises(TrajectoryFormatError):
        decode_block(data + b"\0")


def _flip_bits(count: int, seed: int) -> None:
    _, data = small_block(remask=0.1, given=0.2, signals=True)
    rng = np.random.default_rng(seed)
    for bit in rng.integers(0, 8 * len(data), count):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(TrajectoryFormatError):
            decode_block(bytes(damaged))


@pytest.mark.slow
def test_bit_flips_are_detected():
    _flip_bits(12_000, seed=0)


@pytest.mark.slow
def test_bit_flips_under_fresh_checksums_raise_only_format_errors():
    """A hostile block has right checksums: then lengths, ranges and rules must still hold, or the
    content digest must fail. Flips in uids, seeds, statuses, meta and signals can pass."""
    _, data = small_block(remask=0.1, given=0.2, signals=True)
    rng = np.random.default_rng(2)
    _, columns = layout.unpack(data, known=_AllTags())
    passed = 0
    for _ in range(1500):
        tag = str(rng.choice(list(columns)))
        raw = bytearray(columns[tag].data)
        bit = int(rng.integers(0, 8 * len(raw)))
        raw[bit // 8] ^= 1 << (bit % 8)
        changed = columns | {tag: layout.Column(tag, columns[tag].dtype, bytes(raw))}
        header, _ = layout.unpack(data, known=())
        forged = layout.pack(header, list(changed.values()), level=1)
        try:
            decode_block(forged)
        except TrajectoryFormatError:
            continue
        passed += 1
        bound_by_digest = {"PLEN", "GLEN", "NSTP", "PTOK", "GTOK", "CSTP", "GIVN", "ECNT"}
        assert tag not in bound_by_digest | {"ESTP", "EPOS", "ETOK", "CDIG"}, (tag, bit)
    assert passed > 0


def test_fuzzed_headers_never_allocate_what_they_claim():
    """Directory entries claim gigabytes, with right header checksums."""
    _, data = small_block()
    num_columns = struct.unpack_from("<H", data, 10)[0]
    body = 48 + 28 * num_columns
    rng = np.random.default_rng(3)
    tracemalloc.start()
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(8, body))
            damaged[at] = int(rng.integers(0, 256))
        crc = struct.pack("<I", zlib.crc32(damaged[:body]))
        damaged[body : body + 4] = damaged[-8:-4] = crc
        try:
            decode_block(bytes(damaged))
        except TrajectoryFormatError:
            continue
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


def with_payload(data: bytes, tag: str, raw: bytes) -> bytes:
    """The block with another content of one column, compressed, whatever it unpacks to."""
    stored = zstandard.compress(raw)
    num_columns = struct.unpack_from("<H", data, 10)[0]
    body = 48 + 28 * num_columns
    head, payloads, at = bytearray(data[:body]), [], body + 4
    for place in range(48, body, 28):
        length = struct.unpack_from("<Q", head, place + 16)[0]
        payload, at = data[at : at + length], at + length
        if head[place : place + 4] == tag.encode():
            payload = stored
            sizes = (len(raw), len(stored), zlib.crc32(stored))
            head[place + 5] = layout.Codec.ZSTD
            struct.pack_into("<QQI", head, place + 8, *sizes)
        payloads.append(payload)
    crc = struct.pack("<I", zlib.crc32(head))
    whole = bytes(head) + crc + b"".join(payloads)
    return whole + struct.pack("<Q", len(whole) + 16) + crc + b"LDTE"


@pytest.mark.parametrize("tag", ["META", "GTOK"])
def test_a_bomb_is_refused(tag: str):
    """A column of 256 MB of zeros packs into 8 kB, and is refused unread."""
    _, data = small_block()
    tokens = layout.unpack(data, known=["PTOK"])[1]["PTOK"].data
    assert len(decode_block(with_payload(data, "PTOK", tokens))) == 3
    bomb = with_payload(data, tag, bytes(256 * 2**20))
    assert len(bomb) < 12_000
    tracemalloc.start()
    with pytest.raises(TrajectoryFormatError, match="expected at most 35"):
        decode_block(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_what_shrinks_like_a_bomb_is_stored_so_that_it_can_be_read():
    """A record of 65,000 cells that proposes the same token at every one of 200 steps."""
    G, T = 65_000, 200
    record = Trajectory(
        uid="u",
        prompt_ids=np.array([1]),
        tokens=np.full(G, 3),
        commit_step=np.full(G, T - 1),
        num_steps=T,
        mask_id=2,
        vocab_size=5,
        seed=0,
        status="complete",
        signals={"step_proposal": np.full(G * T, 3, dtype=np.int32)},
    )
    data = encode_block([record])
    (again,) = decode_block(data)
    assert again.uid == "u"
    assert (again.signals["step_proposal"] == 3).all()
    assert len(data) > 3 * G * T


def test_random_bytes_raise_only_format_errors():
    rng = np.random.default_rng(4)
    for size in (0, 1, 68, 500):
        for _ in range(50):
            with pytest.raises(TrajectoryFormatError):
                decode_block(layout.MAGIC + rng.bytes(size))
            with pytest.raises(TrajectoryFormatError):
                decode_block(rng.bytes(size))


def test_unknown_columns_are_skipped_unless_they_must_be_understood():
    records, data = small_block()
    extra = layout.Column("XTRA", layout.Dtype.BYTES, b"future")
    optional = rebuilt(data, lambda c: c | {"XTRA": extra})
    assert_same(records[0], decode_block(optional)[0])
    needed = layout.Column("XTRA", layout.Dtype.BYTES, b"future", flags=layout.MUST_UNDERSTAND)
    with pytest.raises(UnsupportedFormatError, match="'XTRA' is required"):
        decode_block(rebuilt(data, lambda c: c | {"XTRA": needed}))


def test_newer_versions_and_unknown_flags_are_refused():
    _, data = small_block()
    num_columns = struct.unpack_from("<H", data, 10)[0]
    body = 48 + 28 * num_columns

    def patched(at: int, value: int) -> bytes:
        changed = bytearray(data)
        changed[at] = value
        crc = struct.pack("<I", zlib.crc32(changed[:body]))
        changed[body : body + 4] = changed[-8:-4] = crc
        return bytes(changed)

    with pytest.raises(UnsupportedFormatError, match="format version 2"):
        decode_block(patched(8, 2))
    decode_block(patched(9, 7))  # a higher minor version reads
    with pytest.raises(UnsupportedFormatError, match="unknown flags"):
        decode_block(patched(16, 0x80))
    decode_block(patched(18, 0x80))  # the high half may be ignored


def test_missing_columns_are_named():
    _, data = small_block(remask=0.2)
    for tag in ("SMID", "GTOK", "STAT", "CDIG", "ESTP"):
        with pytest.raises(TrajectoryFormatError, match="missing or alone"):
            decode_block(rebuilt(data, lambda c, tag=tag: {k: v for k, v in c.items() if k != tag}))


def test_a_changed_commit_step_fails_the_digest():
    _, data = small_block()

    def change(columns):
        raw = bytearray(columns["CSTP"].data)
        raw[0] = (raw[0] + 1) % 7
        columns["CSTP"] = layout.Column("CSTP", layout.Dtype.U8, bytes(raw))

    with pytest.raises(ChecksumError, match="'u0': content digest"):
        decode_block(rebuilt(data, change))
    assert len(decode_block(rebuilt(data, change), strict=False)) == 3


def test_encoding_names_the_record_that_breaks_a_rule():
    rng = np.random.default_rng(5)
    records = [random_record(rng, f"u{i}") for i in range(3)]
    records[1].commit_step[4] = 7  # the record has 7 steps
    with pytest.raises(InvariantError, match=r"'u1': commit_step .*position 4"):
        encode_block(records)
    with pytest.raises(ValueError, match="1 to 65535 records, got 0"):
        encode_block([])
    with pytest.raises(InvariantError, match="same signals"):
        encode_block([random_record(rng, "a"), random_record(rng, "b", signals=True)])
    with pytest.raises(InvariantError, match="meta is not JSON"):
        encode_block([random_record(rng, "a").with_meta(value=float("nan"))])
    other = random_record(rng, "b")
    object.__setattr__(other, "vocab_size", 51)
    with pytest.raises(InvariantError, match="mask id and vocabulary"):
        encode_block([random_record(rng, "a"), other])


def test_repeated_uids_in_a_block_are_refused():
    rng = np.random.default_rng(6)
    one, two = random_record(rng, "a"), random_record(rng, "b")
    with pytest.raises(InvariantError, match="'a': a uid appears twice"):
        encode_block([one, replace(two, uid="a")])
    forged = rebuilt(
        encode_block([one, two]),
        lambda c: c | {"SMID": layout.Column("SMID", layout.Dtype.BYTES, b"\1\0a\1\0a")},
    )
    with pytest.raises(InvariantError, match="a uid appears twice"):
        decode_block(forged)


def test_numbers_that_do_not_fit_their_column_are_refused_on_writing():
    rng = np.random.default_rng(7)
    record = random_record(rng, "a", signals=True)
    for name, value in (("step_proposal", 2**24), ("step_proposal", -1), ("step_time_us", 2**32)):
        values = record.signals[name].astype(np.int64)
        values[0] = value
        with pytest.raises(InvariantError, match=f"signal '{name}' must hold integers in 0"):
            encode_block([replace(record, signals={**record.signals, name: values})])
    bare = replace(record, signals={})
    full = replace(bare, tokens=np.ones_like(bare.tokens), given=np.ones(12, dtype=bool))
    with pytest.raises(InvariantError, match="mask_id must be in 0"):
        encode_block([replace(full, commit_step=np.full(12, -1), mask_id=-1)])
    with pytest.raises(InvariantError, match="not valid text"):
        encode_block([replace(bare, uid="\ud800")])
    with pytest.raises(InvariantError, match="meta is not JSON"):
        encode_block([bare.with_meta(text="\ud800")])


def test_partial_records_without_the_flag_are_refused():
    """The flag alone is harmless: a writer may set it before it knows."""
    records, _ = small_block()
    data = encode_block([replace(records[0], status="aborted")])
    header, columns = layout.unpack(data, known=_AllTags())
    assert header.flags == 1
    bare = layout.pack(replace(header, flags=0), list(columns.values()), level=1)
    with pytest.raises(InvariantError, match="without saying so"):
        decode_block(bare)
    whole, columns = layout.unpack(encode_block(records), known=_AllTags())
    flagged = layout.pack(replace(whole, flags=1), list(columns.values()), level=1)
    assert len(decode_block(flagged)) == 3


def test_hostile_events_are_refused_without_strict_reading():
    """A position beyond the response would be an index error in whatever replays the record."""
    _, data = small_block(remask=0.3)

    def change(columns):
        raw = bytearray(columns["EPOS"].data)
        raw[0:2] = b"\xff\xff"
        columns["EPOS"] = layout.Column("EPOS", layout.Dtype.U16, bytes(raw))

    with pytest.raises(InvariantError, match="outside the canvas"):
        decode_block(rebuilt(data, change), strict=False)
