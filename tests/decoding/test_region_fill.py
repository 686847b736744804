from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_dlm.decoding import (
    ConfidencePolicy,
    Decoder,
    FixedLayout,
    JacobiPolicy,
    NoQuota,
    Region,
    RegionFill,
    lockstep_score,
    prompt_canvas,
)
from lit_dlm.decoding.region_fill import fill_curves
from lit_dlm.decoding.stream import DecodePrompt, WorkQueue, decode_stream
from tests.fakes import TableBackbone, logits_for

HALVES = FixedLayout(
    [Region(name="R", length=2, max_fill_frac=1.0), Region(name="A", length=2, max_fill_frac=1.0)]
)


def decoded(decoder: Decoder, rows: int = 1) -> RegionFill:
    """The surest cells are 0 and 3, then 1, then 2."""
    table = logits_for([4, 5, 5, 5, 5], [0.5, 0.98, 0.8, 0.6, 0.97])
    backbone = TableBackbone(table)
    canvas = prompt_canvas([[4]] * rows, response_length=4, spec=backbone.spec, seeds=range(rows))
    fill = RegionFill()
    decoder(backbone, canvas, [fill])
    return fill


def test_curves_follow_the_cells_of_each_region():
    """Jacobi: {0, 3}, then 1, then 2. R: 0, 1/2, 1, 1. A: 0, 1/2, 1/2, 1. Gaps 0, 1/2, 0."""
    fill = decoded(Decoder(policy=JacobiPolicy(), quota=NoQuota(), layout=HALVES), rows=2)
    for curves in fill.curves():
        assert curves.by_name() == {"R": [0.0, 0.5, 1.0, 1.0], "A": [0.0, 0.5, 0.5, 1.0]}
        assert curves.lockstep_score() == pytest.approx((1 + 0.5 + 1) / 3)


def test_any_policy_with_a_layout_has_curves_and_a_rest_only_where_cells_are_in_none():
    layout = FixedLayout([Region(name="A", length=2)])
    fill = decoded(Decoder(policy=ConfidencePolicy(), layout=layout))
    assert fill.curves()[0].by_name() == {
        "A": [0.0, 0.5, 0.5, 1.0, 1.0],
        "rest": [0.0, 0.0, 0.5, 0.5, 1.0],
    }


def test_the_score_is_one_minus_the_largest_gap_averaged_over_the_steps():
    """States after the steps: gaps 0.6, 0.2 and 0, so (0.4 + 0.8 + 1) / 3. The release's value for
    one state with R at 60 % and A at none is the first of them."""
    share = torch.tensor([[0.0, 0.0], [0.6, 0.0], [0.8, 1.0], [1.0, 1.0]])
    assert lockstep_score(share) == pytest.approx((0.4 + 0.8 + 1.0) / 3)
    three = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.25, 1.0]])
    assert lockstep_score(three) == pytest.approx(0.25)
    assert lockstep_score(share[:, :1]) == 1.0
    assert lockstep_score(share[:1]) == 1.0


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

    decoder = Decoder(policy=JacobiPolicy(), quota=NoQuota(), layout=HALVES)
    prompts = [[2], [3], [4], [2], [6], [3]]
    whole, found = RegionFill(), {}
    backbone = TableBackbone(logits, 8)
    decoder(
        backbone,
        prompt_canvas(prompts, response_length=4, spec=backbone.spec, seeds=range(6)),
        [whole],
    )
    fill = RegionFill()
    for rows in decode_stream(
        backbone,
        decoder,
        WorkQueue(6),
        lambda number: DecodePrompt(str(number), prompts[number], number),
        response_length=4,
        batch_size=2,
        observers=[fill],
    ):
        found.update(zip(rows.numbers, fill.curves(), strict=True))
    expected = whole.curves()
    assert {len(curves.share) for curves in expected} >= {2, 3, 4}
    for number, curves in enumerate(expected):
        assert found[number].by_name() == curves.by_name()
