import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from lit_dlm.trajectories import Trajectory, TrajectoryFormatError
from lit_dlm.trajectories.features import StepFeatures
from lit_dlm.trajectories.format import (
    block_of,
    decode_block,
    pack,
    record_batch,
    records_of,
    unpack,
)
from lit_dlm.trajectories.members import (
    decode_members,
    encode_members,
)
from tests.trajectories.samples import assert_all_same, random_record, small_record

GOLDEN = Path(__file__).parents[1] / "golden" / "trajectories"


def samples(**options: Any) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [random_record(rng, f"u{i}", **options) for i in range(3)]


def read(data: bytes, features: bytes) -> list[Trajectory]:
    return decode_members(data, features)[1]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 6),
    num_generated=st.sampled_from([0, 1, 2, 13, 64]),
    num_prompt=st.sampled_from([0, 1, 20]),
    num_steps=st.sampled_from([0, 1, 7, 30, 256, 257]),
    remask=st.sampled_from([0.0, 0.05]),
    given=st.sampled_from([0.0, 0.3]),
    fill=st.sampled_from([1.0, 0.5]),
    signals=st.booleans(),
)
def test_decoding_undoes_encoding(seed, count, num_generated, num_prompt, **options):
    rng = np.random.default_rng(seed)
    records = [
        random_record(
            rng,
            f"task/split/{i}ü",
            num_prompt=num_prompt + i,
            num_generated=num_generated + 3 * i,
            **options,
        )
        for i in range(count)
    ]
    for level in (1, 9):
        assert_all_same(records, decode_block(encode_members(records, level=level)[0]))


def test_a_stranger_opens_a_block_with_two_libraries():
    """Columns and metadata as documented; the record by hand of the documentation."""
    record = small_record([8, 7], [1, 0], prompt_ids=[5, 6], mask_id=9, vocab_size=10)
    data = encode_members([record], run_digest=bytes(range(16)))[0]
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
    assert encode_members([record], run_digest=bytes(range(16)))[0] == data


@pytest.mark.parametrize(("name", "limit"), [("gsm8k_256_256", 570), ("gsm8k_128_64", 342)])
def test_bytes_per_record_stay_within_the_format_goal(name, limit):
    records = decode_block((GOLDEN / f"{name}.records.arrow.zst").read_bytes())
    assert len(records) == 64
    assert len(encode_members(records)[0]) / 64 <= limit


def test_golden_blocks_read_as_they_were_written():
    expected = json.loads((GOLDEN / "full.json").read_text())
    paths = [GOLDEN / f"full.{kind}.arrow.zst" for kind in ("records", "features")]
    records = read(*(path.read_bytes() for path in paths))
    for record, fields in zip(records, expected, strict=True):
        found = {name: plain(getattr(record, name)) for name in fields if name != "digest"}
        assert {**found, "digest": record.digest().hex()} == fields


