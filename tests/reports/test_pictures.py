from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_dlm.reports.animation import MAX_FRAMES, animation_frames, lay_out
from lit_dlm.reports.pictures import write_pictures
from lit_dlm.reports.plots import THEMES
from tests.reports.sample_sets import EOS, MASK, ids_of, record, sample, tiny_pieces

THREE = [[10, 0, 30], [10, 9, 30]]


def colour(name: str, part: str) -> tuple[int, ...]:
    text = getattr(THEMES[name], part)
    return tuple(int(text[place : place + 2], 16) for place in (1, 3, 5))


def has_colour(image: Image.Image, wanted: tuple[int, ...]) -> bool:
    return bool((np.asarray(image.convert("RGB")) == wanted).all(-1).any())


def test_layout_keeps_the_room_of_final_tokens_and_breaks_lines_where_the_text_does():
    """ "\\n#### " is one token: it stands on the new line and takes five columns there."""
    ids = ids_of("8-4=4\n#### 4")
    cells = lay_out(record([*ids, EOS], range(len(ids) + 1)), tiny_pieces(), columns=40)
    assert [(cell.row, cell.column, cell.text) for cell in cells] == [
        (0, 0, "8"),
        (0, 1, "-"),
        (0, 2, "4"),
        (0, 3, "="),
        (0, 4, "4"),
        (1, 0, "#### "),
        (1, 5, "4"),
        (1, 6, ""),
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_frames_go_from_masks_to_text(theme: str):
    ids = ids_of("4-4=0")
    one = sample(record([*ids, EOS], [2, 1, 0, 1, 2, 0], prompt=ids))
    frames = animation_frames([one], tiny_pieces(), theme=theme)
    assert len(frames) == 3 + 2  # the start, three steps, and the end without marks
    assert len({frame.size for frame in frames}) == 1
    mask, accent = colour(theme, "mask"), colour(theme, "accent")
    assert [has_colour(frame, mask) for frame in frames] == [True, True, True, False, False]
    marked, last = ((np.asarray(frame) == accent).all(-1).sum() for frame in frames[-2:])
    assert marked > last + 50, "the new tokens lose their ground"


def test_long_decodes_show_their_steps_in_strides():
    one = sample(record([10] * 8, range(6, 700, 99)))
    frames = animation_frames([one], tiny_pieces())
    assert len(frames) <= MAX_FRAMES
    assert not has_colour(frames[-1], colour("light", "mask"))


@pytest.mark.slow
def test_all_pictures_are_written_also_of_odd_decodes(tmp_path: Path):
    """Masked again, given, unfinished, without signals, without any step, in one region or two."""
    odd = record(
        [10, 11, MASK],
        [3, -1, -1],
        num_steps=4,
        given=np.array([False, True, False]),
        superseded=np.array([[0, 0, 12], [1, 0, MASK]]),
        meta={"regions": [["r", 0, 1], ["a", 1, 3]]},
    )
    still = record([MASK, MASK], [-1, -1], num_steps=0)
    for number, one in enumerate((odd, still)):
        paths = {
            name: tmp_path / f"{number}-{name}{suffix}"
            for name, suffix in (
                ("gif", ".gif"), ("fill_order", ".png"), ("order", ".png"), ("statistics", ".png"),
            )
        }  # fmt: skip
        write_pictures([sample(one)], tiny_pieces(), paths)
        with Image.open(paths["gif"]) as image:
            assert image.info["loop"] == 0
            assert image.n_frames == (6 if number == 0 else 1)
        for path in paths.values():
            with Image.open(path) as image:
                assert min(image.size) > 80
    assert len(list(tmp_path.iterdir())) == 8, "no temporary file is left"
    with pytest.raises(ValueError, match="gif: "):
        write_pictures([sample(odd)], tiny_pieces(), {"gif": tmp_path / "x.png"})


def test_two_decodes_in_one_animation_end_together(tmp_path: Path):
    fast = sample(record([10, 11, 12], [0, 0, 0], uid="t/test/0@fast"))
    slow = sample(record([10, 11, 12], [0, 1, 2], uid="t/test/0@slow"))
    path = tmp_path / "race.gif"
    write_pictures([fast, slow], tiny_pieces(), {"gif": path})
    with Image.open(path) as image:
        assert image.n_frames == 5, "the start, three steps, and the end without marks"
        image.seek(0)
        assert image.info["duration"] == 250
        image.seek(4)
        assert image.info["duration"] >= 2500
