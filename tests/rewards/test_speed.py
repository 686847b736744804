"""The price of a forward as a constraint, by hand."""

import pytest

from lit_dlm.rewards.speed import PriceConstraint


def test_the_price_falls_while_a_window_is_below_its_start() -> None:
    """0.80 - 0.02 = 0.78 still holds, 0.77 does not; by 1.5, but not above 0.02."""
    rule = PriceConstraint(margin=0.02, rate=0.5)
    start = {"a/accuracy": 0.8, "b/accuracy": 0.5}
    for a, b, before, after in (
        (0.78, 0.9, 0.01, 0.015),
        (0.78, 0.9, 0.015, 0.02),
        (0.77, 0.9, 0.015, 0.01),
        (0.9, 0.47, 0.03, 0.02),
    ):
        now = {"a/accuracy": a, "b/accuracy": b, "c/accuracy": 0.0}
        assert rule.next(before, start, now, most=0.02) == pytest.approx(after)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": -0.1}, r"^constraint\.margin: expected a number in \[0, inf\), got -0\.1$"),
        ({"rate": -1.0}, r"^constraint\.rate: expected a number in \[0, inf\), got -1\.0$"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PriceConstraint(**options)
