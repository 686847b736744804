"""Format."""

from __future__ import annotations

import pytest

from lit_dlm.rewards import FormatReward
from tests.rewards.groups import rollout


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("So:\n```python\ndef f(x):\n    return x\n```", True),
        ("```python\ndef f(x: return\n```", False),
        ("", False),
    ],
)
def test_code_must_compile(text: str, holds: bool) -> None:
    (score,) = FormatReward().score([rollout(text)])
    assert score.total == float(holds)
