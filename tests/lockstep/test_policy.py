import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lit_dlm.decoding as d
from lit_dlm.decoding import FixedLayout, Region
from lit_dlm.decoding.description import decoder_from_description
from lit_dlm.decoding.regions import RegionMap
from lit_dlm.lockstep import BonusPolicy, GaussSeidelPolicy, JacobiPolicy, LaggedPolicy
from lit_dlm.lockstep.policy import LockstepPolicy
from lit_dlm.trajectories.tools.execution import free_running, teacher_forced
from tests.decoding.models import hashed
from tests.decoding.states import Recorder, as_rows_alone, decoded, state_with_masks, streamed
from tests.fakes import MASK, TableBackbone, logits_for
from tests.traces import recorded, small_backbone

EXAMPLE = [0.95, 0.91, 0.5, 0.3, 0.915, 0.90, 0.5, 0.3]
"""The worked example of the release: R is cells 0 to 3, A is cells 4 to 7."""


def halves(length: int = 4, *, tau_a: float = 0.92, cap: float = 1.0) -> FixedLayout:
    reason = Region(name="R", length=length, tau=0.9, max_fill_frac=cap)
    return FixedLayout([reason, Region(name="A", tau=tau_a, max_fill_frac=cap)])


def state_of(masks: list[list[int]], layout: FixedLayout, **changes: object) -> d.DecodeState:
    state = state_with_masks(masks)
    ids = torch.full_like(state.ids, len(layout.regions))
    ids[:, state.start :] = layout.placed(ids[0, state.start :]).region_ids()
    regions = RegionMap.of(ids, (*layout.regions, layout.rest))
    return replace(state, regions=regions, **changes)


def commits(policy: LockstepPolicy, state: d.DecodeState, *prob: list[float], quota=None):
    """Response cells that every row commits."""
    values = torch.tensor([[0.0, 0.0, *row] for row in prob])
    proposal = d.Proposal(ids=torch.full_like(state.ids, 6), prob=values)
    counts = None if quota is None else torch.tensor(quota)
    commit = policy.select(state, state.masked, proposal, counts).commit
    return [(row.nonzero()[:, 0] - state.start).tolist() for row in commit]


# -- one pass on tables of probabilities --------------------------------------------------------

WHOLE = state_of([[1] * 8], halves())
TWO_ROWS = state_of([[1] * 8] * 2, halves())
EQUAL = state_of([[1] * 8], halves(tau_a=0.9))
BOTH = [EXAMPLE, [0.1, 0.1, 0.1, 0.1, *EXAMPLE[4:]]]
SURE = [0.95, 0.97, 0.96, 0.99, 0.91, 0.93, 0.92, 0.5]
ANSWER = [0.1] * 4 + EXAMPLE[4:]
ONE = [Region(name="A", length=2, tau=0.5, max_fill_frac=1.0)]
OUTSIDE = Region(name="rest", tau=0.95, max_fill_frac=1.0)
REST = state_of([[1] * 6], FixedLayout(ONE, rest=OUTSIDE))


