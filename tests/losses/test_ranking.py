"""Entropy ranking: reference cases, a slow loop, and what must not count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_dlm.losses.ranking import entropy_ranking
from lit_dlm.ops.masking import time_delay_mask
from tests.losses.reference import entropy_of, slow_ranking

CASES = Path(__file__).parents[2].parent / "shared" / "data" / "tabom_rank_cases.json"


def cases(kind: str) -> list[dict[str, Any]]:
    return json.loads(CASES.read_text())[kind] if CASES.is_file() else []


@pytest.mark.skipif(not CASES.is_file(), reason=f"no reference cases at {CASES}")
@pytest.mark.parametrize("ties", ["strict", "position"])
@pytest.mark.parametrize("case", cases("rank_cases"), ids=lambda case: case["name"])
def test_reference_cases(case: dict[str, Any], ties: Any) -> None:
    logits = torch.tensor(case["logits"], dtype=torch.float64, requires_grad=True)
    entropy = entropy_of(logits)
    terms = entropy_ranking(
        entropy,
        torch.tensor(case["steps"]),
        torch.tensor(case["supervised"]),
        case["cut"],
        window=case["window"],
        margin=case["margin"],
        ties=ties,
    )
    terms.total.backward()
    wanted = case["expected"][ties]
    assert terms.total.item() == pytest.approx(wanted["loss_rank"], abs=1e-12, rel=0)
    assert terms.num_pairs.tolist() == [row["pairs"] for row in wanted["per_sample"]]
    rows = [row["term"] or 0.0 for row in wanted["per_sample"]]
    assert terms.row_terms.tolist() == pytest.approx(rows, abs=1e-12, rel=0)
    gradient = torch.tensor(wanted["grad_logits"], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [4, None])
@pytest.mark.parametrize("cut", [None, -1, [None], [-1]])
def test_a_row_without_a_cut_has_no_pairs(cut: Any, window: int | None) -> None:
    """All four are marked as supervised and two of six pairs are out of order."""
    entropy = torch.tensor([[1.0, 2.0, 0.5, 3.0]], requires_grad=True)
    given = torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool)
    terms = entropy_ranking(entropy, *given, cut, window=window, margin=0.1)
    terms.total.backward()
    assert terms.total.item() == 0.0
    assert terms.num_pairs.tolist() == [0]
    assert entropy.grad is not None
    assert not entropy.grad.any()
    assert entropy_ranking(entropy, *given, 0, window=4, margin=0.1).total.item() > 0.0


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
    terms = entropy_ranking(
        entropy,
        steps,
        supervised,
        cuts,
        window=window,
        margin=0.1,
        ties=ties,
        decode_entropy=recorded,
    )
    slow = slow_ranking(
        entropy,
        steps.tolist(),
        supervised.tolist(),
        cuts,
        window=window,
        margin=0.1,
        ties=ties,
        decode_entropy=recorded.tolist(),
    )
    torch.testing.assert_close(terms.total, slow)
    (fast,) = torch.autograd.grad(terms.total, entropy)
    (wanted,) = torch.autograd.grad(slow, entropy)
    torch.testing.assert_close(fast, wanted)


def test_one_row_equals_a_batch_of_one() -> None:
    entropy, steps = torch.tensor([0.5, 0.2, 0.9]), torch.tensor([0, 1, 2])
    supervised = torch.ones(3, dtype=torch.bool)
    row = entropy_ranking(entropy, steps, supervised, 0, window=3, margin=0.1)
    batch = entropy_ranking(entropy[None], steps[None], supervised[None], [0], window=3, margin=0.1)
    # Pairs (0,1), (0,2), (1,2): hinges 0.5 - 0.2 + 0.1 = 0.4, 0 and 0.
    assert row.total.item() == pytest.approx(0.4 / 3)
    assert row.total == batch.total
    assert row.parts["pair_accuracy"].item() == pytest.approx(2 / 3)


def test_nan_outside_the_pairs_reaches_neither_value_nor_gradient() -> None:
    entropy = torch.tensor([[0.5, torch.nan, 0.2, torch.nan]], requires_grad=True)
    steps = torch.tensor([[0, 1, 2, -1]])
    supervised = torch.tensor([[True, False, True, True]])
    total = entropy_ranking(entropy, steps, supervised, 0, window=4, margin=0.0).total
    total.backward()
    assert total.item() == pytest.approx(0.3)
    assert entropy.grad.tolist() == [[1.0, 0.0, -1.0, 0.0]]


@pytest.mark.parametrize("shape", [(2, 4), (2, 0), (0, 4)])
def test_without_pairs_the_loss_is_zero_with_zero_gradient(shape: tuple[int, int]) -> None:
    entropy = torch.rand(shape, requires_grad=True)
    steps = torch.zeros(shape, dtype=torch.long)
    supervised = torch.ones(shape, dtype=torch.bool)
    cut = torch.zeros(shape[0], dtype=torch.long)
    total = entropy_ranking(entropy, steps, supervised, cut, window=4, margin=0.3).total
    total.backward()
    assert total.item() == 0.0
    assert not entropy.grad.any()


def test_equal_entropies_without_margin_have_no_gradient() -> None:
    entropy = torch.full((1, 3), 0.7, requires_grad=True)
    everything = torch.ones(1, 3, dtype=torch.bool)
    entropy_ranking(entropy, torch.arange(3)[None], everything, 0, window=3).total.backward()
    assert not entropy.grad.any()


@pytest.mark.parametrize("kind", [np.int64, np.int32, torch.tensor])
def test_a_window_may_be_an_integer_of_any_kind(kind: Any) -> None:
    """Steps 0 and 1 are in the window: one pair, out of order by 1 nat; the cut shows nothing."""
    entropy, steps = torch.tensor([[2.0, 1.0, 0.0]]), torch.arange(3)[None]
    everything = torch.ones(1, 3, dtype=torch.bool)
    assert entropy_ranking(entropy, steps, everything, 0, window=kind(2)).total.item() == 1.0
    found = time_delay_mask(steps, everything, 0, window=kind(2))
    assert found.supervised.tolist() == [[True, True, False]]
    for window in (True, 2.0, torch.tensor(2.0)):
        with pytest.raises(ValueError, match="window: expected an integer of at least 1"):
            time_delay_mask(steps, everything, 0, window=window)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ties": "first"}, "ties: expected"),
        ({"ties": "rank"}, "decode_entropy: expected"),
        ({"window": 0}, "window: expected"),
        ({"window": 2.5}, "window: expected an integer"),
        ({"window": True}, "window: expected an integer .* got True"),
        ({"window": torch.tensor(True)}, "window: expected an integer"),
        ({"window": torch.tensor(2.0)}, "window: expected an integer"),
        ({"margin": float("nan")}, "margin: expected a finite"),
        ({"steps": torch.zeros(1, 4)}, "one shape"),
        ({"cut": [0, 1, 2]}, "cut: expected one value or 1"),
        ({"cut": torch.tensor([0.0])}, "cut: expected integers"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "entropy": torch.zeros(1, 3),
        "steps": torch.zeros(1, 3, dtype=torch.long),
        "supervised": torch.ones(1, 3, dtype=torch.bool),
        "cut": 0,
        "window": 2,
    }
    with pytest.raises(ValueError, match=message):
        entropy_ranking(**{**values, **changes})
