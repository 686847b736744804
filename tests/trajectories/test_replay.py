from __future__ import annotations

import numpy as np
import pytest
import torch

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import (
    BonusPolicy,
    CacheScheme,
    ConfidencePolicy,
    Decoder,
    DualCache,
    FixedLayout,
    GaussSeidelPolicy,
    JacobiPolicy,
    LaggedPolicy,
    MarkerLayout,
    NoCache,
    NoQuota,
    PrefixCache,
    Region,
    RegionFill,
    Sampler,
    TemplateLayout,
    prompt_canvas,
)
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.replay import fill_curves_of, regions_of, states_at
from lit_dlm.trajectories.verify import free_running, teacher_forced
from tests.traces import MASK, VOCAB, small_backbone
from tests.trajectories.samples import from_history, random_history

TEMPLATE = TemplateLayout(
    [
        Region(name="R", length=4, marker=[9], tau=0.2, max_fill_frac=0.5),
        Region(name="A", marker=[10, 11], tau=0.2),
    ]
)
PROMPTS = [[5, 6, 7], [8], [12, 13, 14, 15]]


@pytest.fixture(scope="module")
def backbone() -> HFBackbone:
    return small_backbone()


def decoded(backbone: HFBackbone, decoder: Decoder) -> tuple[list[Trajectory], RegionFill]:
    capture, fill = TrajectoryCapture(vocab_size=VOCAB), RegionFill()
    canvas = prompt_canvas(PROMPTS, response_length=11, spec=backbone.spec, seeds=[1, 2, 3])
    decoder(backbone, canvas, [capture, fill])
    return capture.trajectories(["a", "b", "c"]), fill


@pytest.mark.parametrize("cache", [NoCache(), PrefixCache(), DualCache()], ids=["no", "pre", "du"])
@pytest.mark.parametrize(
    "policy",
    [JacobiPolicy(), GaussSeidelPolicy(), LaggedPolicy(), BonusPolicy()],
    ids=lambda policy: type(policy).__name__,
)
def test_lockstep_decodes_are_recorded_replayed_and_executed_again(
    backbone: HFBackbone, policy, cache: CacheScheme
):
    """With markers, a cache and drawn tokens: the record alone brings the same decode."""
    decoder = Decoder(
        policy=policy,
        quota=NoQuota(),
        sampler=Sampler(temperature=0.7),
        cache=cache,
        layout=TEMPLATE,
    )
    records, fill = decoded(backbone, decoder)
    for record, curves in zip(records, fill.curves(), strict=True):
        assert record.initial().tolist() == [9, *[MASK] * 4, 10, 11, *[MASK] * 4]
        assert record.tokens[[0, 5, 6]].tolist() == [9, 10, 11]
        blocks = regions_of(record, decoder.describe())
        assert blocks is not None
        assert [(b.name, b.start, b.end) for b in blocks.blocks] == [("R", 1, 5), ("A", 7, 11)]
        assert fill_curves_of(record, blocks).by_name() == curves.by_name()
    for verdicts in (
        teacher_forced(backbone, decoder, records),
        free_running(backbone, decoder, records),
    ):
        assert [verdict.outcome for verdict in verdicts] == ["exact"] * 3


def test_a_record_of_another_policy_does_not_pass_for_a_gauss_seidel_decode(backbone: HFBackbone):
    records, _ = decoded(backbone, Decoder(policy=JacobiPolicy(), quota=NoQuota(), layout=TEMPLATE))
    other = Decoder(policy=GaussSeidelPolicy(), quota=NoQuota(), layout=TEMPLATE)
    assert {v.outcome for v in teacher_forced(backbone, other, records)} == {"failed"}


def record(tokens: list[int], commit_step: list[int], num_steps: int) -> Trajectory:
    commit = np.array(commit_step, dtype=np.int32)
    return Trajectory(
        uid="one",
        prompt_ids=np.array([4]),
        tokens=np.array(tokens, dtype=np.int32),
        commit_step=commit,
        num_steps=num_steps,
        mask_id=MASK,
        vocab_size=VOCAB,
        given=commit < 0,
    )


def test_markers_are_searched_in_what_stood_there_before_the_first_step():
    """Cell 1 got the marker's token from the model, cell 3 had it from the beginning."""
    made = record([5, 9, 6, 9, 7, 8], [0, 0, 1, -1, 2, 1], num_steps=3)
    layout = MarkerLayout([Region(name="A", marker=[9])])
    blocks = regions_of(made, layout)
    assert blocks is not None
    assert [(b.start, b.end) for b in blocks.blocks] == [(4, 6)]
    curves = fill_curves_of(made, blocks)
    # A: cells 4 and 5, written in steps 2 and 1. The rest: cells 0, 1 and 2.
    assert curves.by_name() == {"A": [0, 0, 0.5, 1], "rest": [0, 0.667, 1, 1]}
    assert curves.lockstep_score() == pytest.approx((1 / 3 + 0.5 + 1) / 3)


def test_a_batch_holds_every_record_and_its_last_canvas_once_it_has_ended() -> None:
    rng = np.random.default_rng(11)
    histories = [
        random_history(rng, num_generated=12, num_steps=steps, remask=0.3) for steps in (3, 7, 5)
    ]
    records = [
        from_history(history, uid="a", prompt_ids=[1], mask_id=9, vocab_size=50)
        for history in histories
    ]
    for step in range(8):
        states = states_at(records, step)
        assert states.dtype == torch.int64
        for state, history in zip(states, histories, strict=True):
            assert state.tolist() == history[min(step, len(history) - 1)].tolist()


def test_a_decoder_without_a_layout_has_no_regions_and_a_layout_that_does_not_fit_is_named():
    made = record([5, 6], [0, 1], num_steps=2)
    assert regions_of(made, Decoder(policy=ConfidencePolicy()).describe()) is None
    with pytest.raises(ValueError, match="trajectory 'one': layout: the marker"):
        regions_of(made, MarkerLayout([Region(name="A", marker=[9])]))


def test_weights_of_a_layout_can_leave_a_region_out_of_a_loss():
    """Answer-only updates: the reasoning's tokens weigh nothing."""
    layout = FixedLayout([Region(name="R", length=2, weight=0.0), Region(name="A")])
    blocks = regions_of(record([5, 6, 7], [0, 1, 2], num_steps=3), layout)
    assert blocks is not None
    assert torch.equal(blocks.weights(), torch.tensor([0.0, 0.0, 1.0]))
