"""Time-delay masks and cuts: reference cases, slow loops, and shares of draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dlm.ops.cuts import last_cuts, non_ltr_cuts, non_ltr_positions, uniform_cuts
from lit_dlm.ops.masking import time_delay_mask

CASES = Path(__file__).parents[2].parent / "shared" / "data" / "tabom_rank_cases.json"
needs_cases = pytest.mark.skipif(not CASES.is_file(), reason=f"no reference cases at {CASES}")


def cases(kind: str) -> list[dict[str, Any]]:
    return json.loads(CASES.read_text())[kind] if CASES.is_file() else []


@needs_cases
@pytest.mark.parametrize("case", cases("td_cases"), ids=lambda case: case["name"])
def test_reference_masks(case: dict[str, Any]) -> None:
    steps, maskable = torch.tensor(case["steps"]), torch.tensor(case["maskable"])
    mask = time_delay_mask(steps, maskable, case["cut"], window=case["M"])
    assert mask.hidden.tolist() == case["masked_in_input"]
    assert (~mask.hidden).tolist() == case["visible_in_input"]
    assert mask.supervised.tolist() == case["ce_positions"]


@needs_cases
@pytest.mark.parametrize("case", cases("cut_range_cases"), ids=lambda case: f"s{case['s_max']}")
def test_reference_cut_ranges(case: dict[str, Any]) -> None:
    steps = torch.arange(case["s_max"] + 1)
    for cut_range in ("reference", "full"):
        last = last_cuts(steps, steps >= 0, window=case["M"], cut_range=cut_range)  # type: ignore[arg-type]
        wanted = case[f"{cut_range}_cut_range"]
        assert int(last) == (-1 if wanted is None else wanted[1])
    drawn = set(
        range(int(last_cuts(steps, steps >= 0, window=case["M"], cut_range="reference")) + 1)
    )
    covered = {step for cut in drawn for step in range(cut, cut + case["M"])}
    never = [step for step in steps.tolist() if step not in covered]
    assert never == case["steps_never_supervised_reference"]


def test_rows_with_cuts_of_their_own_equal_single_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(-1, 8, (5, 12), generator=generator)
    maskable = torch.rand(5, 12, generator=generator) < 0.8
    cuts = [0, 3, 7, -1, 5]
    for unit in ("steps", "tokens"):
        batch = time_delay_mask(steps, maskable, cuts, window=3, unit=unit)  # type: ignore[arg-type]
        for row, cut in enumerate(cuts):
            single = time_delay_mask(steps[row], maskable[row], cut, window=3, unit=unit)  # type: ignore[arg-type]
            assert torch.equal(batch.hidden[row], single.hidden)
            assert torch.equal(batch.supervised[row], single.supervised)


@pytest.mark.parametrize("cut", [-1, None])
def test_a_row_without_a_cut_is_hidden_and_teaches_nothing(cut: int | None) -> None:
    steps = torch.tensor([0, 1, -1, 0])
    mask = time_delay_mask(steps, torch.ones(4, dtype=torch.bool), cut, window=2)
    assert mask.hidden.all()
    assert not mask.supervised.any()
    both = time_delay_mask(steps.expand(2, 4), steps.expand(2, 4) > -2, [cut, 1], window=2)
    assert both.hidden.tolist() == [[True] * 4, [False, True, True, False]]
    assert both.supervised.sum(1).tolist() == [0, 1]


def test_a_window_of_tokens_counts_in_the_order_of_steps_then_from_the_left() -> None:
    """From cut 1: positions 1 and 3 (step 1), then 0 and 4 (step 2); the first three count."""
    steps = torch.tensor([2, 1, 0, 1, 2])
    mask = time_delay_mask(steps, steps >= 0, 1, window=3, unit="tokens")
    assert mask.supervised.tolist() == [True, True, False, True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window: expected"),
        ({"unit": "words"}, "unit: expected"),
        ({"cut": [1, 2]}, "cut: expected one value or 1"),
        ({"cut": 0.5}, "cut: expected integers"),
        ({"maskable": torch.ones(3, dtype=torch.bool)}, "one shape"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "steps": torch.zeros(1, 4, dtype=torch.long),
        "maskable": torch.ones(1, 4, dtype=torch.bool),
        "cut": 0,
        "window": 2,
    }
    with pytest.raises(ValueError, match=message):
        time_delay_mask(**{**values, **changes})


def test_uniform_cuts_reach_every_step_of_the_range_and_no_other() -> None:
    """Noise at the middles of five equal parts gives one cut each; -1 stays -1."""
    noise = (torch.arange(5, dtype=torch.float64) + 0.5) / 5
    assert uniform_cuts(torch.full((5,), 4), noise).tolist() == [0, 1, 2, 3, 4]
    edge = torch.tensor([1.0 - 2.0**-54], dtype=torch.float64)
    assert uniform_cuts(torch.tensor([4]), edge).tolist() == [4]
    assert uniform_cuts(torch.full((5,), -1), noise).tolist() == [-1] * 5


def test_non_ltr_positions_were_written_before_something_to_their_left() -> None:
    """Position 2 (step 1) follows position 1 (step 4); position 3 was never written."""
    assert non_ltr_positions(torch.tensor([0, 4, 1, -1, 3, 5])).tolist() == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]


def test_non_ltr_cuts_are_uniform_over_distinct_steps_within_the_range() -> None:
    """Steps 1, 1, 3 and 9 decoded out of order, the last cut is 5: 1 and 3 with equal chance."""
    steps = torch.tensor([[0, 1, 1, 3, 9]]).expand(4, -1)
    out_of_order = torch.tensor([[False, True, True, True, True]]).expand(4, -1)
    noise = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    last = torch.full((4,), 5)
    assert non_ltr_cuts(last, steps, out_of_order, noise).tolist() == [1, 1, 3, 3]
    nothing = torch.zeros_like(out_of_order)
    assert torch.equal(non_ltr_cuts(last, steps, nothing, noise), uniform_cuts(last, noise))
