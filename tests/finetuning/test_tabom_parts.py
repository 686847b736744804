"""Parts of TABOM: ranking, masks and cuts by reference cases, slow loops, shares of draws."""

from typing import Any

import pytest
import torch

from lit_dlm.finetuning.tabom import (
    RankingTerms,
    entropy_ranking,
    last_cuts,
    non_ltr_cuts,
    time_delay_mask,
    uniform_cuts,
)
from tests.shared_data import tabom_cases
from tests.training.reference import entropy_of, slow_ranking


def loss_of(terms: RankingTerms) -> torch.Tensor:
    """Mean over rows with pairs, as the module takes it."""
    return terms.row_terms.sum() / (terms.num_pairs > 0).sum().clamp_min(1)


CUT_0 = torch.tensor([0])


@pytest.mark.parametrize("ties", ["strict", "position"])
@pytest.mark.parametrize("case", tabom_cases("rank_cases"), ids=lambda case: case["name"])
def test_reference_cases(case: dict[str, Any], ties: Any) -> None:
    logits = torch.tensor(case["logits"], dtype=torch.float64, requires_grad=True)
    cuts = case["cut"] if isinstance(case["cut"], list) else [case["cut"]] * len(logits)
    terms = entropy_ranking(
        entropy_of(logits),
        torch.tensor(case["steps"]),
        torch.tensor(case["supervised"]),
        torch.tensor([-1 if cut is None else cut for cut in cuts]),
        window=case["window"],
        margin=case["margin"],
        ties=ties,
    )
    loss_of(terms).backward()
    wanted = case["expected"][ties]
    assert loss_of(terms).item() == pytest.approx(wanted["loss_rank"], abs=1e-12, rel=0)
    assert terms.num_pairs.tolist() == [row["pairs"] for row in wanted["per_sample"]]
    rows = [row["term"] or 0.0 for row in wanted["per_sample"]]
    assert terms.row_terms.tolist() == pytest.approx(rows, abs=1e-12, rel=0)
    gradient = torch.tensor(wanted["grad_logits"], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [4, None])
def test_a_row_without_a_cut_has_no_pairs(window: int | None) -> None:
    """All four are marked as supervised and two of six pairs are out of order."""
    entropy = torch.tensor([[1.0, 2.0, 0.5, 3.0]], requires_grad=True)
    given = torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool)
    terms = entropy_ranking(entropy, *given, CUT_0 - 1, window=window, margin=0.1)
    loss_of(terms).backward()
    assert loss_of(terms).item() == 0.0
    assert terms.num_pairs.tolist() == [0]
    assert not entropy.grad.any()
    found = entropy_ranking(entropy, *given, CUT_0, window=4, margin=0.1)
    assert loss_of(found).item() > 0.0


