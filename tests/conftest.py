"""Hooks of the whole suite."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Keeps what collection made out of garbage collection, which every test would walk again."""
    gc.collect()
    gc.freeze()
