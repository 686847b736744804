"""Named parts of a response: blocks of a semi-autoregressive decode, or regions of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_dlm.trajectories.record import Trajectory

REGIONS_KEY = "regions"
"""Entry of a record's ``meta`` that names regions: ``[[name, first, end], ...]`` in response
positions, ``end`` excluded."""


@dataclass(frozen=True)
class Region:
    """Response positions ``start`` to ``end - 1``."""

    name: str
    start: int
    end: int


def regions_of(record: Trajectory, method: Mapping[str, Any] | None = None) -> list[Region]:
    """Regions in the record's ``meta``, else of the layout of the described decoder, or blocks."""
    if REGIONS_KEY in record.meta:
        return _named(record)
    if method and "layout" in method:
        # Imported here, as torch takes seconds to import.
        from lit_dlm.trajectories import regions

        layout = regions.regions_of(record, method)
        assert layout is not None
        return [Region(block.name, block.start, block.end) for block in layout.blocks]
    return _blocks(record, (method or {}).get("window") or {})


def _named(record: Trajectory) -> list[Region]:
    try:
        regions = [Region(str(name), start, end) for name, start, end in record.meta[REGIONS_KEY]]
        assert all(0 <= one.start < one.end <= record.num_generated for one in regions)
    except (TypeError, ValueError, AssertionError):
        raise ValueError(
            f"trajectory {record.uid!r}: meta '{REGIONS_KEY}' must be a list of [name, first, end] "
            f"inside 0..{record.num_generated}, got {record.meta[REGIONS_KEY]!r:.80}"
        ) from None
    return sorted(regions, key=lambda region: region.start)


def _blocks(record: Trajectory, window: Mapping[str, Any]) -> list[Region]:
    length = window.get("block_length")
    if not isinstance(length, int) or length < 1:
        return []
    # Blocks that are counted from the first token of the sequence may begin inside the prompt.
    first = -(record.num_prompt % length) if window.get("origin") == "sequence" else 0
    starts = range(first, record.num_generated, length)
    return [
        Region(f"block {number}", max(start, 0), min(start + length, record.num_generated))
        for number, start in enumerate(starts, start=1)
    ]