@pytest.mark.parametrize("ties", ["strict", "position", "rank"])
@pytest.mark.parametrize("window", [3, None])
def test_equals_a_loop_over_pairs(ties: Any, window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    entropy = torch.rand(4, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    steps = torch.randint(-1, 6, (4, 11), generator=generator)
    supervised = torch.rand(4, 11, generator=generator) < 0.8
    # Repeated values, so that ties of recorded entropies occur as well.
    recorded = torch.randint(0, 3, (4, 11), generator=generator).double()
    cuts = [0, 2, 3, 5]
    options: Any = {"window": window, "margin": 0.1, "ties": ties}
    given = steps, supervised, torch.tensor(cuts)
    found = loss_of(entropy_ranking(entropy, *given, decode_entropy=recorded, **options))
    plain = steps.tolist(), supervised.tolist(), cuts
    slow = slow_ranking(entropy, *plain, decode_entropy=recorded.tolist(), **options)
    torch.testing.assert_close(found, slow)
    fast, wanted = (torch.autograd.grad(loss, entropy) for loss in (found, slow))
    torch.testing.assert_close(fast, wanted)


def test_three_positions_by_hand() -> None:
    """Pairs (0,1), (0,2), (1,2): hinges 0.5 - 0.2 + 0.1 = 0.4, 0 and 0."""
    entropy, steps = torch.tensor([[0.5, 0.2, 0.9]]), torch.tensor([[0, 1, 2]])
    supervised = torch.ones(1, 3, dtype=torch.bool)
    row = entropy_ranking(entropy, steps, supervised, CUT_0, window=3, margin=0.1)
    assert loss_of(row).item() == pytest.approx(0.4 / 3)
    assert (row.num_ordered, row.num_pairs.tolist()) == (2, [3])


def test_nan_outside_the_pairs_reaches_neither_value_nor_gradient() -> None:
    entropy = torch.tensor([[0.5, torch.nan, 0.2, torch.nan]], requires_grad=True)
    steps = torch.tensor([[0, 1, 2, -1]])
    supervised = torch.tensor([[True, False, True, True]])
    total = loss_of(entropy_ranking(entropy, steps, supervised, CUT_0, window=4))
    total.backward()
    assert total.item() == pytest.approx(0.3)
    assert entropy.grad.tolist() == [[1.0, 0.0, -1.0, 0.0]]


@pytest.mark.parametrize("shape", [(2, 4), (2, 0), (0, 4)])
def test_without_pairs_the_loss_is_zero_with_zero_gradient(shape: tuple[int, int]) -> None:
    entropy = torch.rand(shape, requires_grad=True)
    steps = torch.zeros(shape, dtype=torch.long)
    supervised = torch.ones(shape, dtype=torch.bool)
    cut = torch.zeros(shape[0], dtype=torch.long)
    total = loss_of(entropy_ranking(entropy, steps, supervised, cut, window=4, margin=0.3))
    total.backward()
    assert total.item() == 0.0
    assert not entropy.grad.any()


def test_equal_entropies_without_margin_have_no_gradient() -> None:
    entropy = torch.full((1, 3), 0.7, requires_grad=True)
    everything = torch.ones(1, 3, dtype=torch.bool)
    steps = torch.arange(3)[None]
    loss_of(entropy_ranking(entropy, steps, everything, CUT_0, window=3)).backward()
    assert not entropy.grad.any()


@pytest.mark.parametrize("case", tabom_cases("td_cases"), ids=lambda case: case["name"])
def test_reference_masks(case: dict[str, Any]) -> None:
    steps, maskable = torch.tensor([case["steps"]]), torch.tensor([case["maskable"]])
    cut = torch.tensor([-1 if case["cut"] is None else case["cut"]])
    hidden, supervised = time_delay_mask(steps, maskable, cut, window=case["M"])
    assert hidden[0].tolist() == case["masked_in_input"]
    assert supervised[0].tolist() == case["ce_positions"]


@pytest.mark.parametrize("case", tabom_cases("cut_range_cases"), ids=lambda case: case["s_max"])
def test_reference_cut_ranges(case: dict[str, Any]) -> None:
    steps = torch.arange(case["s_max"] + 1)
    for cut_range in ("reference", "full"):
        last: Any = last_cuts(steps, steps >= 0, window=case["M"], cut_range=cut_range)
        wanted = case[f"{cut_range}_cut_range"]
        assert last == (-1 if wanted is None else wanted[1])


def test_uniform_cuts_reach_every_step_of_the_range_and_no_other() -> None:
    """Noise at the middles of five equal parts gives one cut each; -1 stays -1."""
    noise = (torch.arange(5, dtype=torch.float64) + 0.5) / 5
    assert uniform_cuts(torch.full((5,), 4), noise).tolist() == [0, 1, 2, 3, 4]
    edge = torch.tensor([1.0 - 2.0**-54], dtype=torch.float64)
    assert uniform_cuts(torch.tensor([4]), edge).tolist() == [4]
    assert uniform_cuts(torch.full((5,), -1), noise).tolist() == [-1] * 5


def test_non_ltr_cuts_are_uniform_over_distinct_steps_within_the_range() -> None:
    """Steps 1, 1, 3 and 9 decoded out of order, the last cut is 5: 1 and 3 with equal chance."""
    steps = torch.tensor([[0, 1, 1, 3, 9]]).expand(4, -1)
    out_of_order = torch.tensor([[False, True, True, True, True]]).expand(4, -1)
    noise = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    last = torch.full((4,), 5)
    assert non_ltr_cuts(last, steps, out_of_order, noise).tolist() == [1, 1, 3, 3]
    nothing = torch.zeros_like(out_of_order)
    assert torch.equal(non_ltr_cuts(last, steps, nothing, noise), uniform_cuts(last, noise))
