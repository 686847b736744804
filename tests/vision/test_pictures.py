"""Pictures from others: turned, flattened, and refused where they are not what they say."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_dlm.vision.pictures import Picture
from tests.vision.models import png


def _noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_turned_and_flattened():
    exif = Image.Exif()
    for orientation, size in ((6, (20, 30)), (9, (30, 20))):  # on its side; no orientation
        exif[0x0112] = orientation
        turned = Picture(png(_noise(30, 20), "JPEG", exif=exif))
        assert turned.size == turned.decoded().size == size
    colours = (("RGBA", (255, 0, 0, 0), 255), ("L", 7, 7), ("I;16", 25_650, 100))  # 99.8 x 257
    for mode, colour, seen in colours:
        flat = Picture(png(Image.new(mode, (8, 8), colour))).decoded()
        assert flat.getpixel((3, 3)) == (seen, seen, seen)


PNG = png(_noise(64, 64))


def _bomb(width: int, height: int) -> bytes:
    """A small PNG whose header announces a picture of any size."""
    header = PNG[12:16] + struct.pack(">II", width, height) + PNG[24:29]
    return PNG[:12] + header + struct.pack(">I", zlib.crc32(header)) + PNG[33:]


def _strange_camera() -> bytes:
    """A picture on its side, which Pillow opens, whose note of the software is a fraction."""
    entries = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0) + struct.pack("<HHII", 305, 5, 1, 38)
    note = struct.pack("<H", 2) + entries + struct.pack("<III", 0, 17, 4)
    return png(_noise(64, 48), "JPEG", exif=b"Exif\0\0II*\0" + struct.pack("<I", 8) + note)


HOSTILE = {
    "truncated": (PNG[: len(PNG) // 2], "damaged"),
    "header only": (PNG[:30], "damaged"),
    "empty": (b"", "none of PNG"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG"),
    "flipped": (PNG[:200] + bytes(byte ^ 0x55 for byte in PNG[200:400]) + PNG[400:], "damaged"),
    "bomb": (_bomb(60_000, 60_000), "too large|at most 50,000,000 pixels"),
    "large": (_bomb(10_000, 5_001), "at most 50,000,000 pixels"),
    "huge": (_bomb(2**31 - 1, 2**31 - 1), "too large"),
    "one pixel": (png(_noise(1, 1)), "sides of at least 4 .* got 1 x 1"),
    "a line": (png(_noise(10_000, 10)), "at most 1 to 200, got 10000 x 10"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_clear_error(name: str):
    data, told = HOSTILE[name]
    for read in (Picture.decoded, lambda picture: picture.size):
        with pytest.raises(ValueError, match=told) as caught:
            read(Picture(data, name=f"{name}.png"))
        assert str(caught.value).startswith(f"{name}.png: ")
        assert "\n" not in str(caught.value)


def test_a_strange_note_of_a_camera_is_told():
    picture = Picture(_strange_camera(), name="camera.jpg")
    assert picture.size == (48, 64)
    with pytest.raises(ValueError, match=r"^camera\.jpg: .*damaged"):
        picture.decoded()


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no\.png: expected a picture, found no such file"):
        Picture(tmp_path / "no.png")
    (tmp_path / "large.png").touch()
    with (tmp_path / "large.png").open("r+b") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(ValueError, match="at most 64 MiB, got 65"):
        Picture(tmp_path / "large.png")
