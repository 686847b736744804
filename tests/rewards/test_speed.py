"""The price of a forward as a constraint, by hand."""

import pytest

from lit_dlm.rewards.speed import PriceConstraint


def test_the_price_rises_while_every_window_holds() -> None:
    """0.80 - 0.02 = 0.78 still holds, 0.77 does not: 0.01 * 1.5 = 0.015, 0.015 / 1.5 = 0.01."""
    rule = PriceConstraint(margin=0.02, rate=0.5)
    start = {"a/accuracy": 0.8, "b/accuracy": 0.5}
    for a, b, before, after in (
        (0.78, 0.9, 0.01, 0.015),
        (0.77, 0.9, 0.015, 0.01),
        (0.9, 0.47, 0.03, 0.02),
    ):
        now = {"a/accuracy": a, "b/accuracy": b, "c/accuracy": 0.0}
        assert rule.next(before, start, now) == pytest.approx(after)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": -0.1}, r"^constraint\.margin: expected a number in \[0, 1\], got -0\.1$"),
        ({"rate": -1.0}, r"^constraint\.rate: expected a number in \[0, 1\], got -1\.0$"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PriceConstraint(**options)
