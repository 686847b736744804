"""All pictures of a decode in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dlm.reports.animation import write_gif
from lit_dlm.reports.order import fill_order_figure, order_figure, statistics_figure
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.plots import plot_style, save_figure
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
            continue
        with plot_style(theme) as colours:  # colours are looked up while the style holds
            if kind == "fill_order":
                figure = fill_order_figure(record, regions, pieces, colours)
            elif kind == "order":
                figure = order_figure(record, regions, pieces, colours)
            else:
                figure = statistics_figure(record, regions, colours)
            save_figure(figure, path)
