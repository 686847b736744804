"""All pictures of a decode in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_dlm.reports.animation import write_gif
from lit_dlm.reports.order import fill_order_figure, order_figure, statistics_figure
from lit_dlm.reports.parts import parts_of
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.plots import THEMES, plot_style, save_figure
from lit_dlm.reports.samples import Sample

FIGURES = {"fill_order": fill_order_figure, "order": order_figure, "statistics": statistics_figure}


def write_pictures(
    samples: Sequence[Sample],
    pieces: TokenPieces,
    files: Mapping[str, Path],
    *,
    method: Mapping[str, Any] | None = None,
    theme: str = "light",
) -> None:
    """Writes pictures by kind: ``gif`` of all decodes, others of the first, of this method."""
    # All names first: a wrong one must not leave half of the pictures.
    for kind, path in files.items():
        suffixes = (".gif",) if kind == "gif" else (".pdf", ".png", ".svg")
        if path.suffix.lower() not in suffixes:
            wanted = " or ".join(suffixes)
            raise ValueError(f"{kind}: expected a file name that ends in {wanted}, got {path}")
    record = samples[0].record
    if not all(sample.record.num_generated for sample in samples):
        raise ValueError(f"trajectory {record.uid!r}: an empty response has no picture")
    parts = parts_of(record, method)
    for kind, path in files.items():
        if kind == "gif":
            write_gif(path, samples, pieces, theme=theme)
            continue
        with plot_style(THEMES[theme]):
            save_figure(FIGURES[kind](record, parts, pieces, THEMES[theme]), path)
