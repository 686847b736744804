import pytest

from lit_dlm.reports.parts import parts_of
from tests.reports.sample_sets import record

TEN = [7] * 10
WINDOW = {"name": "BlockWindow", "block_length": 4}
HALF = {"name": "r", "tau": 0.9, "max_fill_frac": 0.4, "weight": 1.0, "fraction": 0.5}
REST = {"name": "rest", "tau": 0.9, "max_fill_frac": 0.4, "weight": 1.0}
LAYOUT = {"name": "FractionLayout", "regions": [HALF, {**HALF, "name": "a"}], "rest": REST}


@pytest.mark.parametrize(
    ("method", "meta", "expected"),
    [
        (None, {}, []),
        ({"window": {"name": "FullWindow"}}, {}, []),
        ({"window": WINDOW}, {}, [("block 1", 0, 4), ("block 2", 4, 8), ("block 3", 8, 10)]),
        # Prompt of 3, blocks of 4: the first block holds prompt 0..2 and response 0.
        ({"window": {**WINDOW, "origin": "sequence"}}, {},
         [("block 1", 0, 1), ("block 2", 1, 5), ("block 3", 5, 9), ("block 4", 9, 10)]),
        ({"window": WINDOW, "layout": LAYOUT}, {}, [("r", 0, 5), ("a", 5, 10)]),
        ({"window": WINDOW, "layout": LAYOUT}, {"regions": [["x", 2, 9]]}, [("x", 2, 9)]),
    ],
)  # fmt: skip
def test_named_regions_win_over_the_layout_and_that_over_blocks(method, meta, expected):
    assert parts_of(record(TEN, range(10), meta=meta), method) == expected


@pytest.mark.parametrize("bad", ["x", [["x", 2, 11]], [["x", 3, 3]], [[1, 2]]])
def test_malformed_regions_are_refused(bad: object):
    with pytest.raises(ValueError, match=r"t/test/0@m.*'regions'"):
        parts_of(record(TEN, range(10), meta={"regions": bad}))
