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
    *,
    method: Mapping[str, Any] | None = None,
    gif: Path | None = None,
    heatmap: Path | None = None,
    order: Path | None = None,
    statistics: Path | None = None,
    theme: str = "light",
    fps: float = 4.0,
) -> list[Path]:
    """Writes the pictures whose file is given, and returns these files.

    Args:
        samples: decodes of one prompt; the animation shows all, the others the first.
        pieces: texts of tokens.
        method: description of the first decode's decoder, for its blocks.
        gif: animation.
        heatmap: canvas after every step, coloured by the step that wrote.
        order: commit step against position.
        statistics: pace, fill and confidences.
        theme: ``light`` or ``dark``.
        fps: steps a second of the animation.
    """
    _check_suffix("gif", gif, {".gif"})
    for name, path in (("heatmap", heatmap), ("order", order), ("statistics", statistics)):
        _check_suffix(name, path, {".png", ".svg", ".pdf"})
    for sample in samples:
        if sample.record.num_generated == 0:
            raise ValueError(f"trajectory {sample.record.uid!r}: an empty response has no picture")
    record = samples[0].record
    regions = regions_of(record, method)
    if gif is not None:
        write_gif(gif, samples, pieces, theme=theme, fps=fps)
    if heatmap is not None:
        plot_fill_order(record, heatmap, regions=regions, pieces=pieces, theme=theme)
    if order is not None:
        plot_order(record, order, regions=regions, pieces=pieces, theme=theme)
    if statistics is not None:
        plot_statistics(record, statistics, regions=regions, theme=theme)
    return [path for path in (gif, heatmap, order, statistics) if path is not None]


def _check_suffix(name: str, path: Path | None, suffixes: set[str]) -> None:
    if path is not None and path.suffix.lower() not in suffixes:
        raise ValueError(
            f"{name}: expected a file name that ends in {' or '.join(sorted(suffixes))}, got {path}"
        )
