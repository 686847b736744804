"""Published files and reference cases beside the checkout; where they are absent, tests skip."""

import json
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "data"


def shared(*names: str) -> Path:
    path = SHARED.joinpath(*names)
    if not path.exists():
        pytest.skip(f"nothing at {path}")
    return path


def tabom_cases(kind: str) -> list[dict[str, Any]]:
    """Cases to parametrise a test with."""
    path = SHARED / "tabom_rank_cases.json"
    return json.loads(path.read_text())[kind] if path.is_file() else []
