from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.decoding import ConfidencePolicy, Decoder, FixedLayout, FractionLayout, Region
from lit_dlm.decoding.api import text_cells
from lit_dlm.decoding.decoder import with_option
from tests.decoding.models import table_backbone
from tests.decoding.states import decoded
from tests.fakes import EOS, MASK, fake_spec

OPEN, CLOSE = 7, 8
"""Marker tokens of the tests."""


def canvas(*responses: list[int], prompt: tuple[int, ...] = (4, 4)) -> d.Canvas:
    """Rows with given responses: 0 is a mask, everything else stands there and may not change."""
    rows, length = len(responses), len(responses[0])
    made = d.prompt_canvas(
        [prompt] * rows, response_length=length, spec=fake_spec(), seeds=range(rows)
    )
    ids = torch.cat([made.ids[:, : made.start], torch.tensor(responses)], 1)
    return replace(made, ids=ids, editable=made.editable & (ids == MASK))


def spans(layout: d.PlacedRegions) -> list[tuple[str, int, int]]:
    return [(block.name, block.start, block.end) for block in layout.regions]


def regions_on(layout: d.Layout, on: d.Canvas) -> list[list[int]]:
    """Region numbers of the response cells."""
    found = layout.on(on, mask_id=MASK).regions
    assert found is not None
    return found.ids[:, on.start :].tolist()


def test_token_counts_are_taken_in_order_and_what_is_left_is_in_no_region():
    layout = FixedLayout([Region(name="R", length=3), Region(name="A", length=2)])
    assert spans(layout.placed(torch.zeros(8))) == [("R", 0, 3), ("A", 3, 5)]
    # Cells behind them are in no region: they have the number behind the last one.
    assert regions_on(layout, canvas([0] * 8)) == [[0, 0, 0, 1, 1, 2, 2, 2]]
    half = FractionLayout([Region(name="R", fraction=0.5)])
    assert regions_on(half, canvas([0] * 4)) == [[0, 0, 1, 1]]
    # Prompt columns are in none either.
    regions = layout.on(canvas([0] * 6), mask_id=MASK).regions
    assert regions is not None
    assert regions.counts(torch.ones(1, 8, dtype=torch.bool)).tolist() == [[3, 2, 3]]


@pytest.mark.parametrize(
    ("length", "borders"), [(256, (192, 256)), (8, (6, 8)), (10, (8, 10)), (5, (4, 5))]
)
def test_fractions_are_rounded_to_cells_and_fill_the_response(length, borders):
    """0.75 of 10 is 7.5, rounded up to 8; 0.75 of 5 is 3.75."""
    layout = FractionLayout([Region(name="R", fraction=0.75), Region(name="A", fraction=0.25)])
    assert spans(layout.placed(torch.zeros(length))) == [
        ("R", 0, borders[0]),
        ("A", borders[0], borders[1]),
    ]


def test_a_template_stands_on_the_canvas_and_is_never_changed():
    """The model is surest of 5 everywhere, also where the markers stand."""
    layout = d.TemplateLayout(
        [Region(name="R", length=2, marker=[OPEN]), Region(name="A", marker=[CLOSE, OPEN])]
    )
    start = canvas([MASK] * 7)
    prepared = layout.on(start, mask_id=MASK)
    assert prepared.ids[0, 2:].tolist() == [OPEN, MASK, MASK, CLOSE, OPEN, MASK, MASK]
    assert prepared.editable[0, 2:].tolist() == [False, True, True, False, False, True, True]
    assert regions_on(layout, start) == [[2, 0, 0, 2, 2, 1, 1]]
    assert start.ids[0, 2:].tolist() == [MASK] * 7  # the canvas that was given stays as it is
    again = layout.on(prepared, mask_id=MASK)
    assert torch.equal(again.ids, prepared.ids)
    backbone = table_backbone([5] * 7, [0.99] * 7)
    for policy, quota in ((d.ThresholdPolicy(0.9), d.NoQuota()), (ConfidencePolicy(), None)):
        result = d.decode(backbone, Decoder(policy=policy, quota=quota, layout=layout), start)
        assert result.ids[0, 2:].tolist() == [OPEN, 5, 5, CLOSE, OPEN, 5, 5]
        assert result.status == ["complete"]


