"""A profile: speed and quality of methods as a file, a table, a picture, and in trackers."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from matplotlib import image
from matplotlib.figure import Figure

from lit_dlm.reports.plots import COLOURS, family, interval_bars, tidy_axes
from lit_dlm.reports.results import write_atomically
from lit_dlm.reports.summary import MethodSummary
from lit_dlm.reports.tables import markdown_table, percent
from lit_dlm.reports.themes import save_figure

_NEEDS = {"csv": (), "tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
_HEADERS = (
    "method", "quality", "forwards", "tokens/forward", "tokens/s", "useful tokens/s", "ms/sample",
    "lockstep", "n",
)  # fmt: skip
_LOGGED = (
    "accuracy",
    "nfe",
    "tokens_per_forward",
    "tokens_per_second",
    "useful_tokens_per_second",
    "ms_per_sample",
    "policy_share",
    "lockstep",
)


@dataclass(frozen=True, kw_only=True)
class ProfilePoint:
    """Speed and quality of one method on one task."""

    task: str
    method: str
    curve: str
    """The method without its number of steps."""
    n: int
    """Samples."""
    accuracy: float | None
    """Fraction of right samples; ``None`` where nothing was graded."""
    accuracy_low: float | None
    """Lower end of the accuracy's 95 % interval."""
    accuracy_high: float | None
    nfe: float
    """Mean forwards of the backbone per sample."""
    tokens_per_forward: float
    """Response cells filled per forward."""
    tokens_per_second: float
    """Response cells filled per second of decoding in one process, all rows of a batch together."""
    useful_tokens_per_second: float
    """The same, counting only tokens before the first end of text."""
    ms_per_sample: float
    """Decode time per sample, grading excluded."""
    policy_share: float
    """Share of the decode time that the commit policy took."""
    lockstep: float | None
    """Mean lockstep score; ``None`` for a method without a layout."""


def profile_points(summaries: Sequence[MethodSummary]) -> list[ProfilePoint]:
    """Points from the summaries of a result folder, in their order."""
    return [
        ProfilePoint(
            task=one.task,
            method=one.method,
            curve=family(one.method),
            n=one.n,
            accuracy=one.accuracy,
            accuracy_low=one.interval and one.interval[0],
            accuracy_high=one.interval and one.interval[1],
            nfe=one.nfe,
            tokens_per_forward=one.tokens_per_step,
            tokens_per_second=one.tokens_per_step * one.nfe / max(one.seconds, 1e-12),
            useful_tokens_per_second=one.useful_tokens_per_step * one.nfe / max(one.seconds, 1e-12),
            ms_per_sample=1000.0 * one.seconds,
            policy_share=one.policy_share,
            lockstep=one.lockstep,
        )
        for one in summaries
    ]


def write_profile(points: Sequence[ProfilePoint], folder: Path) -> None:
    """Writes ``profile.csv``, ``profile.md`` and ``profile.png`` to a folder."""
    write_atomically(folder / "profile.csv", csv_text(points))
    write_atomically(folder / "profile.md", markdown_tables(points))
    plot_profile(points, folder / "profile.png")


def csv_text(points: Sequence[ProfilePoint]) -> str:
    """One line per point under the names of :class:`ProfilePoint`; empty where nothing is known."""
    file = io.StringIO()
    names = [field.name for field in fields(ProfilePoint)]
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, points))
    return file.getvalue()


def markdown_tables(points: Sequence[ProfilePoint]) -> str:
    """One table per task."""
    return "\n".join(
        markdown_table(task, _HEADERS, *(_cells(one) for one in points if one.task == task))
        for task in dict.fromkeys(point.task for point in points)
    )


def _cells(point: ProfilePoint) -> tuple[str, ...]:
    low, high = point.accuracy_low, point.accuracy_high
    return (
        point.method,
        percent(point.accuracy, None if low is None or high is None else (low, high)),
        f"{point.nfe:.1f}",
        f"{point.tokens_per_forward:.2f}",
        f"{point.tokens_per_second:.0f}",
        f"{point.useful_tokens_per_second:.0f}",
        f"{point.ms_per_sample:.1f}",
        "-" if point.lockstep is None else f"{point.lockstep:.2f}",
        str(point.n),
    )


