from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lit_dlm.trajectories import StepFeatures, TrajectoryFormatError
from lit_dlm.trajectories.features import attach_features, encode_features, only_masked
from lit_dlm.trajectories.format import decode_block, encode_block
from tests.trajectories.samples import assert_same, random_features, random_record


def quantize(values: np.ndarray, **options) -> StepFeatures:
    S, R, _ = values.shape
    return StepFeatures.quantize(
        values, kept_steps=np.arange(S), proposals=np.zeros((S, R)), **options
    )


def test_int8_keeps_gaussian_features_within_one_percent():
    """Per group of 256 the largest of 256 normal values is about 2.9, so a level is 2.9 / 127 and
    the error 2.9 / 127 / sqrt(12) = 0.7 % of the standard deviation."""
    rng = np.random.default_rng(0)
    sizes = [256, 256, 256, 32, 32, 1]
    spread = np.repeat([1.0, 30.0, 0.01, 5.0, 1e-3, 9.0], sizes)
    values = (rng.normal(size=(3, 20, sum(sizes))) * spread).astype(np.float32)
    restored = quantize(values, groups=sizes).dequantized()
    start = 0
    for size in sizes:
        part = np.s_[..., start : start + size]
        error = np.sqrt(((restored[part] - values[part]) ** 2).mean() / (values[part] ** 2).mean())
        assert error < 0.01, size
        start += size


def test_int8_codes_are_exact_on_their_own_grid():
    """absmax 127 gives scale 1, so whole numbers come back exactly."""
    values = np.array([[[127.0, -64.0, 1.0, 0.0]]], dtype=np.float32)
    stored = quantize(values)
    assert stored.scales is not None
    assert stored.scales.tolist() == [[[1.0]]]
    assert stored.features.tolist() == [[[127, -64, 1, 0]]]
    np.testing.assert_array_equal(stored.dequantized(), values)


def test_scales_never_clip_and_zero_rows_stay_zero():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(4, 50, 8)).astype(np.float32) * 10.0 ** rng.uniform(-3, 3, (4, 50, 1))
    values = values.astype(np.float32)
    values[0, 0] = 0.0
    stored = quantize(values, groups=(4, 4))
    assert np.abs(stored.features.astype(int)).max() <= 127
    assert stored.scales is not None
    half_step = np.repeat(stored.scales.astype(np.float32), 4, axis=2) * 0.5001
    assert (np.abs(stored.dequantized() - values) <= half_step).all()
    assert not stored.dequantized()[0, 0].any()


def test_fp16_scheme_rounds_to_half_precision():
    values = np.random.default_rng(2).normal(size=(2, 3, 5)).astype(np.float32)
    stored = quantize(values, scheme="fp16")
    assert stored.scheme == "fp16"
    np.testing.assert_array_equal(stored.dequantized(), values.astype(np.float16))


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (np.full((1, 1, 2), np.nan), {}, "finite"),
        (np.full((1, 1, 2), 1e6), {"scheme": "fp16"}, "at most"),
        (np.zeros((1, 1, 2)), {"groups": (1, 2)}, "sum to 2"),
    ],
)
def test_quantize_refuses_what_it_cannot_hold(values, options, message):
    with pytest.raises(ValueError, match=message):
        quantize(values, **options)


@pytest.mark.parametrize("scheme", ["int8", "fp16"])
def test_features_block_round_trip(scheme):
    rng = np.random.default_rng(3)
    records = [random_record(rng, f"u{i}", num_generated=4 + i) for i in range(5)]
    for i, record in enumerate(records):
        if i != 2:  # one record without features in between
            features = random_features(rng, record.num_generated, record.num_steps, scheme=scheme)
            object.__setattr__(record, "features", features)
    block, features_block = encode_block(records), encode_features(records)
    restored = attach_features(decode_block(block), features_block)
    for before, after in zip(records, restored, strict=True):
        assert_same(before, after)


def test_features_do_not_join_other_records():
    rng = np.random.default_rng(4)
    records = [random_record(rng, f"u{i}", features=True) for i in range(2)]
    features_block = encode_features(records)
    others = [random_record(rng, f"u{i}") for i in range(2)]
    with pytest.raises(TrajectoryFormatError, match="its record 0 is not 'u0'"):
        attach_features(others, features_block)
    with pytest.raises(TrajectoryFormatError, match="2 records"):
        attach_features(records[:1], features_block)


def test_every_bit_of_a_features_block_is_covered():
    rng = np.random.default_rng(5)
    records = [random_record(rng, f"u{i}", features=True) for i in range(2)]
    plain = decode_block(encode_block(records))
    data = encode_features(records)
    for bit in rng.integers(0, 8 * len(data), 300):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(TrajectoryFormatError):
            attach_features(plain, bytes(damaged))
    for length in range(0, len(data), 7):
        with pytest.raises(TrajectoryFormatError):
            attach_features(plain, data[:length])


def test_features_must_share_a_layout_within_a_block():
    rng = np.random.default_rng(6)
    records = [random_record(rng, f"u{i}", features=True) for i in range(2)]
    assert records[1].features is not None
    object.__setattr__(records[1].features, "projector_digest", "another")
    with pytest.raises(ValueError, match=r"'u1'.*one layout"):
        encode_features(records)


@pytest.mark.parametrize("scheme", ["int8", "fp16"])
def test_only_masked_rows_are_stored_and_come_back(scheme):
    """Re-masking included: which rows are masked is read off the record, not stored. About half of
    the rows of a decode are masked, so the block shrinks."""
    rng = np.random.default_rng(7)
    records, whole = [], []
    for i in range(4):
        record = random_record(rng, f"u{i}", num_generated=16 + i, num_steps=9, remask=0.05)
        features = random_features(rng, 16 + i, 9, scheme=scheme)
        whole.append(replace(record, features=features))
        if i != 1:  # one record without features in between
            record = replace(record, features=only_masked(record, features))
        records.append(record)
    data = encode_features(records)
    assert len(data) < 0.75 * len(encode_features(whole))
    restored = attach_features(decode_block(encode_block(records)), data)
    for before, after, full in zip(records, restored, whole, strict=True):
        assert_same(before, after)
        if before.features is None:
            continue
        assert (after.features.layout, after.features.scheme) == ("masked", scheme)
        states = np.stack([before.state_at(int(t)) for t in after.features.kept_steps])
        masked = states == before.mask_id
        values = after.features.dequantized()
        np.testing.assert_array_equal(values[masked], full.features.dequantized()[masked])
        assert not values[~masked].any()
        np.testing.assert_array_equal(
            after.features.proposals, np.where(masked, full.features.proposals, states)
        )


def test_features_outside_masks_are_refused_in_layout_masked():
    rng = np.random.default_rng(8)
    record = random_record(rng, "a", features=True)
    wrong = replace(record, features=replace(record.features, layout="masked"))
    with pytest.raises(ValueError, match="'a': features in layout 'masked' must be 0"):
        encode_features([wrong])
    with pytest.raises(ValueError, match="expected features in layout 'generation', got 'masked'"):
        only_masked(wrong, wrong.features)
