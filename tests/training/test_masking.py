"""Maskings: which cells they hide and supervise, and that their noise belongs to the sample."""

from typing import Any

import pytest
import torch

from lit_dlm.finetuning.dparallel import BlockComplements
from lit_dlm.finetuning.tabom import TimeDelay
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.bounds import BoundViews
from lit_dlm.training.masking import (
    Autoregressive,
    CoupledMasking,
    CoupledViews,
    MaskedPrompt,
    RandomMasking,
    SemiAutoregressive,
    TraceMasking,
)
from lit_dlm.training.states import NEVER, group_rows, step_groups, weighted_states
from tests.training.reference import responses, rows


def unordered(maskable: torch.Tensor) -> SupervisedBatch:
    """Where no masking asks for the steps."""
    return responses(*maskable.shape, maskable=maskable)


ALL = [
    RandomMasking(copies=3, weight="1/t"),
    RandomMasking(level="token"),
    SemiAutoregressive(block_size=2, rows_per_sample=2),
    BlockComplements(block_size=2),
    TraceMasking(shrink=2),
    TraceMasking(rows_per_sample=2),
    Autoregressive(),
    TimeDelay(window=2),
    TimeDelay(window=2, cut_sampler="non_ltr", cut_range="reference"),
]
VIEWS = [
    CoupledMasking(),
    CoupledViews(),
    MaskedPrompt(),
    BoundViews(num_states=2, coupled=True),
    BoundViews(block_size=2),
]


@pytest.mark.parametrize("masking", [*ALL, *VIEWS], ids=lambda c: type(c).__name__)
def test_noise_belongs_to_the_sample_and_not_to_the_batch(masking: Any) -> None:
    whole = masking.states(responses())
    part = masking.states(responses(B=2, seeds=torch.tensor([103, 101])))
    for row, number in enumerate([3, 1]):
        for name in ("hidden", "supervised", "weight"):
            if getattr(whole, name) is not None:
                one = getattr(whole, name)[whole.response == number]
                other = getattr(part, name)[part.response == row]
                assert torch.equal(one, other)


@pytest.mark.parametrize("masking", ALL[:-3], ids=lambda c: type(c).__name__)
def test_only_hidden_cells_of_the_answer_are_targets_and_padding_stays_hidden(
    masking: Any,
) -> None:
    states = masking.states(responses())
    assert not (states.supervised & ~states.hidden).any()
    assert not states.supervised[:, 6:].any()
    assert states.hidden[:, 6:].all()
    assert states.weight is None or ((states.weight > 0) == states.supervised).all()


@pytest.mark.parametrize("masking", [RandomMasking(), TimeDelay(window=2)])
def test_another_seed_gives_other_states(masking: Any) -> None:
    one = masking.states(responses(B=64))
    two = masking.states(responses(B=64, seeds=torch.arange(64)))
    assert not torch.equal(one.hidden, two.hidden)


def test_random_masking_has_one_level_per_row() -> None:
    """Share of hidden cells of 400 rows: variance 1/12 + 1/(6 G) with one level per row, against
    1/(4 G) with a level per cell; G = 64 gives 0.0859 and 0.0039."""
    wide = unordered(torch.ones(400, 64, dtype=torch.bool))
    shares = RandomMasking().states(wide).supervised.float().mean(1)
    assert shares.var().item() == pytest.approx(1 / 12 + 1 / 384, rel=0.15)
    shares = RandomMasking(level="token").states(wide).supervised.float().mean(1)
    assert shares.var().item() == pytest.approx(1 / 256, rel=0.25)


@pytest.mark.parametrize("num_cells", [1, 2, 5])
def test_states_that_hid_nothing_count_in_the_bound(num_cells: int) -> None:
    """With 1 nat a cell the bound is 1 nat. Of one cell every second state hides nothing. A row's
    variance is at most E[1/t] - 1 = ln(20) / 0.95 - 1 = 2.15, so 4000 rows have a standard error
    of 0.023 at most. Rows of padding alone, a quarter of all, are no states of an answer."""
    rows, cells = torch.arange(5333)[:, None], torch.arange(6)
    answers = unordered((cells < num_cells) & (rows % 4 < 3))
    states = RandomMasking(min_t=0.05, weight="1/t").states(answers)
    assert (answers.maskable.any(1) & ~states.supervised.any(1)).any()
    assert states.num_units() == 4000
    assert (states.weight.sum() / states.num_units()).item() == pytest.approx(1.0, abs=0.1)


def test_only_states_with_targets_count_in_a_mean_of_their_targets() -> None:
    """The sum over the length does count the others, also block by block."""
    one_cell = unordered(torch.ones(16, 1, dtype=torch.bool))
    weight: Any
    for weight, wanted in (("1/num_targets", None), ("1/length", 16)):
        for masking in (
            RandomMasking(weight=weight),
            SemiAutoregressive(block_size=1, weight=weight),
        ):
            states = masking.states(one_cell)
            targets = int(states.supervised.sum())
            assert 0 < targets < 16
            assert states.num_units() == (wanted or targets)


