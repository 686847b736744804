from pathlib import Path

import pytest
from PIL import Image

from lit_dlm.reports.pictures import write_pictures
from tests.reports.sample_sets import MASK, record, remasked, sample, tiny_pieces


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
