"""Lockstep steps that a CUDA graph can record."""

from typing import Any

import pytest

import lit_dlm.decoding as d
from lit_dlm.lockstep import BonusPolicy, GaussSeidelPolicy, JacobiPolicy, LaggedPolicy
from tests.decoding.graph_checks import (
    check_all_are_tried,
    check_reads_nothing,
    check_uploads_nothing,
)

THIRDS = d.FractionLayout([d.Region(name=name, fraction=0.3) for name in "abc"])
REGIONS: dict[str, Any] = {"quota": d.NoQuota(), "layout": THIRDS}
CASES: dict[str, dict[str, Any]] = {
    "jacobi": {**REGIONS, "policy": JacobiPolicy(tau=0.1)},
    "gauss-seidel": {**REGIONS, "policy": GaussSeidelPolicy(tau=0.1)},
    "lagged": {**REGIONS, "policy": LaggedPolicy(tau=0.1), "quota": d.BudgetQuota(6)},
    "bonus": {**REGIONS, "policy": BonusPolicy(tau=0.15)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_and_uploads_nothing(case: str, monkeypatch: pytest.MonkeyPatch):
    check_reads_nothing(CASES[case], monkeypatch)
    check_uploads_nothing(CASES[case])


def test_every_policy_of_the_room_is_among_the_cases():
    check_all_are_tried("lit_dlm.lockstep", CASES)


def test_a_share_of_the_whole_batch_is_not_safe():
    """Rows that have ended leave a batch only without graphs."""
    assert not BonusPolicy(batch_wide=True).graph_safe
