from functools import partial

import pytest

from lit_dlm import decoding
from lit_dlm.decoding import Decoder, NoQuota, Region
from lit_dlm.trajectories.regions import fill_curves_of, regions_of
from lit_dlm.trajectories.tools.execution import free_running, teacher_forced
from tests.traces import MASK, VOCAB, recorded, small_backbone
from tests.trajectories.samples import small_record

TEMPLATE = decoding.TemplateLayout(
    [
        Region(name="R", length=4, marker=[9], tau=0.2, max_fill_frac=0.5),
        Region(name="A", marker=[10, 11], tau=0.2),
    ]
)
record = partial(small_record, uid="one", mask_id=MASK, vocab_size=VOCAB)


@pytest.mark.parametrize("cache", ["No", "Prefix", "Dual"])
def test_regions_and_their_curves_come_back_from_the_record(cache):
    """With markers, a cache and drawn tokens: the record alone brings the same decode."""
    decoder = Decoder(
        policy=decoding.ThresholdPolicy(0.2),
        quota=NoQuota(),
        sampler=decoding.Sampler(temperature=0.7),
        cache=getattr(decoding, f"{cache}Cache")(),
        layout=TEMPLATE,
    )
    backbone, fill = small_backbone(), decoding.RegionFill()
    records = recorded(backbone, 3, response_length=11, decoder=decoder, watching=[fill])
    for made, curves in zip(records, fill.curves(), strict=True):
        assert made.initial().tolist() == [9, *[MASK] * 4, 10, 11, *[MASK] * 4]
        assert made.tokens[[0, 5, 6]].tolist() == [9, 10, 11]
        placed = regions_of(made, decoder.describe())
        assert [(b.name, b.start, b.end) for b in placed.regions] == [("R", 1, 5), ("A", 7, 11)]
        assert fill_curves_of(made, placed).by_name() == curves.by_name()
    for execute in (teacher_forced, free_running):
        assert [v.outcome for v in execute(backbone, decoder, records)] == ["exact"] * 3


def test_markers_are_searched_in_what_stood_there_before_the_first_step():
    """Cell 1 got the marker's token from the model, cell 3 had it from the beginning."""
    given = [False, False, False, True, False, False]
    made = record([5, 9, 6, 9, 7, 8], [0, 0, 1, -1, 2, 1], given=given)
    placed = regions_of(made, decoding.MarkerLayout([Region(name="A", marker=[9])]))
    assert [(b.start, b.end) for b in placed.regions] == [(4, 6)]
    curves = fill_curves_of(made, placed)
    # A: cells 4 and 5, written in steps 2 and 1. The rest: cells 0, 1 and 2.
    assert curves.by_name() == {"A": [0, 0, 0.5, 1], "rest": [0, 0.667, 1, 1]}
    assert curves.lockstep_score() == pytest.approx((1 / 3 + 0.5 + 1) / 3)


def test_a_layout_may_be_absent_or_not_fit_and_its_weights_can_leave_a_region_out_of_a_loss():
    """Answer-only updates: the reasoning's tokens weigh nothing."""
    made = record([5, 6, 7], [0, 1, 2])
    assert regions_of(made, Decoder(policy=decoding.ConfidencePolicy()).describe()) is None
    with pytest.raises(ValueError, match="trajectory 'one': layout: the marker"):
        regions_of(made, decoding.MarkerLayout([Region(name="A", marker=[9])]))
    layout = decoding.FixedLayout([Region(name="R", length=2, weight=0.0), Region(name="A")])
    assert regions_of(made, layout).weights().tolist() == [0.0, 0.0, 1.0]
