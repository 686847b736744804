"""The price of a forward as a constraint, by hand."""

import pytest

from lit_dlm.rewards.speed import PriceConstraint


def test_the_price_falls_while_a_window_is_below_its_start() -> None:
    """0.80 - 0.02 = 0.78 still holds, 0.77 does not; it doubles, but not above 0.02."""
    rule = PriceConstraint(margin=0.02)
    start = {"a/accuracy": 0.8, "b/accuracy": 0.5}
    for a, b, before, after in (
        (0.78, 0.9, 0.005, 0.01),
        (0.78, 0.9, 0.015, 0.02),
        (0.77, 0.9, 0.015, 0.0075),
        (0.9, 0.47, 0.02, 0.01),
    ):
        now = {"a/accuracy": a, "b/accuracy": b, "c/accuracy": 0.0}
        assert rule.next(before, start, now, most=0.02) == pytest.approx(after)
    # A resumed run of other windows holds those that it has.
    assert rule.next(0.01, start, {"b/accuracy": 0.5, "c/accuracy": 0.0}, most=0.02) == 0.02


def test_a_margin_below_zero_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^constraint\.margin: expected a number in .*, got -0\.1$"
    ):
        PriceConstraint(margin=-0.1)
