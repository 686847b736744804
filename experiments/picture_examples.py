"""Draws README's figure of pictures: questions that the embedded model answers, digits it draws.

Reads what ``make vision`` leaves: the first held-out questions of each kind with the answers of one
method, and the first drawings of digits as they are filled in. Nothing is chosen by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import Any, get_args

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_dlm.backbones.vision import token_vision
from lit_dlm.reports.results import ResultFolder
from lit_dlm.toy.pictures import Kind, PictureQuestions
from lit_dlm.trajectories.store import TrajectoryShardReader
from lit_dlm.vision.base import VisionSettings

KINDS = get_args(Kind)
METHOD = "threshold_09"  # whose answers are shown


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=Path, required=True, help="decoded questions")
    parser.add_argument("--drawings", type=Path, required=True, help="run of draw_pictures")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    figure = Figure(figsize=(10.4, 6.0), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.0, 1.6])
    upper, lower = halves
    cells = upper.subplots(1, 8, width_ratios=[1, 1, 2.1, 2.1, 1, 1, 1, 1])
    for number, kind in enumerate(KINDS):
        show_answers(cells[2 * number : 2 * number + 2], kind, options.questions)
    show_drawings(lower.subplots(4, 9), options.drawings)
    figure.savefig(options.out, dpi=110)


def show_answers(axes: Iterable[Axes], kind: Kind, run: Path) -> None:
    """Shows the first questions of a kind, one on each axis, with the model's answers."""
    rows = {row.uid: row for row in ResultFolder(run / "results").rows(f"picture_{kind}", METHOD)}
    examples = PictureQuestions(kind, num_examples=200).examples()
    for axis, example in zip(axes, examples, strict=False):
        row = rows[example.uid]
        pictures = [np.array(picture.decoded().convert("RGB")) for picture in example.images]
        gap = np.full((8, 1, 3), 255, np.uint8)
        axis.imshow(np.concatenate([part for one in pictures for part in (gap, one)][1:], axis=1))
        axis.set_title(fill(example.text, 13 * len(pictures)), fontsize=9)
        axis.set_xlabel(fill(row.completion, 14), color="C2" if row.correct else "C3", fontsize=9)
        axis.set(xticks=[], yticks=[])


def show_drawings(axes: Any, run: Path) -> None:
    """Shows the first drawing of each of the first digits: a row per drawing, a column per step."""
    vision = token_vision("tiny-pictures", VisionSettings())
    records = {record.uid: record for record in TrajectoryShardReader(run / "drawings")}
    for digit, line in enumerate(axes):
        record = records[f"digit_drawings/test/{digit}@draw"]
        for step, axis in enumerate(line):
            ids = torch.from_numpy(record.state_at(step))[None, :-1].long()
            axis.imshow(vision.draw(ids)[0])
            axis.set_axis_off()


if __name__ == "__main__":
    main()
