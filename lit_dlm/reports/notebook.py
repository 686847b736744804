"""Decodes and runs in a notebook: pages and pictures that it shows in its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_dlm.reports.pages import data_uri, render
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.samples import SampleSet, load_samples, sample_of
from lit_dlm.reports.summary import summarise_folder
from lit_dlm.reports.viewer import SCRIPTS, ViewedSet, page_data
from lit_dlm.trajectories.record import Trajectory

if TYPE_CHECKING:
    from pandas import DataFrame

HEIGHT = 560  # pixels of the viewer below a cell


@dataclass(frozen=True)
class Shown:
    """HTML that a notebook shows where a cell returns it; ``save`` writes it for a browser."""

    page: str = field(repr=False)
    is_framed: bool = True  # a page of its own, with scripts

    def _repr_html_(self) -> str:
        if not self.is_framed:
            return self.page
        # A page of its own that reaches nothing of the notebook: its texts are those of models.
        attributes = 'sandbox="allow-scripts" style="width: 100%; border: 0"'
        return f'<iframe {attributes} height="{HEIGHT}" srcdoc="{escape(self.page)}"></iframe>'

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.page, encoding="utf-8")


def show_records(
    records: Sequence[Trajectory],
    tokenizer: Any | None = None,
    decoder: Mapping[str, Any] | None = None,
) -> Shown:
    """Returns the viewer with records, whose uids differ; without a tokenizer it shows token ids.

    ``decoder`` is the description of the one that made them.
    """
    if isinstance(tokenizer, str):
        # Imported here: tokenizers take seconds to import, and ids need none.
        from lit_dlm.backbones.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(tokenizer)
    samples = SampleSet(
        label="records",
        source=Path("records"),
        shards=[],
        samples=[sample_of(record, None) for record in records],
        num_available=len(records),
        methods={"": decoder or {}},
    )
    return _viewer(ViewedSet(samples, TokenPieces(tokenizer)))


def _viewer(viewed: ViewedSet) -> Shown:
    title = f"Decodes of {viewed.samples.label}"
    data = page_data([viewed], title=title)
    return Shown(render("viewer", scripts=SCRIPTS, title=title, data=data))


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path

    @property
    def results(self) -> DataFrame:
        """One row per decoded sample, with the columns of its line in the results."""
        # Imported here, as it takes half a second.
        from pandas import DataFrame

        results = ResultFolder(self.folder / "results")
        return DataFrame([asdict(row) for pair in results.pairs() for row in results.rows(*pair)])

    def records(self, **chosen: Any) -> list[Trajectory]:
        """Returns its trajectories: all, or as options of :func:`load_samples` choose."""
        return [sample.record for sample in load_samples(self.folder, **chosen).samples]

    def show(self, *, tokenizer: str | None = None, limit: int = 100, **chosen: Any) -> Shown:
        """Returns the viewer with the run's decodes, at most ``limit`` of those chosen."""
        from lit_dlm.reports.viewer_command import pieces_of

        samples = load_samples(self.folder, limit=limit, **chosen)
        return _viewer(ViewedSet(samples, pieces_of(samples.shards, tokenizer)))

    def plots(self) -> Shown:
        """Returns accuracy against steps for each task with grades, and the training curves."""
        # Imported here, as matplotlib takes a second to import.
        from lit_dlm.reports.plots import (
            THEMES,
            curves_figure,
            figure_bytes,
            front_figure,
            read_curves,
        )

        figures = [front_figure(summarise_folder(self.folder / "results"), THEMES["light"])]
        if curves := read_curves(self.folder):
            figures.append(curves_figure(curves))
        drawn = (data_uri(figure_bytes(one, dpi=100)) for one in figures if one is not None)
        return Shown("".join(f'<img src="{one}">' for one in drawn), is_framed=False)


def load_run(folder: str | Path) -> Run:
    """Opens a run folder: its results as a table, its records and its plots."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a run folder, found none")
    return Run(folder)
