"""Pictures from others: turned, flattened, and refused where they are not what they say."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_dlm.vision.pictures import Picture


def _file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def _bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header announces a picture of any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def test_turned_and_flattened():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side
    turned = Picture(_file(_noise(30, 20), "JPEG", exif=exif))
    assert turned.size == (20, 30)
    assert turned.decoded().size == (20, 30)
    clear = Picture(_file(Image.new("RGBA", (8, 8), (255, 0, 0, 0))))
    assert clear.decoded().getpixel((0, 0)) == (255, 255, 255)
    grey = Picture(_file(Image.new("L", (8, 8), 7)))
    assert grey.decoded().getpixel((3, 3)) == (7, 7, 7)


PNG = _file(_noise(64, 64))
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
    "one pixel": (_file(_noise(1, 1)), "sides of at least 4 .* got 1 x 1"),
    "a line": (_file(_noise(10_000, 10)), "at most 1 to 200, got 10000 x 10"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_clear_error(name: str):
    data, told = HOSTILE[name]
    for read in (Picture.decoded, lambda picture: picture.size):
        with pytest.raises(ValueError, match=told) as caught:
            read(Picture(data, name=f"{name}.png"))
        assert str(caught.value).startswith(f"{name}.png: ")
        assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no\.png: expected a picture, found no such file"):
        Picture(tmp_path / "no.png")
    (tmp_path / "large.png").touch()
    with (tmp_path / "large.png").open("r+b") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(ValueError, match="at most 64 MiB, got 65"):
        Picture(tmp_path / "large.png")
