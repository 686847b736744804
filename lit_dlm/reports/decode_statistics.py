"""Statistics of one decode: pace, fill of the regions, confidences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from lit_dlm.reports.fill_order import last_writes
from lit_dlm.reports.regions import Region
from lit_dlm.reports.themes import Theme
from lit_dlm.trajectories.record import Trajectory


def writes_per_step(record: Trajectory, region: Region) -> NDArray[np.int64]:
    """``(T,)`` int64: tokens that each step wrote inside a region, overwritten ones included."""
    events = record.events()
    inside = (events[:, 1] >= region.start) & (events[:, 1] < region.end)
    written = events[inside & (events[:, 2] != record.mask_id), 0]
    return np.bincount(written, minlength=record.num_steps)


def fill_rate(record: Trajectory, region: Region) -> NDArray[np.float64]:
    """``(T + 1,)`` float64: the share of a region that holds a token, from the start to the end."""
    filled = last_writes(record)[:, region.start : region.end] != -1
    return filled.mean(1)


def statistics_figure(record: Trajectory, regions: Sequence[Region], theme: Theme) -> Figure:
    """Four panels: tokens per step, tokens in all, share filled, confidences; each by region.

    Without regions, or with more than eight, the response is drawn as one.
    """
    if not regions or len(regions) > 8:
        regions = [Region("response", 0, record.num_generated)]
    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    axes = figure.subplots(2, 2)
    _pace(axes[0][0], axes[0][1], record, regions, theme)
    for number, part in enumerate(regions):
        axes[1][0].plot(
            range(record.num_steps + 1),
            100 * fill_rate(record, part),
            color=theme.series[number % len(theme.series)],
        )
    axes[1][0].set(xlabel="step", ylabel="filled, %", ylim=(0, 103))
    _confidences(axes[1][1], record, regions, theme)
    for axis in axes.flat:
        axis.grid(alpha=0.5)
        axis.set_axisbelow(True)
    for axis in axes.flat[:3]:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(regions) > 1:
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8))
    return figure


def _pace(
    left: Axes, right: Axes, record: Trajectory, regions: Sequence[Region], theme: Theme
) -> None:
    steps = np.arange(1, record.num_steps + 1)
    below = np.zeros(record.num_steps)
    for number, part in enumerate(regions):
        colour = theme.series[number % len(theme.series)]
        counts = writes_per_step(record, part)
        left.bar(steps, counts, bottom=below, color=colour, width=0.85, label=part.name)
        right.plot(np.append(0, steps), np.append(0, counts.cumsum()), color=colour)
        below += counts
    left.set(xlabel="step", ylabel="tokens written")
    right.set(xlabel="step", ylabel="tokens written in all")
    right.set_ylim(0, max(1.0, right.get_ylim()[1]))


def _confidences(axis: Axes, record: Trajectory, regions: Sequence[Region], theme: Theme) -> None:
    axis.set(xlabel="confidence when written", ylabel="tokens", xlim=(0, 1))
    if "commit_prob" not in record.signals:
        axis.text(0.5, 0.5, "not recorded", ha="center", va="center", color=theme.muted)
        axis.set(xticks=[], yticks=[])
        return
    prob = record.signals["commit_prob"].astype(np.float64)
    groups = [prob[part.start : part.end] for part in regions]
    axis.hist(
        [group[np.isfinite(group)] for group in groups],
        bins=np.linspace(0, 1, 21).tolist(),
        stacked=True,
        color=[theme.series[number % len(theme.series)] for number in range(len(groups))],
    )
