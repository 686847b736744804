"""Animations, pictures of decodes, and curves with their files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_dlm.reports import plots
from lit_dlm.reports.animation import MAX_FRAMES, animation_frames, lay_out
from lit_dlm.reports.pictures import write_pictures
from lit_dlm.tracelock.metrics import CalibrationCurve
from tests.reports.sample_sets import EOS, MASK, ids_of, record, remasked, sample, tiny_pieces


def num_pixels(image: Image.Image, theme: str, part: str) -> int:
    """How many have a colour of a theme."""
    text = getattr(plots.THEMES[theme], part)
    colour = tuple(int(text[place : place + 2], 16) for place in (1, 3, 5))
    return int((np.asarray(image.convert("RGB")) == colour).all(-1).sum())


def test_layout_keeps_the_room_of_final_tokens_and_breaks_lines_where_the_text_does():
    """ "\\n#### " is one token: it stands on the new line and takes five columns there."""
    ids = ids_of("8-4=4\n#### 4")
    boxes = lay_out(record([*ids, EOS], range(len(ids) + 1)), tiny_pieces(), columns=40)
    assert [(box.row, box.column, box.text) for box in boxes] == [
        *((0, column, text) for column, text in enumerate("8-4=4")),
        (1, 0, "#### "), (1, 5, "4"), (1, 6, ""),
    ]  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_frames_go_from_masks_to_text(theme: str):
    ids = ids_of("4-4=0")
    one = sample(record([*ids, EOS], [2, 1, 0, 1, 2, 0], prompt=ids))
    frames = animation_frames([one], tiny_pieces(), theme=theme)
    assert len(frames) == 3 + 2  # the start, three steps, and the end without marks
    assert len({frame.size for frame in frames}) == 1
    masked = [num_pixels(frame, theme, "mask") > 0 for frame in frames]
    assert masked == [True, True, True, False, False]
    marked, last = (num_pixels(frame, theme, "accent") for frame in frames[-2:])
    assert marked > last + 50, "the new tokens lose their ground"


def test_long_decodes_show_their_steps_in_strides():
    one = sample(record([10] * 8, range(6, 700, 99)))
    frames = animation_frames([one], tiny_pieces())
    assert len(frames) <= MAX_FRAMES
    assert num_pixels(frames[-1], "light", "mask") == 0


@pytest.mark.slow
def test_all_pictures_are_written_also_of_odd_decodes(tmp_path: Path):
    """Masked again, given, unfinished, without signals, without any step, in one region or two."""
    odd = remasked(meta={"regions": [["r", 0, 1], ["a", 1, 3]]})
    still = record([MASK, MASK], [-1, -1], num_steps=0)
    suffixes = {"gif": "gif", "fill_order": "png", "order": "png", "statistics": "png"}
    for number, one in enumerate((odd, still)):
        paths = {name: tmp_path / f"{number}-{name}.{end}" for name, end in suffixes.items()}
        write_pictures([sample(one)], tiny_pieces(), paths)
        for name, path in paths.items():
            with Image.open(path) as image:
                assert min(image.size) > 80
                if name == "gif":
                    assert (image.info["loop"], image.n_frames) == (0, 1 if number else 6)
    assert len(list(tmp_path.iterdir())) == 8, "no temporary file is left"
    with pytest.raises(ValueError, match="gif: "):
        write_pictures([sample(odd)], tiny_pieces(), {"gif": tmp_path / "x.png"})


def test_two_decodes_in_one_animation_end_together(tmp_path: Path):
    orders = {"fast": [0, 0, 0], "slow": [0, 1, 2]}
    pair = [record([10, 11, 12], order, uid=f"t/test/0@{m}") for m, order in orders.items()]
    path = tmp_path / "race.gif"
    write_pictures(list(map(sample, pair)), tiny_pieces(), {"gif": path})
    with Image.open(path) as image:
        assert image.n_frames == 5, "the start, three steps, and the end without marks"
        assert image.info["duration"] == 250
        image.seek(4)
        assert image.info["duration"] >= 2500


POINTS = [
    {"step": 0, "val/reward": 0.3},
    {"step": 1, "rollout/reward": 0.4, "time/rollout": 2.0, "time/train": 1.0},
    {"step": 2, "rollout/reward": 0.5, "time/rollout": 2.0, "time/train": 1.5, "val/reward": 0.6},
]


@pytest.mark.slow
def test_points_survive_a_file_and_are_drawn(tmp_path: Path):
    plots.write_points(POINTS, tmp_path / "run" / "curve.jsonl")
    assert plots.read_points(tmp_path / "run" / "curve.jsonl") == POINTS
    plots.plot_run(POINTS, tmp_path / "run.png")
    plots.plot_run(POINTS[:1], tmp_path / "begin.png")  # nothing but the beginning yet
    assert all(p.stat().st_size > 5000 for p in tmp_path.glob("*.png"))
    assert len(list(tmp_path.iterdir())) == 3  # no drafts are left


def test_file_and_picture_of_a_calibration_with_empty_bins(tmp_path: Path):
    metric = CalibrationCurve(num_bins=4)
    metric.update(torch.tensor([0.1, 0.9, 0.95]), torch.tensor([False, True, False]))
    curve = {name: value.tolist() for name, value in metric.compute().items()}
    plots.write_calibration(tmp_path / "curve.json", curve, step=7)
    plots.plot_calibration(curve, tmp_path / "curve.png")
    record = json.loads((tmp_path / "curve.json").read_text())
    assert (record["count"], record["global_step"]) == ([1, 0, 0, 2], 7)
    assert record["accuracy"] == [0.0, None, None, 0.5]
    assert (tmp_path / "curve.png").stat().st_size > 5_000


def test_curves_of_a_resumed_run_are_one_and_the_later_part_counts(tmp_path: Path):
    for version, text in (
        (9, "epoch,step,train/loss,val/x\n0,0,4,\n0,1,3,nan\n,1,,0.5\n"),
        (10, "epoch,step,train/loss,val/x\n1,1,2.5,\n1,2,2,0.75\n"),
    ):
        folder = tmp_path / "logs" / f"version_{version}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(text)
    assert plots.read_curves(tmp_path) == {
        "train/loss": [(0, 4.0), (1, 2.5), (2, 2.0)],
        "val/x": [(1, 0.5), (2, 0.75)],
    }
    assert plots.read_curves(tmp_path / "nowhere") == {}
