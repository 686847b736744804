"""In which order a response was filled: heat map, scatter, Kendall's tau, pace and confidences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torchmetrics.functional import kendall_rank_corrcoef

from lit_dlm.reports.parts import Part
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.plots import Theme
from lit_dlm.trajectories.record import Trajectory


def left_to_rightness(
    record: Trajectory, *, positions: NDArray[np.bool_] | None = None
) -> float | None:
    """Kendall's tau-b between position and commit step: 1 is left to right, -1 right to left.

    ``positions``, ``(G,)`` bool, selects among those that a step wrote. ``None`` if these have
    fewer than two distinct steps.
    """
    chosen = record.commit_step >= 0
    if positions is not None:
        chosen &= positions
    index = np.flatnonzero(chosen)
    steps = record.commit_step[index]
    # Without two distinct steps every pair is a tie, and tau-b divides by zero.
    if len(np.unique(steps)) < 2:
        return None
    # The variant b: tokens of one step are ties and neither for nor against the order of writing.
    tau = kendall_rank_corrcoef(
        torch.from_numpy(index.astype(np.float32)), torch.from_numpy(steps.astype(np.float32))
    )
    assert isinstance(tau, torch.Tensor)
    return float(tau)


def text_positions(record: Trajectory, pieces: TokenPieces) -> NDArray[np.bool_]:
    """``(G,)`` bool: positions whose final token is neither a mask nor a special token."""
    tokens = record.tokens.tolist()
    return np.array([t != record.mask_id and not pieces.is_special(t) for t in tokens], dtype=bool)


def last_writes(record: Trajectory) -> NDArray[np.int32]:
    """``(T + 1, G)`` int32: the step that wrote each token; -1 for a mask, -2 for a given token."""
    states = record.all_states()
    writer = np.full(states.shape, -1, dtype=np.int32)
    if record.given is not None:
        writer[:, record.given] = -2
    # Events are in order of their steps, so that a later write stands over an earlier one.
    for step, position, _ in record.events().tolist():
        writer[step + 1 :, position] = step
    writer[states == record.mask_id] = -1  # also where a step took a token back
    return writer


def writes_per_step(record: Trajectory, part: Part) -> NDArray[np.int64]:
    """``(T,)`` int64: tokens that each step wrote inside a part, overwritten ones included."""
    step, position, token = record.events().T
    inside = (position >= part.start) & (position < part.end) & (token != record.mask_id)
    return np.bincount(step[inside], minlength=record.num_steps)


def fill_rate(record: Trajectory, part: Part) -> NDArray[np.float64]:
    """``(T + 1,)`` float64: the share of a part that holds a token after ``t`` steps."""
    filled = last_writes(record)[:, part.start : part.end] != -1
    return filled.mean(1)


def fill_order_figure(
    record: Trajectory, parts: Sequence[Part], pieces: TokenPieces, theme: Theme
) -> Figure:
    """Heat map: the canvas after every step, each token coloured by the step that wrote it."""
    writer = last_writes(record)
    # The canvas before the first step is all masks, and would be one empty row on top.
    writer = writer[1:] if record.num_steps else writer
    T, G = writer.shape
    width = min(max(5.0, 0.17 * G + 1.6), 13.0)
    height = min(max(2.4, 0.11 * T + 1.5), 7.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.add_subplot()
    axis.set_facecolor(theme.mask)
    image = axis.imshow(
        np.ma.masked_where(writer < 0, writer + 1),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=1,
        vmax=max(record.num_steps, 2),
        extent=(-0.5, G - 0.5, T + 0.5, 0.5),  # steps from 1, as in all texts for readers
    )
    axis.set(ylabel="step", ylim=(T + 0.5, 0.5), xlim=(-0.5, G - 0.5))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=False)
    step, position, token = record.events().T
    remasked = token == record.mask_id
    if remasked.any():
        crosses: Any = {"color": theme.series[1], "markersize": 5, "label": "masked again"}
        axis.plot(position[remasked], step[remasked] + 1, "x", **crosses)
        axis.legend(loc="upper right", fontsize="small")
    axis.set_xlabel("response position")
    if G <= 96:  # beyond that, labels would run into each other at the widest figure
        labels = []
        tokens = zip(record.tokens.tolist(), text_positions(record, pieces), strict=True)
        for token_id, is_text in tokens:
            text = pieces.text(token_id) if is_text else ""
            text = text.strip(" ").replace("\n", "⏎").replace("\t", "⇥")
            labels.append(text if len(text) <= 8 else text[:7] + "…")
        axis.set_xticks(range(G), labels, rotation=90, family="monospace", fontsize=8)
        axis.tick_params(axis="x", length=0)
        axis.set_xlabel("response position, with its final token")
    _bands(axis, parts, theme)
    bar = figure.colorbar(image, ax=axis, pad=0.01, fraction=0.05)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar.set_label("written in step")
    bar.outline.set_visible(False)
    return figure


def order_figure(
    record: Trajectory, parts: Sequence[Part], pieces: TokenPieces, theme: Theme
) -> Figure:
    """Scatter of commit step against position, with Kendall's tau; special tokens are hollow."""
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axis = figure.add_subplot()
    text, written = text_positions(record, pieces), record.commit_step >= 0
    for number, part in enumerate(parts or [Part("", 0, record.num_generated)]):
        index = np.arange(part.start, part.end)
        index = index[written[part.start : part.end]]
        solid, hollow = index[text[index]], index[~text[index]]
        colour = theme.series[number % len(theme.series)]
        axis.scatter(solid, record.commit_step[solid] + 1, s=16, color=colour, label=part.name)
        axis.scatter(
            hollow, record.commit_step[hollow] + 1, s=16, facecolors="none", edgecolors=colour
        )
    axis.set(xlabel="response position", ylabel="written in step", xlim=(-1, record.num_generated))
    tau, inner = left_to_rightness(record), left_to_rightness(record, positions=text)
    title = "Kendall's tau: " + ("undefined" if tau is None else f"{tau:+.2f}")
    if inner is not None and not text.all():
        title += f" ({inner:+.2f} without special tokens)"
    axis.set_title(title, fontsize=11)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.5)
    if 1 < len(parts) <= 8:
        axis.legend(fontsize="small")
    return figure


