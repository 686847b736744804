"""A profile: speed and quality of methods as a file, a table, a picture, and in trackers."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from matplotlib import image
from matplotlib.figure import Figure

from lit_dlm.reports.plots import common_legend, draw_methods, family, save_figure, tidy_axes
from lit_dlm.reports.summary import Columns, MethodSummary, by_task, markdown_tables, percent
from lit_dlm.system.files import write_atomically


def tokens_per_second(one: MethodSummary) -> float:
    """Response positions filled per second of decoding, all rows of a batch together."""
    # A batch shares its time equally among its rows, so the rate of one row is that of all.
    return one.tokens_per_step * (one.nfe / max(one.seconds, 1e-12))


def profile_row(one: MethodSummary) -> dict[str, Any]:
    """A line of ``profile.csv``; useful tokens are those before the first end of text."""
    low, high = one.interval or (None, None)
    return {
        "task": one.task,
        "method": one.method,
        "curve": family(one.method),
        "n": one.n,
        "accuracy": one.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "nfe": one.nfe,
        "tokens_per_forward": one.tokens_per_step,
        "tokens_per_second": tokens_per_second(one),
        "useful_tokens_per_second": one.useful_tokens_per_step
        * (one.nfe / max(one.seconds, 1e-12)),
        "ms_per_sample": 1000.0 * one.seconds,
        "policy_share": one.policy_share,
        "lockstep": one.lockstep,
    }


def write_profile(summaries: Sequence[MethodSummary], folder: Path) -> None:
    """Writes ``profile.csv``, ``profile.md`` and ``profile.png`` to a folder."""
    file = io.StringIO()
    writer = csv.DictWriter(file, profile_row(summaries[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(profile_row, summaries))
    write_atomically(folder / "profile.csv", file.getvalue())
    write_atomically(folder / "profile.md", markdown_tables(summaries, COLUMNS))
    plot_profile(summaries, folder / "profile.png")


COLUMNS: Columns = {
    "method": lambda one: one.method,
    "quality": lambda one: percent(one.accuracy, one.interval),
    "forwards": lambda one: f"{one.nfe:.1f}",
    "tokens/forward": lambda one: f"{one.tokens_per_step:.2f}",
    "tokens/s": lambda one: f"{tokens_per_second(one):.0f}",
    "useful tokens/s": lambda one: f"{profile_row(one)['useful_tokens_per_second']:.0f}",
    "ms/sample": lambda one: f"{1000 * one.seconds:.1f}",
    "lockstep": lambda one: "-" if one.lockstep is None else f"{one.lockstep:.2f}",
    "n": lambda one: str(one.n),
}


def plot_profile(summaries: Sequence[MethodSummary], path: Path) -> None:
    """Quality (speed if ungraded) against forwards and against speed, a row of panels per task."""
    tasks = list(by_task(summaries))
    curves = list(dict.fromkeys(family(one.method) for one in summaries))
    figure = Figure(figsize=(9.2, 3.6 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), 2, squeeze=False)
    for (left, right), (task, group) in zip(axes, tasks, strict=True):
        is_graded = all(one.accuracy is not None for one in group)
        y, name = (None, "quality, %") if is_graded else (tokens_per_second, "tokens per second")
        draw_methods(left, group, curves, lambda one: one.nfe, y)
        left.set(title=task, xlabel="forwards per sample", ylabel=name, xlim=(0, None))
        x = tokens_per_second if is_graded else attrgetter("tokens_per_step")
        draw_methods(right, group, curves, x, y)
        speed = "tokens per second" if is_graded else "tokens per forward"
        right.set(xlabel=speed, ylabel=name, xlim=(0, None))
        tidy_axes(left, right)
    # About a hundred characters fit below the panels, and a legend's symbol is eight wide.
    common_legend(figure, max(1, 100 // (max(map(len, curves)) + 8)))
    save_figure(figure, path)


def log_profile(logger: Logger, summaries: Sequence[MethodSummary], picture: Path | None) -> None:
    """Logs all methods over their forwards, the table and the picture (PNG); closes the logger."""
    rows = [profile_row(one) for one in sorted(summaries, key=lambda one: one.nfe)]
    unlogged = ("task", "method", "curve", "n", "accuracy_low", "accuracy_high")
    for row in rows:
        logged = {name: x for name, x in row.items() if name not in unlogged and x is not None}
        metrics = {f"{row['task']}/{row['curve']}/{name}": value for name, value in logged.items()}
        # Steps of a tracker are whole numbers, and here the axis of every curve: forwards.
        logger.log_metrics(metrics, step=round(row["nfe"]))
    if isinstance(logger, TensorBoardLogger):
        writer: Any = logger.experiment
        writer.add_text("profile", markdown_tables(summaries, COLUMNS))
        if picture is not None:
            writer.add_image("profile", image.imread(picture)[..., :3], dataformats="HWC")
    elif isinstance(logger, WandbLogger):
        data = [list(profile_row(one).values()) for one in summaries]
        logger.log_table("profile", columns=list(rows[0]), data=data)
        if picture is not None:
            logger.log_image("profile_plot", [str(picture)])
    logger.finalize("success")
    if isinstance(logger, WandbLogger):
        # Lightning leaves the run open for what may follow a fit; here nothing follows.
        logger.experiment.finish()
