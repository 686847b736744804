"""Colours of pictures on light and on dark pages."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import cycler  # type: ignore[attr-defined]
from matplotlib.figure import Figure

from lit_dlm.reports.results import write_atomically


@dataclass(frozen=True)
class Theme:
    """Colours as ``#rrggbb``."""

    background: str
    text: str
    muted: str
    line: str
    mask: str
    """A cell that is not written yet."""
    accent: str
    """What was written last."""
    accent_text: str
    series: tuple[str, ...]
    """Curves and regions, told apart by colour-blind readers too."""


THEMES: dict[str, Theme] = {
    "light": Theme(
        background="#ffffff",
        text="#1b1c20",
        muted="#5a5d66",
        line="#d9dadf",
        mask="#dfe1e7",
        accent="#0a5bb5",
        accent_text="#ffffff",
        series=(
            "#0072B2", "#D55E00", "#009E73", "#CC79A7",
            "#56B4E9", "#E69F00", "#777777", "#8B1A4A",
        ),
    ),
    "dark": Theme(
        background="#121316",
        text="#e9eaee",
        muted="#a6aab6",
        line="#343842",
        mask="#33373f",
        accent="#74b5ff",
        accent_text="#0c1420",
        series=(
            "#56B4E9", "#F0883E", "#3FC79A", "#E29BC4",
            "#8CC8F0", "#F2C14E", "#B0B4BD", "#D9667F",
        ),
    ),
}  # fmt: skip


@contextmanager
def plot_style(name: str) -> Iterator[Theme]:
    """Colours of matplotlib figures that are built inside, by the name of a theme."""
    theme = THEMES[name]
    style: Any = {
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.muted,
        "axes.labelcolor": theme.text,
        "axes.titlecolor": theme.text,
        "axes.prop_cycle": cycler(color=theme.series),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.line,
        "text.color": theme.text,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.labelcolor": theme.text,
        "ytick.labelcolor": theme.text,
        "text.parse_math": False,  # tokens may well be dollar signs
        "legend.frameon": False,
        "font.size": 10,
    }
    with mpl.rc_context(style):
        yield theme


def monospaced_font() -> Path:
    """The monospaced font that matplotlib ships (DejaVu Sans Mono)."""
    return Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure to a file, whose suffix gives the format."""
    write_atomically(path, figure_bytes(figure, suffix=path.suffix))


def figure_bytes(figure: Figure, *, suffix: str = ".png", dpi: int = 150) -> bytes:
    """A figure as a file in memory."""
    data = io.BytesIO()
    figure.savefig(data, format=suffix.removeprefix("."), dpi=dpi)
    return data.getvalue()