def statistics_figure(
    record: Trajectory, parts: Sequence[Part], _: TokenPieces, theme: Theme
) -> Figure:
    """Four panels: tokens per step, tokens in all, share filled, confidences; each by part."""
    if not parts or len(parts) > 8:
        parts = [Part("response", 0, record.num_generated)]
    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    axes = figure.subplots(2, 2)
    (pace, total), (filled, confidence) = axes
    steps = np.arange(record.num_steps + 1)
    below = np.zeros(record.num_steps)
    for part, colour in zip(parts, theme.series, strict=False):  # there are at least as many
        counts = writes_per_step(record, part)
        pace.bar(steps[1:], counts, bottom=below, color=colour, width=0.85, label=part.name)
        below += counts
        total.plot(steps, np.append(0, counts.cumsum()), color=colour)
        filled.plot(steps, 100 * fill_rate(record, part), color=colour)
    pace.set(xlabel="step", ylabel="tokens written")
    total.set(xlabel="step", ylabel="tokens written in all")
    total.set_ylim(0, max(1.0, total.get_ylim()[1]))
    filled.set(xlabel="step", ylabel="filled, %", ylim=(0, 103))
    confidence.set(xlabel="confidence when written", ylabel="tokens", xlim=(0, 1))
    if "commit_prob" in record.signals:
        # Stored as float16, in which the edges of the bins are not exact.
        prob = record.signals["commit_prob"].astype(np.float64)
        groups = [prob[part.start : part.end] for part in parts]
        confidence.hist(
            [group[np.isfinite(group)] for group in groups],
            bins=np.linspace(0, 1, 21).tolist(),
            stacked=True,
            color=theme.series[: len(groups)],
        )
    else:
        style: Any = {"ha": "center", "va": "center", "color": theme.muted}
        confidence.text(0.5, 0.5, "not recorded", **style)
        confidence.set(xticks=[], yticks=[])
    for axis in axes.flat:
        axis.grid(alpha=0.5)
        axis.set_axisbelow(True)
    for axis in axes.flat[:3]:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(parts) > 1:
        handles, labels = pace.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _bands(axis: Axes, parts: Sequence[Part], theme: Theme) -> None:
    above = axis.get_xaxis_transform()
    for number, part in enumerate(parts):
        colour = theme.series[number % len(theme.series)]
        if part.start > 0:
            axis.axvline(part.start - 0.5, color=theme.text, linewidth=1, alpha=0.7)
        line: Any = {"color": colour, "linewidth": 4, "clip_on": False, "solid_capstyle": "butt"}
        axis.plot([part.start - 0.4, part.end - 0.6], [1.02, 1.02], transform=above, **line)
        if len(parts) <= 16:
            middle = (part.start + part.end - 1) / 2
            style: Any = {"ha": "center", "va": "bottom", "fontsize": 8, "color": theme.text}
            axis.text(middle, 1.04, part.name, transform=above, **style)