def plot_profile(points: Sequence[ProfilePoint], path: Path) -> None:
    """Quality against forwards and against tokens per second, one row of panels per task.

    Methods that differ only in their number of steps are one curve. Bars are 95 % intervals.
    Where nothing was graded the panels show speed against forwards instead.
    """
    tasks = list(dict.fromkeys(point.task for point in points))
    curves = list(dict.fromkeys(point.curve for point in points))
    figure = Figure(figsize=(9.2, 3.6 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), 2, squeeze=False)
    for row, task in enumerate(tasks):
        group = [point for point in points if point.task == task]
        graded = all(point.accuracy is not None for point in group)
        for number, curve in enumerate(curves):
            line = sorted((p for p in group if p.curve == curve), key=lambda point: point.nfe)
            style = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": "os^Dv"[number // len(COLOURS) % 5],
                "label": curve,
                "linewidth": 1.3,
                "markersize": 5,
            }
            speed = [point.tokens_per_second for point in line]
            forwards = [point.nfe for point in line]
            if graded:
                quality = [100 * (point.accuracy or 0.0) for point in line]
                error = interval_bars(
                    [
                        (p.accuracy or 0.0, (p.accuracy_low or 0.0, p.accuracy_high or 0.0))
                        for p in line
                    ]
                )
                axes[row][0].errorbar(forwards, quality, yerr=error, capsize=2, **style)
                axes[row][1].errorbar(speed, quality, yerr=error, capsize=2, **style)
            else:
                tokens = [point.tokens_per_forward for point in line]
                axes[row][0].plot(forwards, speed, **style)
                axes[row][1].plot(tokens, speed, **style)
        left, right = ("quality, %",) * 2 if graded else ("tokens per second",) * 2
        axes[row][0].set(title=task, xlabel="forwards per sample", ylabel=left, xlim=(0, None))
        axes[row][1].set(
            xlabel="tokens per second" if graded else "tokens per forward",
            ylabel=right,
            xlim=(0, None),
        )
        tidy_axes(*axes[row])
    handles, labels = axes[0][0].get_legend_handles_labels()
    # About a hundred characters fit below the panels, and a line's mark takes the width of eight.
    columns = max(1, min(len(labels), 100 // (max(map(len, labels)) + 8)))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize="small", frameon=False
    )
    save_figure(figure, path)


def check_installed(names: Sequence[str]) -> None:
    """Refuses loggers whose package is missing, before anything is decoded."""
    for name in names:
        packages = _NEEDS[name]
        if packages and not any(find_spec(package) for package in packages):
            raise ValueError(
                f"loggers: '{name}' needs the package {packages[0]}, which is not installed: "
                f"pip install {packages[0]}"
            )


def make_logger(
    name: str, folder: Path, *, project: str = "lit-dlm", offline: bool = False
) -> Logger:
    """One of Lightning's loggers.

    Args:
        name: ``csv``, ``tensorboard`` or ``wandb``.
        folder: the run's folder, whose name is the run's.
        project: of W&B.
        offline: W&B writes to the folder only; ``wandb sync`` sends it later.
    """
    if name == "csv":
        return CSVLogger(str(folder), name="profile_csv", version="")
    if name == "tensorboard":
        return TensorBoardLogger(str(folder), name="tensorboard", version="")
    folder.mkdir(parents=True, exist_ok=True)
    return WandbLogger(
        name=folder.resolve().name, project=project, save_dir=str(folder), offline=offline
    )


def log_profile(logger: Logger, points: Sequence[ProfilePoint], picture: Path | None) -> None:
    """Logs all points, the table and the picture (a PNG file), if any, and closes the logger.

    A metric's name is ``{task}/{curve}/{metric}`` and its step the rounded number of forwards, so
    that a tracker draws quality and speed over forwards, curve by curve.
    """
    for point in sorted(points, key=lambda one: one.nfe):
        facts = asdict(point)
        prefix = f"{point.task}/{point.curve}"
        metrics = {f"{prefix}/{name}": facts[name] for name in _LOGGED if facts[name] is not None}
        logger.log_metrics(metrics, step=round(point.nfe))
    if isinstance(logger, TensorBoardLogger):
        writer: Any = logger.experiment
        writer.add_text("profile", markdown_tables(points))
        if picture is not None:
            writer.add_image("profile", image.imread(picture)[..., :3], dataformats="HWC")
    elif isinstance(logger, WandbLogger):
        rows = [list(asdict(point).values()) for point in points]
        logger.log_table("profile", columns=list(asdict(points[0])), data=rows)
        if picture is not None:
            logger.log_image("profile_plot", [str(picture)])
    logger.finalize("success")
    if isinstance(logger, WandbLogger):
        # Lightning leaves the run open for what comes after a fit; here nothing does.
        logger.experiment.finish()