@pytest.mark.parametrize(
    ("policy", "state", "prob", "expected"),
    [
        # R needs 0.90: 0.95 and 0.91 do. A needs 0.92: 0.915 does not.
        (JacobiPolicy(), WHOLE, [EXAMPLE], [[0, 1]]),
        # One threshold can stand in for those of the layout.
        (JacobiPolicy(tau=0.5), WHOLE, [EXAMPLE], [[0, 1, 2, 4, 5, 6]]),
        (JacobiPolicy(tau=1.0), WHOLE, [EXAMPLE], [[]]),
        # The release's worked example: R commits two of eight cells, bonus 0.1 * 2/8 = 0.025.
        # 0.915 + 0.025 = 0.940 and 0.90 + 0.025 = 0.925 reach 0.92, 0.5 does not.
        (BonusPolicy(), WHOLE, [EXAMPLE], [[0, 1, 4, 5]]),
        # Row 1 commits no cell in R: a row's own share gives it no bonus. Over the batch it is 2 of
        # 20 columns (two of each row are prompt), bonus 0.01 for both: 0.915 passes (0.925), 0.90
        # does not (0.910).
        (BonusPolicy(), TWO_ROWS, BOTH, [[0, 1, 4, 5], []]),
        (BonusPolicy(batch_wide=True), TWO_ROWS, BOTH, [[0, 1, 4], [4]]),
        # Cap floor(0.4 * 4) = 1 in each region of each row; equal rows get equal commits (in the
        # release row 0 took all). With three masks left floor(1.2) = 1, with one max(1, 0) = 1.
        (
            JacobiPolicy(),
            state_of([[1] * 8, [1] * 8, [1, 1, 1, 0, 0, 0, 1, 1]], halves(tau_a=0.9, cap=0.4)),
            [SURE] * 3,
            [[3, 5], [3, 5], [1, 6]],
        ),
        # Cells outside all regions follow the rules of the rest.
        (JacobiPolicy(), REST, [[0.6, 0.4, 0.96, 0.9, 0.9, 0.97]], [[0, 2, 5]]),
        # Nothing of R reaches 0.9, so the sweep needs no forward for it, but the turn is R's.
        (GaussSeidelPolicy(), EQUAL, [ANSWER], [[4, 5]]),
        (LaggedPolicy(), EQUAL, [ANSWER], [[]]),
    ],
)
def test_what_one_pass_commits(policy, state, prob, expected):
    assert commits(policy, state, *prob) == expected


@pytest.mark.parametrize(
    ("policy", "quota", "cells"),
    [
        (JacobiPolicy(), 3, [0, 1, 4]),
        (GaussSeidelPolicy(), 3, [0, 1, 4]),
        (GaussSeidelPolicy(), 5, [0, 1, 2, 4, 5]),
        (JacobiPolicy(), 1, [0, 1]),
        (JacobiPolicy(), 9, [*range(8)]),
    ],
)
def test_more_commits_are_taken_when_a_budget_asks_for_them(policy, quota, cells):
    """Both commit {0, 1} anyway. 4 (0.915) is the row's next, then 5 (0.90), then 2 (0.5)."""
    assert commits(policy, WHOLE, EXAMPLE, quota=[quota]) == [cells]


def test_gauss_seidel_goes_on_behind_the_region_that_was_written_last():
    state = state_of([[1] * 8] * 3, halves(tau_a=0.9))
    written = torch.zeros_like(state.masked)
    written[1, 2], written[2, 7] = True, True  # row 1 wrote in R, row 2 in A
    state = replace(state, written=written)
    assert commits(GaussSeidelPolicy(), state, *[EXAMPLE] * 3) == [[0, 1], [4, 5], [0, 1]]


def test_lagged_takes_turns_by_the_step_among_regions_with_masks():
    for step, cells in enumerate([[0, 1], [4, 5], [0, 1], [4, 5]]):
        assert commits(LaggedPolicy(), replace(EQUAL, step=step), EXAMPLE) == [cells]
    full_r = state_of([[0] * 4 + [1] * 4], halves(tau_a=0.9), step=2)
    assert commits(LaggedPolicy(), full_r, EXAMPLE) == [[4, 5]]


def test_three_regions_are_swept_in_their_order():
    layout = FixedLayout([Region(name=name, length=2, max_fill_frac=1.0) for name in "abc"])
    state = state_of([[1] * 6], layout)
    order = []
    for _ in range(3):
        (found,) = commits(GaussSeidelPolicy(), state, [0.95] * 6)
        order.append(found)
        written = torch.zeros_like(state.masked)
        written[0, [cell + state.start for cell in found]] = True
        state = replace(state, written=written, masked=state.masked & ~written)
    assert order == [[0, 1], [2, 3], [4, 5]]


# -- a slow reference ---------------------------------------------------------------------------


