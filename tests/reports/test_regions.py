import pytest

from lit_dlm.reports.regions import Region, regions_of
from tests.reports.sample_sets import record

TEN = [7] * 10
BLOCKS = {"window": {"name": "BlockWindow", "block_length": 4}}


def spans(regions: list[Region]) -> list[tuple[int, int]]:
    return [(region.start, region.end) for region in regions]


def test_blocks_come_from_the_window_and_the_last_one_is_cut():
    found = regions_of(record(TEN, range(10)), BLOCKS)
    assert spans(found) == [(0, 4), (4, 8), (8, 10)]
    assert found[0].name == "block 1"


def test_blocks_counted_from_the_sequence_begin_in_the_prompt():
    """Prompt of 3, blocks of 4: the first block holds prompt 0..2 and response 0."""
    window = {"window": {**BLOCKS["window"], "origin": "sequence"}}
    assert spans(regions_of(record(TEN, range(10)), window)) == [(0, 1), (1, 5), (5, 9), (9, 10)]


def test_regions_of_the_layout_and_of_the_record_come_first():
    half = {"name": "r", "tau": 0.9, "max_fill_frac": 0.4, "weight": 1.0, "fraction": 0.5}
    rest = {"name": "rest", "tau": 0.9, "max_fill_frac": 0.4, "weight": 1.0}
    layout = {
        "name": "FractionLayout",
        "regions": [half, {**half, "name": "a"}],
        "rest": rest,
    }
    method = {**BLOCKS, "layout": layout}
    found = regions_of(record(TEN, range(10)), method)
    assert found == [Region("r", 0, 5), Region("a", 5, 10)]
    named = record(TEN, range(10), meta={"regions": [["x", 2, 9]]})
    assert regions_of(named, method) == [Region("x", 2, 9)]


def test_without_any_there_are_none():
    assert regions_of(record(TEN, range(10))) == []
    assert regions_of(record(TEN, range(10)), {"window": {"name": "FullWindow"}}) == []


@pytest.mark.parametrize("bad", ["x", [["x", 2, 11]], [["x", 3, 3]], [[1, 2, 3]]])
def test_malformed_regions_are_refused(bad: object):
    with pytest.raises(ValueError, match=r"t/test/0@m.*\[name, first, end\] inside 0\.\.10"):
        regions_of(record(TEN, range(10), meta={"regions": bad}))
