from functools import partial

import pytest

from lit_dlm import decoding, lockstep
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import Decoder, NoQuota, Region, decode, prompt_canvas
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.regions import fill_curves_of, regions_of
from lit_dlm.trajectories.tools.execution import free_running, teacher_forced
from tests.traces import MASK, VOCAB, small_backbone
from tests.trajectories.samples import small_record

TEMPLATE = decoding.TemplateLayout(
    [
        Region(name="R", length=4, marker=[9], tau=0.2, max_fill_frac=0.5),
        Region(name="A", marker=[10, 11], tau=0.2),
    ]
)
record = partial(small_record, uid="one", mask_id=MASK, vocab_size=VOCAB)
PROMPTS = [[5, 6, 7], [8], [12, 13, 14, 15]]


@pytest.fixture(scope="module")
def backbone():
    return small_backbone()


def decoded(backbone: HFBackbone, decoder: Decoder) -> tuple[list[Trajectory], decoding.RegionFill]:
    capture, fill = TrajectoryCapture(vocab_size=VOCAB), decoding.RegionFill()
    canvas = prompt_canvas(PROMPTS, response_length=11, spec=backbone.spec, seeds=[1, 2, 3])
    decode(backbone, decoder, canvas, [capture, fill])
    return capture.trajectories(["a", "b", "c"]), fill


@pytest.mark.parametrize("cache", ["No", "Prefix", "Dual"])
@pytest.mark.parametrize("policy", ["Jacobi", "GaussSeidel", "Lagged", "Bonus"])
def test_lockstep_decodes_are_recorded_replayed_and_executed_again(backbone, policy, cache):
    """With markers, a cache and drawn tokens: the record alone brings the same decode."""
    decoder = Decoder(
        policy=getattr(lockstep, f"{policy}Policy")(),
        quota=NoQuota(),
        sampler=decoding.Sampler(temperature=0.7),
        cache=getattr(decoding, f"{cache}Cache")(),
        layout=TEMPLATE,
    )
    records, fill = decoded(backbone, decoder)
    for made, curves in zip(records, fill.curves(), strict=True):
        assert made.initial().tolist() == [9, *[MASK] * 4, 10, 11, *[MASK] * 4]
        assert made.tokens[[0, 5, 6]].tolist() == [9, 10, 11]
        placed = regions_of(made, decoder.describe())
        assert [(b.name, b.start, b.end) for b in placed.regions] == [("R", 1, 5), ("A", 7, 11)]
        assert fill_curves_of(made, placed).by_name() == curves.by_name()
    for execute in (teacher_forced, free_running):
        assert [v.outcome for v in execute(backbone, decoder, records)] == ["exact"] * 3


def test_a_record_of_another_policy_does_not_pass_for_a_gauss_seidel_decode(backbone):
    own, other = (
        Decoder(policy=policy, quota=NoQuota(), layout=TEMPLATE)
        for policy in (lockstep.JacobiPolicy(), lockstep.GaussSeidelPolicy())
    )
    records, _ = decoded(backbone, own)
    assert {v.outcome for v in teacher_forced(backbone, other, records)} == {"failed"}


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