def slow_pass(masked: list[bool], prob: list[float], regions: list[Region], ids: list[int]):
    """The rule of a pass, cell by cell."""
    chosen = []
    for number, region in enumerate(regions):
        cells = [c for c, is_masked in enumerate(masked) if is_masked and ids[c] == number]
        cap = max(1, int(region.max_fill_frac * len(cells)))
        reach = [c for c in cells if prob[c] >= region.tau]
        chosen += sorted(reach, key=lambda c: (-prob[c], c))[:cap]
    return sorted(chosen)


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_equals_a_loop_over_rows_regions_and_cells(seed: int):
    """Rounded probabilities make ties; 64 rows with three regions and the rest."""
    generator = torch.Generator().manual_seed(seed)
    rules = [
        Region(name=str(tau), tau=tau, max_fill_frac=fraction)
        for tau, fraction in ((0.25, 0.3), (0.5, 0.7), (0.75, 1.0), (0.0, 0.29))
    ]
    masks = torch.randint(0, 2, (64, 30), generator=generator)
    state = state_with_masks(masks.tolist())
    ids = torch.randint(0, 4, state.ids.shape, generator=generator)
    state = replace(state, regions=RegionMap.of(ids, tuple(rules)))
    # Sixteenths are exact, so that the reference compares the same numbers.
    prob = torch.randint(0, 17, ids.shape, generator=generator) / 16
    proposal = d.Proposal(ids=state.ids, prob=prob)
    found = JacobiPolicy().select(state, state.masked, proposal, None).commit
    for row in range(64):
        wanted = slow_pass(state.masked[row].tolist(), prob[row].tolist(), rules, ids[row].tolist())
        assert found[row].nonzero()[:, 0].tolist() == wanted


# -- whole decodes ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [JacobiPolicy, GaussSeidelPolicy, LaggedPolicy, BonusPolicy])
@pytest.mark.parametrize("sampler", [d.Sampler(), d.Sampler(temperature=0.8, top_p=0.9)])
@pytest.mark.parametrize("tau", [0.3, 1.0])
def test_a_padded_batch_equals_its_rows_alone_and_ends_in_time(policy, tau, sampler):
    """tau = 1.0 lets nothing pass: every forward commits one cell, and the stalls are counted."""
    decoder = d.Decoder(
        policy=policy(tau=tau), quota=d.NoQuota(), sampler=sampler, layout=halves(4, cap=0.5)
    )
    prompts = [[4, 5, 6], [7], [8, 9], [3] * 5]
    result = as_rows_alone(decoder, TableBackbone(hashed, 12), prompts, 8)
    assert (result.num_steps <= 8).all()
    if tau == 1.0:
        assert result.num_steps.tolist() == result.stalled_steps.tolist() == [8] * 4


@pytest.mark.parametrize("policy", [GaussSeidelPolicy, LaggedPolicy])
def test_whose_turn_it_is_starts_anew_with_a_row_that_replaces_another(policy):
    """Rows of 5 slots: each gets the tokens and the steps that it gets alone."""
    decoder = d.Decoder(policy=policy(tau=0.3), quota=d.NoQuota(), layout=halves(4, cap=0.5))
    backbone = TableBackbone(hashed, 12)
    prompts = [[3 + number % 8] * (1 + number % 3) for number in range(20)]
    for ended in streamed(decoder, backbone, prompts, 8, 5):
        for row, number in enumerate(ended.numbers):
            alone = decoded(decoder, backbone, [prompts[number]], 8, seed=100 + number)
            assert ended.result.ids[row, -8:].tolist() == alone.ids[0, -8:].tolist()
            assert ended.result.num_steps[row] == alone.num_steps[0]


def answer_follows_reason(ids: Tensor) -> Tensor:
    """R is cells 1 and 2, A is cells 3 and 4. A proposes 5 until R is written, then R's token
    plus one; R is sure of 6 and 7."""
    tables = []
    for row in ids:
        reason = row[1:3]
        answer = 5 if bool((reason == MASK).any()) else int(reason[0]) + 1
        tables.append(logits_for([4, 6, 7, answer, answer], [0.5, 0.99, 0.98, 0.97, 0.96], 9))
    return torch.stack(tables)