def plain(value: Any) -> Any:
    """What JSON holds of it; floats as their bits."""
    if isinstance(value, StepFeatures):
        value = vars(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return (value.view(f"u{value.itemsize}") if value.dtype.kind == "f" else value).tolist()
    return list(value) if isinstance(value, tuple) else value


def repacked(raw: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **{"write_checksum": True, **options}).compress(raw)


def changed(metadata: Mapping[str, str] | None = None, **changes: Any) -> bytes:
    """A block of three records under right checksums: columns are left out (None), replaced, or
    changed in place by a function of their rows."""
    batch = record_batch(samples(remask=0.3))
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name, change in changes.items():
        if change is None:
            del columns[name]
        elif callable(change):
            rows = columns[name].to_pylist()
            change(rows)
            columns[name] = pa.array(rows, columns[name].type)
        else:
            columns[name] = pa.array(change)
    facts = {key.decode(): value.decode() for key, value in batch.schema.metadata.items()}
    made = pa.record_batch(columns).replace_schema_metadata({**facts, **(metadata or {})})
    return pack(made, level=1)


def inner_bomb() -> bytes:
    """An Arrow stream that is compressed within, too: 64 MB of zeros in every 20 kB."""
    batch = pa.record_batch({"uid": pa.array(["\0" * 2**26])})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return repacked(sink.getvalue().to_pybytes())


def step_outside(rows: list[Any]) -> None:
    rows[0][0]["position"] = 65535


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(changed, tokens=None), r"'tokens'\] missing"),
        (partial(changed, digest=None), r"'digest'\] missing"),
        (partial(changed, {"lit_dlm_trajectories": "3"}), "version 3, .* knows 2"),
        (partial(changed, {"mask_id": "x"}), "metadata do not fit"),
        (partial(changed, {"run_digest": "00"}), r"16 bytes, got \(3, 1\)"),
        (partial(changed, seed=[1, 2, 3]), "'seed' must be uint64, got int64"),
        (partial(changed, uid=["a", "a", "b"]), "a uid is empty or appears twice"),
        (partial(changed, uid=["a", None, "b"]), "'uid' holds nulls"),
        (partial(changed, status=["done"] * 3), "unknown status .*'done'"),
        (partial(changed, commit_step=lambda rows: rows[0].pop()), "must be as long as tokens"),
        (
            partial(changed, prompt_ids=lambda rows: rows[0].append(7)),
            "'u0': content digest does not match",
        ),
        (partial(changed, superseded=step_outside), "outside the canvas"),
        (lambda: b"\x89LDT\r\n\x1a\n\1" + bytes(90), "of the older format 1"),
        (lambda: b"PK\3\4" + bytes(90), "does not unpack"),
        (lambda: repacked(b"no stream"), "block: "),
        (lambda: repacked(bytes(2**28)), "at most 69211904 bytes, got 268435456"),
        (inner_bomb, "one record batch, not compressed within"),
        (lambda: repacked(bytes(9), write_checksum=False), "expected a frame with a checksum"),
        (lambda: repacked(bytes(9), write_content_size=False), "at most .* got 18446744073709"),
    ],
)
def test_what_is_no_block_is_refused_in_one_line(make, message):
    data, before = make(), pa.total_allocated_bytes()
    with pytest.raises(TrajectoryFormatError, match=message) as error:
        decode_block(data)
    assert "\n" not in str(error.value)
    assert pa.total_allocated_bytes() - before < 2**20


def test_what_a_reader_does_not_know_is_skipped():
    data = changed({"more": "yes"}, more=[[1], [], None])
    assert [r.uid for r in decode_block(data)] == ["u0", "u1", "u2"]
    assert len(records_of(block_of(unpack(data)), strict=False)) == 3


def made(uid: str = "b", *, signal: Any = None, features: Any = None, **changes: Any) -> Trajectory:
    """A record with changed fields, one signal full of a value, and changed features."""
    rng, kinds = np.random.default_rng(9), {"signals": signal, "features": features}
    record = random_record(rng, uid, **{name: kind is not None for name, kind in kinds.items()})
    if signal is not None:
        name, value = signal
        values = np.full(len(record.signals[name]), value)
        changes["signals"] = {**record.signals, name: values}
    if features is not None:
        changes["features"] = replace(record.features, **features)
    return replace(record, **changes)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "1 to 65535 records, got 0"),
        # The record has 7 steps.
        ([{}, {"uid": "a", "commit_step": [0] * 4 + [7] * 8}], r"'a': commit_step .*position 4"),
        ([{}, {}], "uid 'b' appears twice"),
        ([{}, {"uid": "a", "signal": ("commit_prob", 1)}], "same signals"),
        ([{"signal": ("step_proposal", 2.0**31)}], "2147483648|out of bounds|truncated"),
        ([{"meta": {"x": float("nan")}}], "'b': meta is not JSON"),
        ([{"meta": {"x": "\ud800"}}], "surrogates"),
        ([{}, {"uid": "c", "vocab_size": 51}], "mask id and vocabulary"),
        ([{"features": {"layout": "masked"}}], "'b': features in layout 'masked' must be 0"),
        ([{"features": {"layout": "other"}}], "features.layout"),
        (
            [{"features": {}}, {"uid": "c", "features": {"projector_digest": "x"}}],
            "all features need one kind.* 'c'",
        ),
    ],
)
def test_encoding_names_the_record_that_breaks_a_rule(records, message):
    with pytest.raises(ValueError, match=message):
        encode_members([made(**changes) for changes in records])


def test_what_shrinks_like_a_bomb_is_refused_when_it_is_written():
    """A record of 65,000 cells that proposes the same token at every one of 400 steps."""
    G, T = 65_000, 400
    signals = {"step_proposal": np.full(G * T, 3, dtype=np.int32)}
    record = small_record(np.full(G, 3), np.full(G, T - 1), signals=signals)
    with pytest.raises(TrajectoryFormatError, match="put fewer into a block"):
        encode_members([record])
