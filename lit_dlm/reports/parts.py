"""Named parts of a response: blocks of a semi-autoregressive decode, or regions of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lit_dlm.trajectories.record import Trajectory

REGIONS_KEY = "regions"
"""Entry of a record's ``meta`` that names parts: ``[[name, first, end], ...]`` in response
positions, ``end`` excluded."""


class Part(NamedTuple):
    """Response positions ``start`` to ``end - 1``."""

    name: str
    start: int
    end: int


def parts_of(record: Trajectory, decoder: Mapping[str, Any] | None = None) -> list[Part]:
    """Parts in the record's ``meta``, else regions of the described decoder, else its blocks."""
    if REGIONS_KEY in record.meta:
        return _named(record)
    if decoder and "layout" in decoder:
        # Imported here, as torch takes seconds to import.
        from lit_dlm.trajectories.regions import regions_of

        layout = regions_of(record, decoder)
        assert layout is not None
        return [Part(one.name, one.start, one.end) for one in layout.regions]
    return _blocks(record, (decoder or {}).get("window") or {})


def _named(record: Trajectory) -> list[Part]:
    # Entries of ``meta`` come from whoever wrote the record: a callback of the user, or an import.
    try:
        parts = [Part(str(name), start, end) for name, start, end in record.meta[REGIONS_KEY]]
        assert all(0 <= one.start < one.end <= record.num_generated for one in parts)
    except (TypeError, ValueError, AssertionError):
        raise ValueError(
            f"trajectory {record.uid!r}: meta '{REGIONS_KEY}' must be a list of [name, first, end] "
            f"inside 0..{record.num_generated}, got {record.meta[REGIONS_KEY]!r:.80}"
        ) from None
    return sorted(parts, key=lambda part: part.start)


def _blocks(record: Trajectory, window: Mapping[str, Any]) -> list[Part]:
    length = window.get("block_length")
    if not isinstance(length, int) or length < 1:
        return []
    # Blocks that are counted from the first token of the sequence may begin inside the prompt.
    first = -(record.num_prompt % length) if window.get("origin") == "sequence" else 0
    starts = range(first, record.num_generated, length)
    return [
        Part(f"block {number}", max(start, 0), min(start + length, record.num_generated))
        for number, start in enumerate(starts, start=1)
    ]