@pytest.mark.parametrize(
    ("policy", "ids", "commits"),
    [
        (JacobiPolicy(), [6, 7, 5, 5], [[1, 2, 3, 4]]),
        (GaussSeidelPolicy(), [6, 7, 7, 7], [[1, 2], [3, 4]]),
    ],
)
def test_the_answer_reads_the_reasoning_of_the_same_gauss_seidel_sweep(policy, ids, commits):
    """Jacobi commits both at once: A still holds 5. Gauss-Seidel writes R in the first forward,
    and A, which has read it, in the second: 6 + 1 = 7."""
    backbone, recorder = TableBackbone(answer_follows_reason, 9), Recorder()
    decoder = d.Decoder(policy=policy, quota=d.NoQuota(), layout=halves(2))
    result = decoded(decoder, backbone, [[4]], 4, recorder)
    assert result.ids[0, 1:].tolist() == ids
    assert recorder.commits() == commits
    assert result.num_steps.tolist() == [backbone.forwards] == [len(commits)]


def test_rows_of_a_batch_are_at_their_own_places_in_the_sweep():
    """Row 0 is unsure of R and begins with A. Sweeps go on per row."""

    def table(ids: Tensor) -> Tensor:
        sure = logits_for([4, 6, 6, 7, 7], [0.5, 0.99, 0.98, 0.97, 0.96], 9)
        unsure = logits_for([4, 6, 6, 7, 7], [0.5, 0.6, 0.5, 0.97, 0.96], 9)
        return torch.stack([unsure if row[0] == 4 else sure for row in ids])

    recorder = Recorder()
    decoder = d.Decoder(policy=GaussSeidelPolicy(), quota=d.NoQuota(), layout=halves(2))
    result = decoded(decoder, TableBackbone(table, 9), [[4], [5]], 4, recorder)
    assert recorder.commits(0) == [[3, 4], [1], [2]]
    assert recorder.commits(1) == [[1, 2], [3, 4]]
    assert result.num_steps.tolist() == [3, 2]
    assert result.stalled_steps.tolist() == [2, 0]


def test_a_wrong_threshold_and_a_missing_layout_are_refused():
    with pytest.raises(ValueError, match="tau"):
        LaggedPolicy(tau=90)
    with pytest.raises(ValueError, match="layout: JacobiPolicy needs one"):
        d.Decoder(policy=JacobiPolicy(), quota=d.NoQuota())


# -- records ------------------------------------------------------------------------------------

TEMPLATE = d.TemplateLayout(
    [Region(name="R", length=4, marker=[9], tau=0.2), Region(name="A", marker=[10, 11], tau=0.2)]
)


@pytest.mark.parametrize(
    "policy",
    [JacobiPolicy(), GaussSeidelPolicy(), LaggedPolicy(), BonusPolicy(batch_wide=True, tau=0.2)],
    ids=lambda policy: type(policy).__name__,
)
def test_a_decode_is_executed_again_from_its_record_and_by_its_description(policy):
    decoder = d.Decoder(
        policy=policy,
        quota=d.NoQuota(),
        sampler=d.Sampler(temperature=0.7),
        cache=d.DualCache(),
        layout=TEMPLATE,
    )
    backbone = small_backbone()
    records = recorded(backbone, 3, response_length=11, decoder=decoder)
    again = decoder_from_description(json.loads(json.dumps(decoder.describe())))
    assert again.describe() == decoder.describe()
    for execute in (teacher_forced, free_running):
        assert [v.outcome for v in execute(backbone, again, records)] == ["exact"] * 3


def test_a_record_of_another_policy_does_not_pass_for_a_gauss_seidel_decode():
    backbone = small_backbone()
    own, other = (
        d.Decoder(policy=policy, quota=d.NoQuota(), layout=TEMPLATE)
        for policy in (JacobiPolicy(), GaussSeidelPolicy())
    )
    records = recorded(backbone, 3, response_length=11, decoder=own)
    assert {v.outcome for v in teacher_forced(backbone, other, records)} == {"failed"}
