import pytest
import torch
from torch import Tensor

import lit_dlm.decoding as d
from lit_dlm.decoding import Decoder, FillCurves, Region, RegionFill
from lit_dlm.decoding.region_fill import fill_curves
from tests.decoding.models import table_backbone
from tests.decoding.states import decoded, streamed
from tests.fakes import TableBackbone, logits_for

HALVES = d.FixedLayout(
    [Region(name="R", length=2, max_fill_frac=1.0), Region(name="A", length=2, max_fill_frac=1.0)]
)
SURE = Decoder(policy=d.ThresholdPolicy(0.9), quota=d.NoQuota(), layout=HALVES)


def followed(decoder: Decoder, rows: int = 1) -> RegionFill:
    """The surest cells are 0 and 3, then 1, then 2."""
    fill = RegionFill()
    backbone = table_backbone([5] * 4, [0.98, 0.8, 0.6, 0.97])
    decoded(decoder, backbone, [[4, 4]] * rows, 4, fill)
    return fill


def test_curves_follow_the_cells_of_each_region():
    """Cells {0, 3}, then 1, then 2. R: 0, 1/2, 1, 1. A: 0, 1/2, 1/2, 1. Gaps 0, 1/2, 0."""
    for curves in followed(SURE, rows=2).curves():
        assert curves.by_name() == {"R": [0.0, 0.5, 1.0, 1.0], "A": [0.0, 0.5, 0.5, 1.0]}
        assert curves.lockstep_score() == pytest.approx((1 + 0.5 + 1) / 3)


def test_any_policy_with_a_layout_has_curves_and_a_rest_only_where_cells_are_in_none():
    layout = d.FixedLayout([Region(name="A", length=2)])
    fill = followed(Decoder(policy=d.ConfidencePolicy(), layout=layout))
    (curves,) = fill.curves()
    assert curves.by_name() == {"A": [0.0, 0.5, 0.5, 1.0, 1.0], "rest": [0.0, 0.0, 0.5, 0.5, 1.0]}


def test_the_score_is_one_minus_the_largest_gap_averaged_over_the_steps():
    """States after the steps: gaps 0.6, 0.2 and 0, so (0.4 + 0.8 + 1) / 3. The release's value for
    one state with R at 60 % and A at none is the first of them."""
    share = torch.tensor([[0.0, 0.0], [0.6, 0.0], [0.8, 1.0], [1.0, 1.0]])
    three = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.25, 1.0]])
    tables = (share, three, share[:, :1], share[:1])
    scores = [FillCurves((), table).lockstep_score() for table in tables]
    assert scores == pytest.approx([(0.4 + 0.8 + 1.0) / 3, 0.25, 1.0, 1.0])


def test_cells_that_were_given_do_not_count():
    """Cell 0 stood there: R has one cell to fill."""
    masked = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]).bool()
    curves = fill_curves(masked, torch.tensor([0, 0, 1, 1]), ("R", "A", "rest"))
    assert curves.names == ("R", "A")
    assert curves.share.tolist() == [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]


def test_rows_that_are_replaced_have_the_curves_of_one_batch():
    """The number of the prompt's token decides how sure the model is, so rows take 1 to 4 steps."""

    def logits(ids: Tensor) -> Tensor:
        tables = [
            logits_for([4, 5, 5, 5, 5], [0.5, *([0.97] * int(row[-5]) + [0.3, 0.2, 0.4, 0.1])[:4]])
            for row in ids
        ]
        return torch.stack(tables)

    prompts = [[2], [3], [4], [2], [6], [3]]
    backbone, whole, fill, found = TableBackbone(logits, 8), RegionFill(), RegionFill(), {}
    decoded(SURE, backbone, prompts, 4, whole)
    for rows in streamed(SURE, backbone, prompts, 4, 2, fill):
        found.update(zip(rows.numbers, fill.curves(), strict=True))
    expected = whole.curves()
    assert {len(curves.share) for curves in expected} >= {2, 3, 4}
    for number, curves in enumerate(expected):
        assert found[number].by_name() == curves.by_name()
