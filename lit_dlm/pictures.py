"""A picture of a prompt: a file or bytes, looked at with care and decoded when needed."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import struct
import warnings
from functools import cached_property
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

PLACE = "<image>"
"""Where a picture belongs in the text of a prompt; those without a place go before the text."""
PICTURES = "pictures"
"""Folder of the pictures in a folder of records."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is read; of a moving picture the first frame."""
MAX_BYTES = 64 * 2**20
MAX_PIXELS = 50_000_000
"""Most pixels that a header may announce: decoding takes three bytes for each."""
MIN_SIDE = 4
MAX_ASPECT = 200
"""Longest side over the shortest: beyond it nothing would be left of the short one."""

DATA = "data:image/png;base64,"
"""How the text of a drawn picture begins."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error)
"""What Pillow raises on damaged files."""


class Picture:
    """One picture.

    Args:
        source: path of a file, or its bytes.
        name: what errors call it; the path by default.

    Raises:
        ValueError: there is no such file, or it is too large.
    """

    def __init__(self, source: str | Path | bytes, *, name: str | None = None) -> None:
        self._source = source if isinstance(source, bytes) else Path(source)
        self.name = name or ("a picture" if isinstance(source, bytes) else str(source))
        if isinstance(self._source, Path):
            if not self._source.is_file():
                raise ValueError(f"{self.name}: expected a picture, found no such file")
            num_bytes = self._source.stat().st_size
        else:
            num_bytes = len(self._source)
        if num_bytes > MAX_BYTES:
            raise ValueError(
                f"{self.name}: expected a picture of at most {MAX_BYTES >> 20} MiB, "
                f"got {num_bytes / 2**20:.0f}"
            )

    def read(self) -> bytes:
        """The bytes of the file."""
        return self._source if isinstance(self._source, bytes) else self._source.read_bytes()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        return hashlib.sha256(self.read()).hexdigest()

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height as it is looked at.

        Raises:
            ValueError: it is no picture of a known format, one too large or too narrow, or damaged.
        """
        image = self._checked()
        try:  # the note may lie behind the pixels
            turned = image.getexif().get(0x0112, 1) >= 5  # the camera lay on its side
        except _BROKEN as error:
            raise ValueError(f"{self.name}: the picture is damaged ({error})") from error
        width, height = image.size
        return (height, width) if turned else (width, height)

    def decoded(self) -> Image.Image:
        """Its pixels as RGB, turned as its EXIF note says, transparent parts on white.

        Raises:
            ValueError: as :attr:`size`, or the file is damaged.
        """
        image = self._checked()
        try:
            image = ImageOps.exif_transpose(image)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image)
            return image.convert("RGB")
        except _BROKEN as error:
            raise ValueError(f"{self.name}: the picture is damaged ({error})") from error

    def _checked(self) -> Image.Image:
        """The file opened, with nothing decoded, and what its header says looked at."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", Image.DecompressionBombWarning
                )  # our bound is lower
                image = Image.open(io.BytesIO(self.read()), formats=FORMATS)
        except UnidentifiedImageError as error:
            raise ValueError(f"{self.name}: expected one of {', '.join(FORMATS)}") from error
        except Image.DecompressionBombError as error:
            raise ValueError(
                f"{self.name}: expected at most {MAX_PIXELS:,} pixels ({error})"
            ) from error
        except _BROKEN as error:
            raise ValueError(f"{self.name}: the picture is damaged ({error})") from error
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(
                f"{self.name}: expected at most {MAX_PIXELS:,} pixels, got {width} x {height}"
            )
        if min(width, height) < MIN_SIDE:
            raise ValueError(
                f"{self.name}: expected at least {MIN_SIDE} pixels a side, got {width} x {height}"
            )
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(
                f"{self.name}: expected sides of at most 1 to {MAX_ASPECT}, got {width} x {height}"
            )
        return image


def as_text(image: Image.Image) -> str:
    """A drawn picture as the text of its response: a ``data:`` address of a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return DATA + base64.b64encode(file.getvalue()).decode()


def drawn_picture(completion: str) -> Picture | None:
    """The picture that a completion is, or ``None`` for text; see :func:`as_text`."""
    if not completion.startswith(DATA):
        return None
    try:
        data = base64.b64decode(completion.removeprefix(DATA), validate=True)
    except ValueError:
        return None
    return Picture(data, name="the drawn picture")


def refuse_pictures(pictures: object, uid: str) -> None:
    """Refuses a sample with pictures where a model is trained, which does not read them yet.

    Args:
        pictures: of the sample.
        uid: of the sample, for the error.

    Raises:
        ValueError: it has some.
    """
    if pictures:
        raise ValueError(f"{uid}: has pictures, which training does not read yet")


class PictureFolder:
    """Pictures by their digests, beside the records that name them.

    Args:
        folder: made when something is put.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: set[str] = set()

    def put(self, picture: Picture) -> None:
        """Keeps a picture; one that is there already stays."""
        if picture.digest in self._held:
            return
        path = self.folder / picture.digest
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # ranks share folders
            partial.write_bytes(picture.read())
            os.replace(partial, path)
        self._held.add(picture.digest)

    def __contains__(self, digest: str) -> bool:
        return (self.folder / digest).is_file()

    def get(self, digest: str) -> Picture:
        """A picture.

        Raises:
            ValueError: it is not there, or another file is.
        """
        picture = Picture(self.folder / digest)
        if picture.digest != digest:
            raise ValueError(f"{picture.name}: the picture is damaged: it has another digest")
        return picture
