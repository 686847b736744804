"""Files of released versions: they must read forever, and stay as small as promised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lit_dlm.trajectories.errors import UnsupportedFormatError
from lit_dlm.trajectories.features import attach_features
from lit_dlm.trajectories.format import decode_block, encode_block
from lit_dlm.trajectories.store.files import shards_in
from lit_dlm.trajectories.store.reader import TrajectoryShardReader
from lit_dlm.trajectories.verify import verify

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


def test_shards_of_version_0_1_read_forever():
    """Written by the code of version 0.1: signals, re-masking, given cells, masks left, features of
    three kinds, in three shards; ``records.json`` holds their fields as that code read them."""
    folder = GOLDEN / "set_0_1"
    expected = json.loads((folder / "records.json").read_text())
    records = list(TrajectoryShardReader(folder))
    assert len(records) == len(expected) == 12
    for record, fields in zip(records, expected, strict=True):
        assert record.digest().hex() == fields["digest"]
        for name in ("uid", "num_steps", "mask_id", "vocab_size", "seed", "status", "meta"):
            assert getattr(record, name) == fields[name], name
        for name in ("prompt_ids", "tokens", "commit_step", "given", "superseded"):
            value = getattr(record, name)
            assert (None if value is None else value.tolist()) == fields[name], name
        signals = {name: values.astype(float) for name, values in record.signals.items()}
        assert signals.keys() == fields["signals"].keys()
        for name, values in signals.items():
            np.testing.assert_array_equal(values, fields["signals"][name], err_msg=name)
        features, stored = record.features, fields["features"]
        assert (features is None) == (stored is None)
        if features is not None:
            assert features.dequantized().tolist() == stored["values"]
            assert features.kept_steps.tolist() == stored["kept_steps"]
            assert features.proposals.tolist() == stored["proposals"]
            assert (features.layout, features.scheme) == (stored["layout"], stored["scheme"])
            assert list(features.groups) == stored["groups"]
            assert features.projector_digest == stored["projector"]
    assert verify(shards_in(folder), level=2).problems == []


def test_what_only_version_0_1_could_write_is_refused_by_name():
    """Prompts as digests, a zstd dictionary, one scale per feature."""
    future = (GOLDEN / "future.trajb").read_bytes()
    with pytest.raises(UnsupportedFormatError, match="its prompts are withheld"):
        decode_block(future)
    packed = (GOLDEN / "dictionary.trajb").read_bytes()
    with pytest.raises(UnsupportedFormatError, match="is packed with a zstd dictionary"):
        decode_block(packed)
    records = decode_block((GOLDEN / "channel.trajb").read_bytes())
    with pytest.raises(UnsupportedFormatError, match="its scheme is int8_channel"):
        attach_features(records, (GOLDEN / "channel.featb").read_bytes())