def test_sliced_blocks_show_what_comes_before_and_hide_what_comes_after() -> None:
    """At a level of 1, which hides every cell of its block."""
    masking = SemiAutoregressive(block_size=4)
    masking.noise.min_t = masking.noise.max_t = 1.0
    states = masking.states(responses(B=1))
    assert states.hidden.equal(rows("11111111", "00001111"))
    assert states.supervised.equal(rows("11110000", "00001100"))


def test_trace_states_replay_the_decode_in_groups_of_steps() -> None:
    """Steps 5..0 from the left, two to a group: cells (4, 5), then (2, 3), then (0, 1)."""
    states = TraceMasking(shrink=2).states(responses(B=1))
    assert states.supervised[:, :6].equal(rows("000011", "001100", "110000"))
    assert states.hidden[:, :6].equal(rows("111111", "111100", "110000"))
    assert states.hidden[:, 6:].all()


def test_trace_states_of_a_block_model_step_through_all_blocks_at_once() -> None:
    """Blocks of 3 with steps (2, 0, 0) and (1, 5, 3): groups (1, 0, 0) and (0, 2, 1)."""
    steps, blocks = torch.tensor([[2, 0, 0, 1, 5, 3]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    states = TraceMasking().states(responses(B=1, G=6, steps=steps, blocks=blocks))
    assert states.supervised.equal(rows("011100", "100001", "000010"))
    assert states.hidden.equal(rows("111111", "100011", "000010"))


def test_rows_per_sample_draws_distinct_groups() -> None:
    groups = step_groups(torch.arange(9).expand(50, -1), torch.ones(50, 9, dtype=torch.bool))
    sample, group, _ = group_rows(groups, 4, torch.arange(50), stream=1)
    assert torch.bincount(sample).tolist() == [4] * 50
    assert len(set(zip(sample.tolist(), group.tolist(), strict=True))) == 200
    assert set(group.tolist()) == set(range(9))


def test_groups_leave_out_what_no_step_wrote() -> None:
    members = torch.tensor([[True, True, False, True]])
    assert step_groups(torch.tensor([[7, -1, 3, 2]]), members).tolist() == [[1, NEVER, NEVER, 0]]


def test_non_ltr_cuts_take_the_list_of_the_data_where_there_is_one() -> None:
    """Decoded from the right, all but the first cell (step 5) are out of order by the steps; the
    list holds cells 1 and 3, written at steps 4 and 2."""
    make = TimeDelay(window=2, cut_sampler="non_ltr")
    assert set(make.states(responses(B=64)).cut.tolist()) == {0, 1, 2, 3, 4}
    listed = torch.zeros(64, 8, dtype=torch.bool)
    listed[:, [1, 3]] = True
    assert set(make.states(responses(B=64, non_ltr=listed)).cut.tolist()) == {2, 4}


def test_time_delay_equals_its_mask_at_the_drawn_cut() -> None:
    states = TimeDelay(window=2).states(responses(B=32))
    steps = responses(B=32).steps
    cut = states.cut[:, None]
    assert set(states.cut.tolist()) == set(range(6))
    assert torch.equal(states.hidden, (steps < 0) | (steps >= cut))
    assert torch.equal(states.supervised, (steps >= cut) & (steps < cut + 2))


def test_reference_range_leaves_short_decodes_without_a_target() -> None:
    states = TimeDelay(window=6, cut_range="reference").states(responses())
    assert states.cut.tolist() == [-1] * 4
    assert states.hidden.all()
    assert states.num_units() == 0


def test_weights_by_hand() -> None:
    """Three targets of an answer of four cells: 1/3 each, or 1/4 each, at a level of 1/2 twice.

    Without a mean over states they count 1, at this level 2, and all of a batch are its units.
    """
    supervised = torch.tensor([[True, True, True, False]])
    maskable = torch.ones(1, 4, dtype=torch.bool)
    level = torch.full((1, 4), 0.5)
    for weight, wanted in {
        "1/num_targets": 1 / 3,
        "1/length": 1 / 4,
        "1/t": 1 / 2,
        "none/t": 2.0,
    }.items():
        states = weighted_states(
            weight,  # type: ignore[arg-type]
            torch.zeros(1, dtype=torch.long),
            hidden=supervised,
            supervised=supervised,
            maskable=maskable,
            t=level,
        )
        torch.testing.assert_close(states.weight, supervised * wanted)
        assert states.num_units() == (3 if weight == "none/t" else 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomMasking(min_t=0.5, max_t=0.4), "min_t"),
        (lambda: RandomMasking(max_t=0.0), "max_t above 0"),
        (lambda: SemiAutoregressive().states(responses()), "block_size"),
        (lambda: RandomMasking(level="block").states(responses()), "level"),
        (lambda: TraceMasking(rows_per_sample=0), "rows_per_sample"),
        (
            lambda: TraceMasking(weight="1/t").states(responses()),
            "weight: expected a rule without t",
        ),
    ],
)
def test_bad_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
