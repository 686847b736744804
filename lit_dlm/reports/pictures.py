"""All pictures of a decode in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dlm.reports.animation import write_gif
from lit_dlm.reports.decode_statistics import plot_statistics
from lit_dlm.reports.fill_order import plot_fill_order, plot_order
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.regions import regions_of
from lit_dlm.reports.samples import Sample


def write_pictures(
    samples: Sequence[Sample],
    pieces: TokenPieces,
    files: Mapping[str, Path],
    *,
    method: Mapping[str, Any] | None = None,
    theme: str = "light",
) -> None:
    """Writes pictures, by kind: ``gif``, ``fill_order``, ``order``, ``statistics``.

    The animation shows all decodes, which have one prompt, the others show the first. ``method``
    describes the decoder of the first, for its blocks.
    """
    for kind, path in files.items():
        suffixes = (".gif",) if kind == "gif" else (".pdf", ".png", ".svg")
        if path.suffix.lower() not in suffixes:
            wanted = " or ".join(suffixes)
            raise ValueError(f"{kind}: expected a file name that ends in {wanted}, got {path}")
    for sample in samples:
        if sample.record.num_generated == 0:
            raise ValueError(f"trajectory {sample.record.uid!r}: an empty response has no picture")
    record = samples[0].record
    regions = regions_of(record, method)
    for kind, path in files.items():
        if kind == "gif":
            write_gif(path, samples, pieces, theme=theme)
        elif kind == "fill_order":
            plot_fill_order(record, path, regions=regions, pieces=pieces, theme=theme)
        elif kind == "order":
            plot_order(record, path, regions=regions, pieces=pieces, theme=theme)
        else:
            plot_statistics(record, path, regions=regions, theme=theme)
