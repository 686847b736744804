"""A picture of a prompt or a response: a file or bytes, checked before it is decoded."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from PIL import Image, ImageOps

from lit_dlm.ops.files import replacing

IMAGE_MARK = "<image>"
"""Where a picture belongs in the text of a prompt; those without a mark go before the text."""
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

# What Pillow raises on files that are damaged, or no pictures.
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)


class Picture:
    """One picture.

    Args:
        source: path of a file, or its bytes.
        name: what errors call it; the path by default.
    """

    def __init__(self, source: str | Path | bytes, *, name: str | None = None) -> None:
        self._source = source if isinstance(source, bytes) else Path(source)
        self.name = name or ("a picture" if isinstance(source, bytes) else str(source))
        if isinstance(self._source, bytes):
            num_bytes = len(self._source)
        elif self._source.is_file():
            num_bytes = self._source.stat().st_size
        else:
            raise ValueError(f"{self.name}: expected a picture, found no such file")
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
        """Width and height as it is looked at."""
        image = self._opened()
        with self._naming_errors():  # the note may lie behind the pixels
            turned = image.getexif().get(0x0112, 1) >= 5  # the camera lay on its side
        width, height = image.size
        return (height, width) if turned else (width, height)

    def decoded(self) -> Image.Image:
        """Its pixels as RGB, turned as its EXIF note says, transparent parts on white."""
        image = self._opened()
        with self._naming_errors():
            image = ImageOps.exif_transpose(image)
            if image.mode == "I;16":  # converting would cut at 255
                image = image.convert("I").point(lambda value: value / 257 + 0.5)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")

    def _opened(self) -> Image.Image:
        """The file opened, with nothing decoded: a header of a few bytes may announce gigabytes."""
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
    """A drawn picture as the text of its response: a ``data:`` address of a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return DATA + base64.b64encode(file.getvalue()).decode()


def picture_from_text(completion: str) -> Picture | None:
    """The picture that a completion is (:func:`picture_to_text`), or ``None`` for text."""
    if not completion.startswith(DATA):
        return None
    try:
        data = base64.b64decode(completion.removeprefix(DATA), validate=True)
    except ValueError:
        return None
    return Picture(data, name="the drawn picture")


@dataclass
class PictureFolder:
    """Pictures by their digests, beside the records that name them; made by the first one."""

    folder: Path
    _held: set[str] = field(default_factory=set, init=False)

    def put(self, picture: Picture) -> None:
        """Keeps a picture; one that is there already stays."""
        if picture.digest in self._held:
            return
        path = self.folder / picture.digest
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                partial.write_bytes(picture.read())
        self._held.add(picture.digest)

    def __contains__(self, digest: str) -> bool:
        return (self.folder / digest).is_file()

    def get(self, digest: str, uid: str) -> Picture:
        """A picture by the SHA-256 of its file; whether it is the right one, its reader sees."""
        path = self.folder / digest
        return Picture(path, name=f"{uid}: {path}")