MARKED = d.MarkerLayout([Region(name="R", marker=[OPEN, OPEN]), Region(name="A", marker=[CLOSE])])


def test_markers_are_found_row_by_row_and_do_not_belong_to_their_regions():
    rows = canvas([OPEN, OPEN, 0, 0, CLOSE, 0, 0, 0], [0, OPEN, OPEN, 0, 0, 0, CLOSE, 0])
    assert regions_on(MARKED, rows) == [[2, 2, 0, 0, 2, 1, 1, 1], [2, 2, 2, 0, 0, 0, 2, 1]]
    assert spans(MARKED.placed(rows.ids[0, 2:])) == [("R", 2, 4), ("A", 5, 8)]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ([0, OPEN, 0, CLOSE, 0, 0], r"marker \[7, 7\] of region 'R' must .* got 0 times"),
        ([OPEN, OPEN, 0, 0, 0, 0], r"marker \[8\] of region 'A' must .* got 0 times"),
        ([OPEN, OPEN, 0, CLOSE, 0, CLOSE], r"region 'A' must .* once, got 2 times"),
        ([0, CLOSE, 0, OPEN, OPEN, 0], "'R'"),
        ([OPEN, OPEN, CLOSE, 0, 0, 0], "'R': .* got 2 to 1"),
        ([OPEN, OPEN, 0, 0, 0, CLOSE], "'A'"),
        ([OPEN], "got 0 times"),
    ],
)
def test_a_canvas_without_the_right_markers_is_refused_with_its_row(response, message):
    good = [OPEN, OPEN, 0, CLOSE, 0, 0][: len(response)]
    rows = [good, response] if len(response) > 1 else [response]
    with pytest.raises(ValueError, match=f"layout: row {len(rows) - 1}: .*{message}"):
        MARKED.on(canvas(*rows), mask_id=MASK)


def test_what_stands_elsewhere_is_no_place_for_a_region():
    """In the release markers of the prompt began empty regions."""
    rows = canvas([0] * 4, prompt=(OPEN, OPEN, CLOSE))
    with pytest.raises(ValueError, match=r"row 0: .* must stand in the response once, got 0 times"):
        MARKED.on(rows, mask_id=MASK)
    template = d.TemplateLayout([Region(name="R", length=1), Region(name="A", marker=[CLOSE])])
    with pytest.raises(ValueError, match="row 1: other tokens stand in the cells 1 to 1"):
        template.on(canvas([0, CLOSE, 0], [0, 5, 0]), mask_id=MASK)


R = {"name": "R"}
MORE_THAN_ALL = [Region(**R, fraction=0.8), Region(name="A", fraction=0.3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLayout([]), r"different names, got \[\]"),
        (lambda: FixedLayout([Region(length=1)]), "different names"),
        (lambda: FixedLayout([Region(**R, length=1), Region(**R)]), "different names"),
        (lambda: FixedLayout([Region(name="rest")]), "different names"),
        (lambda: FixedLayout([Region(**R), Region(name="A")]), "'R': FixedLayout expects length"),
        (lambda: FixedLayout([Region(**R, fraction=0.5)]), "expects length, got fraction"),
        (lambda: FixedLayout([Region(**R, length=9)]).placed(torch.zeros(8)), "'R': .* got 0 to 8"),
        (
            lambda: FixedLayout([Region(**R, length=8), Region(name="A")]).placed(torch.zeros(8)),
            "'A'",
        ),
        (lambda: FractionLayout(MORE_THAN_ALL).placed(torch.zeros(10)), "'A'"),
        (lambda: FractionLayout([Region(**R)]), "expects fraction, got neither"),
        (lambda: FractionLayout([Region(**R, fraction=0.01)]).placed(torch.zeros(8)), "'R'"),
        (lambda: d.MarkerLayout([Region(**R)]), "expects marker"),
        (lambda: Region(**R, tau=1.5), "'R': tau"),
        (lambda: Region(**R, max_fill_frac=0.0), "max_fill_frac"),
        (lambda: Region(**R, length=0), "length"),
        (lambda: Region(**R, fraction=0.0), "fraction"),
        (lambda: Region(**R, weight=-1.0), "weight"),
        (lambda: Region(**R, marker=[]), "marker"),
    ],
)
def test_bad_layouts_are_refused_in_one_line(make: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=f"^layout: .*{message}"):
        make()


