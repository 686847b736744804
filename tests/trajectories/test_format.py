from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from lit_dlm.trajectories import Trajectory, TrajectoryFormatError
from lit_dlm.trajectories.format import (
    attach_features,
    block_of,
    decode_block,
    encode_block,
    encode_features,
    pack,
    read_block,
    record_batch,
    records_of,
    unpack,
)
from tests.trajectories.samples import (
    MASK,
    VOCAB,
    assert_same,
    random_features,
    random_record,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "trajectories"


def samples(**options: Any) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [random_record(rng, f"u{i}", **options) for i in range(3)]


def stored(records: list[Trajectory]) -> tuple[bytes, bytes]:
    return encode_block(records), encode_features(records)


def read(data: bytes, features: bytes) -> list[Trajectory]:
    block = read_block(data)
    return attach_features(block, records_of(block), features)


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


@pytest.mark.parametrize("scheme", ["int8", "fp16"])
@pytest.mark.parametrize("layout", ["generation", "all", "masked"])
def test_features_round_trip(scheme: str, layout: str) -> None:
    """One record without features in between; in ``masked`` what is no mask takes no room."""
    from lit_dlm.trajectories.format import only_masked

    rng = np.random.default_rng(3)
    records = [random_record(rng, f"u{i}", num_generated=14 + i, remask=0.05) for i in range(5)]
    for i, record in enumerate(records):
        if i != 2:
            width = record.num_generated + (record.num_prompt if layout == "all" else 0)
            features = random_features(rng, width, record.num_steps, scheme=scheme)
            whole = replace(features, layout="all" if layout == "all" else "generation")
            records[i] = replace(record, features=whole)
    size = len(encode_features(records))
    if layout == "masked":
        records = [
            r if r.features is None else replace(r, features=only_masked(r, r.features))
            for r in records
        ]
        assert len(encode_features(records)) < 0.75 * size
    data, features_data = stored(records)
    for before, after in zip(records, read(data, features_data), strict=True):
        assert_same(before, after)
    kept = [[] if r.features is None else r.features.kept_steps.tolist() for r in records]
    assert [steps.tolist() for steps in read_block(data).kept_steps] == kept


def test_a_stranger_opens_a_block_with_two_libraries() -> None:
    """Columns and metadata as documented; the record by hand of the documentation."""
    record = Trajectory(
        uid="a", prompt_ids=[5, 6], tokens=[8, 7], commit_step=[1, 0], num_steps=2, mask_id=9,
        vocab_size=10,
    )  # fmt: skip
    data = encode_block([record], run_digest=bytes(range(16)))
    table = pa.ipc.open_stream(zstandard.decompress(data)).read_all()
    (row,) = table.to_pylist()
    assert row == {
        "uid": "a",
        "prompt_ids": [5, 6],
        "tokens": [8, 7],
        "commit_step": [1, 0],
        "num_steps": 2,
        "seed": 0,
        "status": "complete",
        "digest": record.digest(),
    }
    assert table.schema.metadata == {
        b"lit_dlm_trajectories": b"2",
        b"mask_id": b"9",
        b"vocab_size": b"10",
        b"run_digest": bytes(range(16)).hex().encode(),
    }
    assert encode_block([record], run_digest=bytes(range(16))) == data


@pytest.mark.parametrize(("name", "limit"), [("gsm8k_256_256", 570), ("gsm8k_128_64", 342)])
def test_bytes_per_record_stay_within_the_format_goal(name: str, limit: int) -> None:
    records = decode_block((GOLDEN / f"{name}.records.arrow.zst").read_bytes())
    assert len(records) == 64
    assert len(encode_block(records)) / 64 <= limit


def test_golden_blocks_read_as_they_were_written() -> None:
    expected = json.loads((GOLDEN / "full.json").read_text())
    paths = [GOLDEN / f"full.{kind}.arrow.zst" for kind in ("records", "features")]
    records = read(*(path.read_bytes() for path in paths))
    for record, fields in zip(records, expected, strict=True):
        assert record.digest().hex() == fields["digest"]
        for name in ("uid", "num_steps", "mask_id", "vocab_size", "seed", "status", "meta"):
            assert getattr(record, name) == fields[name], name
        for name in ("prompt_ids", "tokens", "commit_step", "given", "superseded"):
            value = getattr(record, name)
            assert (None if value is None else value.tolist()) == fields[name], name
        assert record.signals.keys() == fields["signals"].keys()
        for name, values in record.signals.items():
            bits = values.view(np.uint16 if values.dtype == np.float16 else np.uint32)
            assert bits.tolist() == fields["signals"][name], name
        if fields["features"] is None:
            assert record.features is None
            continue
        assert record.features is not None
        assert record.features.scales is not None
        assert record.features.scales.view(np.uint16).tolist() == fields["features"]["scales"]
        for name in ("kept_steps", "features", "proposals"):
            assert getattr(record.features, name).tolist() == fields["features"][name]
        assert list(record.features.groups) == fields["features"]["groups"]
        assert record.features.projector_digest == fields["features"]["projector_digest"]


# -- damage ----------------------------------------------------------------------------------------


def repacked(raw: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **{"write_checksum": True, **options}).compress(raw)


def test_no_flipped_bit_changes_what_is_read() -> None:
    """Zstd does not read all bits of a frame: 1 in 200 is padding, which the side file covers."""
    records = samples(remask=0.1, given=0.2, signals=True, features=True)
    members = stored(records)
    rng = np.random.default_rng(0)
    passed = 0
    for at, count in ((0, 4000), (1, 600)):
        for bit in rng.integers(0, 8 * len(members[at]), count):
            damaged = [bytearray(member) for member in members]
            damaged[at][bit // 8] ^= 1 << (bit % 8)
            try:
                found = read(*map(bytes, damaged))
            except TrajectoryFormatError:
                continue
            passed += 1
            for one, two in zip(records, found, strict=True):
                assert_same(one, two)
    assert passed < 4600 / 100


def changed_batch(change: Callable[[dict[str, Any]], Any], **metadata: str) -> bytes:
    """A block of three records with changed columns and metadata, under right checksums."""
    batch = record_batch(samples(remask=0.3))
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    change(columns)
    facts = {key.decode(): value.decode() for key, value in batch.schema.metadata.items()}
    facts |= metadata
    made = pa.record_batch(columns).replace_schema_metadata(facts)
    return pack(made, level=1)


def with_lists(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(columns: dict[str, Any]) -> None:
        rows = columns[name].to_pylist()
        change(rows)
        columns[name] = pa.array(rows, columns[name].type)

    return apply


def step_outside(rows: list[Any]) -> None:
    rows[0][0]["position"] = 65535


def inner_bomb() -> bytes:
    """An Arrow stream that is compressed within, too: 64 MB of zeros in every 20 kB."""
    batch = pa.record_batch({"uid": pa.array(["\0" * 2**26])})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return repacked(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed_batch(lambda c: c.pop("tokens")), r"'tokens'\] missing"),
        (lambda: changed_batch(lambda c: c.pop("digest")), r"'digest'\] missing"),
        (lambda: changed_batch(lambda c: None, lit_dlm_trajectories="3"), "version 3, .* knows 2"),
        (lambda: changed_batch(lambda c: None, mask_id="x"), "metadata do not fit"),
        (lambda: changed_batch(lambda c: None, run_digest="00"), r"16 bytes, got \(3, 1\)"),
        (
            lambda: changed_batch(lambda c: c.update(seed=pa.array([1, 2, 3]))),
            "'seed' must be uint64, got int64",
        ),
        (
            lambda: changed_batch(lambda c: c.update(uid=pa.array(["a", "a", "b"]))),
            "a uid is empty or appears twice",
        ),
        (
            lambda: changed_batch(lambda c: c.update(uid=pa.array(["a", None, "b"]))),
            "'uid' holds nulls",
        ),
        (
            lambda: changed_batch(lambda c: c.update(status=pa.array(["done"] * 3))),
            "unknown status .*'done'",
        ),
        (
            lambda: changed_batch(with_lists("commit_step", lambda rows: rows[0].pop())),
            "must be as long as tokens",
        ),
        (
            lambda: changed_batch(with_lists("prompt_ids", lambda rows: rows[0].append(7))),
            "'u0': content digest does not match",
        ),
        (lambda: changed_batch(with_lists("superseded", step_outside)), "outside the canvas"),
        (lambda: b"\x89LDT\r\n\x1a\n\1" + bytes(90), "of the older format 1"),
        (lambda: b"PK\3\4" + bytes(90), "does not unpack"),
        (lambda: repacked(b"no stream"), "block: "),
        (lambda: repacked(bytes(2**28)), "at most 69211904 bytes, got 268435456"),
        (inner_bomb, "one record batch, not compressed within"),
        (lambda: repacked(bytes(9), write_checksum=False), "expected a frame with a checksum"),
        (lambda: repacked(bytes(9), write_content_size=False), "at most .* got 18446744073709"),
    ],
)
def test_what_is_no_block_is_refused_in_one_line(make: Callable[[], bytes], message: str) -> None:
    data, before = make(), pa.total_allocated_bytes()
    with pytest.raises(TrajectoryFormatError, match=message) as error:
        decode_block(data)
    assert "\n" not in str(error.value)
    assert pa.total_allocated_bytes() - before < 2**20


def test_what_a_reader_does_not_know_is_skipped() -> None:
    data = changed_batch(lambda c: c.update(more=pa.array([[1], [], None])), more="yes")
    assert [r.uid for r in decode_block(data)] == ["u0", "u1", "u2"]
    assert len(records_of(block_of(unpack(data)), strict=False)) == 3


def with_features(**changes: Any) -> Trajectory:
    record = random_record(np.random.default_rng(8), "a", features=True)
    assert record.features is not None
    return replace(record, features=replace(record.features, **changes))


def with_signal(name: str, value: float) -> Trajectory:
    record = random_record(np.random.default_rng(7), "a", signals=True)
    values = np.full(len(record.signals[name]), value)
    return replace(record, signals={**record.signals, name: values})


def late_write() -> Trajectory:
    record = random_record(np.random.default_rng(5), "a")
    record.commit_step[4] = 7  # the record has 7 steps
    return record


def plain(**changes: Any) -> Trajectory:
    return replace(random_record(np.random.default_rng(9), "b"), **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (list, "1 to 65535 records, got 0"),
        (lambda: [plain(), late_write()], r"'a': commit_step .*position 4"),
        (lambda: [plain(), plain()], "uid 'b' appears twice"),
        (lambda: [plain(), with_signal("commit_prob", 1)], "same signals"),
        (lambda: [with_signal("step_proposal", 2.0**31)], r"2147483648|out of bounds|truncated"),
        (lambda: [plain(meta={"x": float("nan")})], "'b': meta is not JSON"),
        (lambda: [plain(meta={"x": "\ud800"})], "surrogates"),
        (lambda: [plain(uid="\ud800")], "uid must be a text"),
        (lambda: [plain(uid="")], "1 to 65535 bytes"),
        (lambda: [plain(seed=-1)], "seed must be in 0"),
        (lambda: [plain(), plain(uid="c", vocab_size=51)], "mask id and vocabulary"),
        (lambda: [with_features(layout="masked")], "'a': features in layout 'masked' must be 0"),
        (lambda: [with_features(layout="other")], "features.layout"),
        (
            lambda: [with_features(), replace(with_features(projector_digest="x"), uid="c")],
            "all features need one kind.* 'c'",
        ),
    ],
)
def test_encoding_names_the_record_that_breaks_a_rule(
    make: Callable[[], list[Trajectory]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stored(make())


def test_features_do_not_join_other_records() -> None:
    records = samples(features=True)
    data, features = stored(records)
    other = encode_block([replace(records[0], uid="x"), *records[1:]])
    for block in (other, encode_block(records[:1])):
        with pytest.raises(TrajectoryFormatError, match="features are of other records"):
            read(block, features)
    without = encode_block([replace(r, features=None) for r in records])
    with pytest.raises(TrajectoryFormatError, match="features are of other records"):
        read(without, features)
    with pytest.raises(TrajectoryFormatError, match=r"'features'\] missing"):
        read(data, data)


def test_what_shrinks_like_a_bomb_is_refused_when_it_is_written() -> None:
    """A record of 65,000 cells that proposes the same token at every one of 400 steps."""
    G, T = 65_000, 400
    record = Trajectory(
        uid="u", prompt_ids=[1], tokens=np.full(G, 3), commit_step=np.full(G, T - 1), num_steps=T,
        mask_id=MASK, vocab_size=VOCAB,
        signals={"step_proposal": np.full(G * T, 3, dtype=np.int32)},
    )  # fmt: skip
    with pytest.raises(TrajectoryFormatError, match="put fewer into a block"):
        encode_block([record])
