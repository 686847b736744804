"""What is stored of a value is within the bounds that the format promises."""

import numpy as np
import pytest

from lit_dlm.trajectories.features import StepFeatures


def _stored(values: np.ndarray, scheme: str, layout: str = "logits") -> np.ndarray:
    S, R, V = values.shape
    return StepFeatures.quantize(
        values,
        kept_steps=np.arange(S),
        proposals=np.zeros((S, R)),
        groups=(V,),
        scheme=scheme,  # type: ignore[arg-type]
        layout=layout,  # type: ignore[arg-type]
    ).dequantized()


@pytest.mark.parametrize("exponent", [-40, -26, -20, -12, -3, 0, 5, 13])
def test_no_value_is_off_by_more_than_its_bound(exponent):
    """From numbers below float16's smallest to its largest, with rows of a few orders each."""
    rng = np.random.default_rng(exponent + 40)
    spread = rng.normal(size=(3, 40, 257)) * np.exp2(rng.uniform(-4, 0, (3, 40, 257)))
    values = (np.clip(spread, -7, 7) * 2.0**exponent).astype(np.float32)
    values[0, 0] = 0.0
    exact = values.astype(np.float64)
    half = np.abs(_stored(values, "fp16") - exact)
    assert (half <= np.maximum(np.abs(exact) / 2048, 2.0**-25)).all()
    small = np.abs(_stored(values, "int8") - exact)
    absmax = np.abs(exact).max(-1, keepdims=True)
    assert (small <= absmax / 253 + 2.0**-25).all()
    if exponent > -12:  # the bounds are no wider than they must be
        assert (half > np.abs(exact) / 2200).any()
        assert (small > absmax / 258).any()


def test_half_precision_keeps_bfloat16_logits_exactly():
    """Eight bits of a bfloat16 fit into float16's eleven: down to 2**-17, whose last bit is 2**-24,
    float16's smallest number."""
    bits = np.arange(0x3700, 0x4780, dtype=np.uint32)[None, None]  # 2**-17 up to 65,280
    values = (bits << 16).view(np.float32)
    assert values.min() == 2.0**-17
    np.testing.assert_array_equal(_stored(values, "fp16"), values)
    np.testing.assert_array_equal(_stored(-values, "fp16"), -values)


@pytest.mark.parametrize("scheme", ["fp16", "int8"])
def test_forbidden_ids_stay_minus_infinity_and_cost_no_precision(scheme):
    values = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)
    plain = _stored(np.delete(values, [0, 7], axis=2), scheme)
    values[..., [0, 7]] = -np.inf
    stored = _stored(values, scheme)
    assert np.isneginf(stored[..., [0, 7]]).all()
    np.testing.assert_array_equal(np.delete(stored, [0, 7], axis=2), plain)
    for wrong in (np.inf, np.nan):
        with pytest.raises(ValueError, match=r"features: expected shape .* finite"):
            _stored(np.full((1, 1, 4), wrong, np.float32), scheme)
    with pytest.raises(ValueError, match=r"features: expected shape .* finite"):
        _stored(values, scheme, layout="generation")