def test_weights_follow_the_regions():
    regions = (
        d.PlacedRegion(name="R", start=0, end=2, weight=0.0),
        d.PlacedRegion(name="A", start=3, end=4),
    )
    layout = d.PlacedRegions(regions=regions, length=5)
    assert layout.weights().tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert layout.weights(rest=0.5).tolist() == [0.0, 0.0, 0.5, 1.0, 0.5]


def test_a_layout_changes_nothing_for_a_policy_that_does_not_read_it():
    backbone = table_backbone([5, 6, 7, 5], [0.6, 0.9, 0.7, 0.8])
    layout = FixedLayout([Region(name="R", length=2), Region(name="A")])
    components = {"policy": ConfidencePolicy(), "window": d.BlockWindow(2)}
    one, two = (
        decoded(Decoder(**components, layout=used), backbone, [[4, 4]], 4)
        for used in (None, layout)
    )
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.num_steps, two.num_steps)


def test_markers_of_text_are_encoded_once_and_refused_without_a_tokenizer():
    layout = d.MarkerLayout({"R": Region(marker="ab"), "A": Region(marker=[CLOSE])})
    decoder = Decoder(policy=ConfidencePolicy(), layout=layout)
    encoded = decoder.encoded(lambda text: [ord(letter) for letter in text])
    for one in (encoded, encoded.encoded(lambda text: [])):
        regions = one.describe()["layout"]["regions"]
        assert [region["marker"] for region in regions] == [[97, 98], [CLOSE]]
    with pytest.raises(ValueError, match="'R': marker: expected token ids, got the text 'ab'"):
        layout.placed(torch.tensor([1, 2, 3]))


# -- where a text ends ----------------------------------------------------------------------------

SPLIT = d.TemplateLayout([Region(name="R", length=2), Region(name="A", marker=[7])])


def test_a_text_ends_before_its_first_end_and_given_cells_begin_a_part_of_their_own():
    """The marker stands in cell 3; a given end of text ends nothing."""
    response = torch.tensor([[5, 6, EOS, 7], [5, 6, 7, 8], [EOS, 5, EOS, 5]])
    found = text_cells(response, [EOS], torch.zeros_like(response, dtype=torch.bool))
    assert found.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    response = torch.tensor([[5, EOS, 6, 7, 8, EOS, 9], [5, 6, 6, EOS, 8, 9, EOS]])
    found = text_cells(response, [EOS], (torch.arange(7) == 3).expand(2, -1))
    assert found.int().tolist() == [[1, 0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]]


def test_the_answer_behind_a_marker_is_kept_when_the_reasoning_ends_early():
    backbone = table_backbone([5, EOS, 7, 6, EOS], [0.9] * 5)
    result = decoded(Decoder(policy=ConfidencePolicy(), layout=SPLIT), backbone, [[4, 4]], 5)
    assert result.prefilled.int().tolist() == [[1, 1, 0, 0, 1, 0, 0]]
    cells = text_cells(result.ids[:, 2:], [EOS], result.prefilled[:, 2:])
    assert result.ids[:, 2:][cells].tolist() == [5, 7, 6]
    result = decoded(Decoder(policy=ConfidencePolicy()), backbone, [[4, 4]], 5)
    assert not result.prefilled[:, 2:].any()


def test_an_end_of_text_may_not_fill_the_regions_behind_a_marker():
    message = "eos_rule: expected 'none' with TemplateLayout, where an"
    with pytest.raises(ValueError, match=message):
        Decoder(policy=ConfidencePolicy(), layout=SPLIT, settings=d.DecodeSettings(eos_rule="fill"))
    split = Decoder(policy=ConfidencePolicy(), layout=SPLIT)
    with pytest.raises(ValueError, match=message):
        with_option(split, "settings.eos_rule", "fill")
