"""Files of released versions: they must read forever, and stay as small as promised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lit_dlm.trajectories.codec import decode_block, encode_block
from lit_dlm.trajectories.container import read_header
from lit_dlm.trajectories.errors import DictionaryMissingError
from lit_dlm.trajectories.feature_codec import attach_features
from lit_dlm.trajectories.withheld import WithheldTrajectory
from tests.trajectories.samples import assert_same

GOLDEN = Path(__file__).parents[1] / "golden" / "trajectories"


@pytest.mark.parametrize(("name", "limit"), [("gsm8k_256_256", 750), ("gsm8k_128_64", 420)])
def test_bytes_per_record_stay_within_the_format_goal(name, limit):
    stored = (GOLDEN / f"{name}.trajb").read_bytes()
    records = decode_block(stored)
    assert len(records) == 64
    assert len(encode_block(records, level=9)) / 64 <= limit


def test_golden_blocks_read_forever():
    expected = json.loads((GOLDEN / "full.json").read_text())
    records = decode_block((GOLDEN / "full.trajb").read_bytes())
    records = attach_features(records, (GOLDEN / "full.featb").read_bytes())
    assert len(records) == len(expected)
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
        assert (record.features is None) == (fields["features"] is None)
        if record.features is not None:
            assert record.features.scales is not None
            assert record.features.scales.view(np.uint16).tolist() == fields["features"]["scales"]
            for name in ("kept_steps", "features", "proposals"):
                assert getattr(record.features, name).tolist() == fields["features"][name]
            assert list(record.features.groups) == fields["features"]["groups"]
            assert record.features.projector_digest == fields["features"]["projector_digest"]


def test_golden_block_with_unknown_columns_and_withheld_prompts_reads():
    """The records of ``full.trajb`` with ``PDIG`` for ``PTOK``, an optional column ``XTRA`` of an
    unknown element type and codec, minor version 9 and an unknown high flag."""
    data = (GOLDEN / "future.trajb").read_bytes()
    assert (data[8], data[9]) == (1, 9)
    assert read_header(data).flags & 0x8000_0000
    assert b"XTRA" in data[:1000]
    assert b"PTOK" not in data[:1000]
    whole = decode_block((GOLDEN / "full.trajb").read_bytes())
    for before, after in zip(whole, decode_block(data), strict=True):
        assert isinstance(after, WithheldTrajectory)
        np.testing.assert_array_equal(after.all_states(), before.all_states())
        assert_same(before, after.with_prompt(before.prompt_ids))


def test_golden_block_with_a_dictionary_reads():
    data = (GOLDEN / "dictionary.trajb").read_bytes()
    dictionary = (GOLDEN / "zstd.dict").read_bytes()
    number = int.from_bytes(data[28:32], "little")
    (record,) = decode_block(data, dictionaries={number: dictionary})
    first = decode_block((GOLDEN / "gsm8k_128_64.trajb").read_bytes())[0]
    assert_same(first, record)
    with pytest.raises(DictionaryMissingError, match=f"needs the zstd dictionary {number}"):
        decode_block(data)
