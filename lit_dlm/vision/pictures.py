"""A picture of a prompt or a response: a file or bytes, checked before it is decoded."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image, ImageOps

from lit_dlm.system.files import replacing
from lit_dlm.system.options import refuse

IMAGE_MARK = "<image>"
"""Marks the place of a picture in the text of a prompt; those without a mark go before the text."""
PICTURES = "pictures"
"""Folder of the pictures in a folder of records."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read; of an animation, only the first frame."""
MAX_BYTES = 64 * 2**20
MAX_PIXELS = 50_000_000
"""Most pixels that a header may announce: decoding takes three bytes for each."""
MIN_SIDE = 4
MAX_ASPECT = 200
"""Largest ratio of the sides: beyond it, scaling would leave nothing of the shorter one."""

DATA = "data:image/png;base64,"
"""Prefix of the text of a drawn picture."""

# What Pillow raises on files that are damaged or not pictures.
_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, EOFError, AttributeError, TypeError),
    *(struct.error, Image.DecompressionBombError),
)


class Picture:
    """A file of a path, or its bytes; ``name`` stands in errors, by default the path."""

    def __init__(self, source: str | Path | bytes, *, name: str | None = None) -> None:
        self._source = source if isinstance(source, bytes) else Path(source)
        self.name = name or ("a picture" if isinstance(source, bytes) else str(source))
        if isinstance(self._source, bytes):
            num_bytes = len(self._source)
        elif self._source.is_file():
            num_bytes = self._source.stat().st_size
        else:
            raise ValueError(f"{self.name}: expected a picture, found no such file")
        # Before a byte is read: a path of a data set may name anything.
        if num_bytes > MAX_BYTES:
            most = f"a picture of at most {MAX_BYTES >> 20} MiB"
            refuse(self.name, most, f"{num_bytes / 2**20:.0f}")

    def read(self) -> bytes:
        return self._source if isinstance(self._source, bytes) else self._source.read_bytes()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        return hashlib.sha256(self.read()).hexdigest()

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height as displayed."""
        image = self._opened()
        with self._naming_errors():  # the EXIF note may come after the pixels
            turned = image.getexif().get(0x0112) in (5, 6, 7, 8)  # the camera lay on its side
        width, height = image.size
        return (height, width) if turned else (width, height)

    def decoded(self) -> Image.Image:
        """Returns the picture as RGB, turned as its EXIF note says, transparent parts on white."""
        image = self._opened()
        with self._naming_errors():
            # Cameras store pixels as the sensor lay; whoever wrote the answers saw them turned.
            image = ImageOps.exif_transpose(image)
            if image.mode == "I;16":  # converting would clip at 255
                image = image.convert("I").point(lambda value: value / 257 + 0.5)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")

    def _opened(self) -> Image.Image:
        """Opens the file without decoding it: a header of a few bytes may announce gigabytes."""
        with self._naming_errors(), warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our bound is lower
            image = Image.open(io.BytesIO(self.read()), formats=FORMATS)
        short, long = sorted(image.size)
        if short * long > MAX_PIXELS or short < MIN_SIDE or long > MAX_ASPECT * short:
            raise ValueError(
                f"{self.name}: expected at most {MAX_PIXELS:,} pixels, sides of at least "
                f"{MIN_SIDE} and at most 1 to {MAX_ASPECT}, got {image.width} x {image.height}"
            )
        return image

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            raise ValueError(
                f"{self.name}: the picture is damaged, too large or none of {', '.join(FORMATS)} "
                f"({error})"
            ) from error


def picture_to_text(image: Image.Image) -> str:
    """Returns a drawn picture as the text of its response: a ``data:`` URL of a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return DATA + base64.b64encode(file.getvalue()).decode()


def picture_from_text(completion: str) -> Picture | None:
    """Returns a completion's picture (see :func:`picture_to_text`), or ``None`` if it is text."""
    if not completion.startswith(DATA):
        return None
    try:
        # Strictly: else letters beyond the alphabet would be skipped, and texts become pictures.
        data = base64.b64decode(completion.removeprefix(DATA), validate=True)
    except ValueError:
        return None
    return Picture(data, name="the drawn picture")


@dataclass
class PictureFolder:
    """A folder of pictures by digest, beside records that name them; the first picture makes it."""

    folder: Path

    def add(self, picture: Picture) -> None:
        path = self.folder / picture.digest
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: other processes write the same picture, and readers may be there.
            with replacing(path) as partial:
                partial.write_bytes(picture.read())

    def __contains__(self, digest: str) -> bool:
        return (self.folder / digest).is_file()

    def get(self, digest: str, uid: str) -> Picture:
        """Returns a picture by the SHA-256 of its file, which the reader has to check."""
        path = self.folder / digest
        return Picture(path, name=f"{uid}: {path}")
