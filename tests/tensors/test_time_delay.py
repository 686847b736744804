"""Time-delay masks and cuts: reference cases, slow loops, and shares of draws."""

from typing import Any

import pytest
import torch

from lit_dlm.tensors.cuts import last_cuts, non_ltr_cuts, non_ltr_positions, uniform_cuts
from lit_dlm.tensors.masking import time_delay_mask
from tests.shared_data import tabom_cases


@pytest.mark.parametrize("case", tabom_cases("td_cases"), ids=lambda case: case["name"])
def test_reference_masks(case: dict[str, Any]) -> None:
    steps, maskable = torch.tensor([case["steps"]]), torch.tensor([case["maskable"]])
    cut = torch.tensor([-1 if case["cut"] is None else case["cut"]])
    mask = time_delay_mask(steps, maskable, cut, window=case["M"])
    assert mask.hidden[0].tolist() == case["masked_in_input"]
    assert mask.supervised[0].tolist() == case["ce_positions"]


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


def test_non_ltr_positions_were_written_before_something_to_their_left() -> None:
    """Position 2 (step 1) follows position 1 (step 4); position 3 was never written."""
    found = non_ltr_positions(torch.tensor([0, 4, 1, -1, 3, 5]))
    assert found.int().tolist() == [0, 0, 1, 0, 1, 0]


def test_non_ltr_cuts_are_uniform_over_distinct_steps_within_the_range() -> None:
    """Steps 1, 1, 3 and 9 decoded out of order, the last cut is 5: 1 and 3 with equal chance."""
    steps = torch.tensor([[0, 1, 1, 3, 9]]).expand(4, -1)
    out_of_order = torch.tensor([[False, True, True, True, True]]).expand(4, -1)
    noise = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    last = torch.full((4,), 5)
    assert non_ltr_cuts(last, steps, out_of_order, noise).tolist() == [1, 1, 3, 3]
    nothing = torch.zeros_like(out_of_order)
    assert torch.equal(non_ltr_cuts(last, steps, nothing, noise), uniform_cuts(last, noise))
