"""Decodes and runs in the output of a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

from lit_dlm.reports.pages import data_uri
from lit_dlm.reports.pieces import TokenPieces, tokenizer_of
from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.samples import SampleSet, load_samples, sample_of
from lit_dlm.reports.summary import summarise_folder
from lit_dlm.reports.viewer import ViewedSet, viewer_page
from lit_dlm.trajectories.record import Trajectory

HEIGHT = 560  # pixels of the viewer below a cell


@dataclass(frozen=True)
class Shown:
    """HTML that a notebook shows where a cell returns it."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def show_records(
    records: Sequence[Trajectory], tokenizer: Any, decoder: Mapping[str, Any] | None = None
) -> Shown:
    """Returns the viewer with records; ``tokenizer`` is one, its name, or ``None`` for token ids.

    ``decoder`` is the description of the one that made the records.
    """
    if isinstance(tokenizer, str):
        tokenizer = tokenizer_of([], tokenizer)
    samples = SampleSet(
        label="records",
        source=Path("records"),
        shards=[],
        samples=[sample_of(record, None) for record in records],
        num_available=len(records),
        methods={"": decoder or {}},
    )
    return _viewer(samples, TokenPieces(tokenizer))


def _viewer(samples: SampleSet, pieces: TokenPieces) -> Shown:
    title = f"Decodes of {samples.label}"
    page = escape(viewer_page([ViewedSet(samples, pieces)], title=title))
    # A page of its own that reaches nothing of the notebook: its texts are those of models.
    style = f'sandbox="allow-scripts" height="{HEIGHT}" style="width: 100%; border: 0"'
    return Shown(f'<iframe {style} srcdoc="{page}"></iframe>')


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path

    @property
    def results(self) -> Any:
        """A pandas ``DataFrame``: a row per decoded sample, columns as in the lines on disk."""
        results = ResultFolder(self.folder / "results")
        rows = [asdict(row) for pair in results.pairs() for row in results.rows(*pair)]
        return pa.Table.from_pylist(rows).to_pandas()

    def records(self, **chosen: Any) -> list[Trajectory]:
        """Returns its trajectories: all, or what options of :func:`load_samples` choose."""
        return [sample.record for sample in load_samples(self.folder, **chosen).samples]

    def show(self, *, tokenizer: str | None = None, limit: int = 100, **chosen: Any) -> Shown:
        """Returns the viewer with its decodes, at most ``limit`` of those chosen."""
        from lit_dlm.reports.viewer_command import pieces_of

        samples = load_samples(self.folder, limit=limit, **chosen)
        return _viewer(samples, pieces_of(samples.shards, tokenizer))

    def plots(self) -> Shown:
        """Returns accuracy against steps for each graded task, and the curves of training."""
        from lit_dlm.reports import plots  # imported here, as matplotlib takes a second

        theme, curves = plots.THEMES["light"], plots.read_curves(self.folder / "logs")
        front = plots.front_figure(summarise_folder(self.folder / "results"), theme)
        figures = [front, plots.curve_figure(curves, theme) if curves else None]
        drawn = [data_uri(plots.figure_bytes(one, dpi=100)) for one in figures if one is not None]
        return Shown("".join(f'<img src="{one}">' for one in drawn))


def load_run(folder: str | Path) -> Run:
    """Opens a run folder: its results as a table, its records and its plots."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: expected a run folder, found none")
    return Run(Path(folder))
