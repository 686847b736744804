import numpy as np
import pytest
from PIL import Image

from lit_dlm.reports import plots
from lit_dlm.reports.animation import MAX_FRAMES, animation_frames, lay_out
from tests.reports.sample_sets import EOS, ids_of, record, sample, tiny_pieces


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
