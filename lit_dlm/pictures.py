"""A picture of a prompt: a file or bytes, looked at with care and decoded when needed."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import struct
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
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
        """Width and height as it is looked at."""
        image = self._checked()
        try:  # the note may lie behind the pixels
            turned = image.getexif().get(0x0112, 1) >= 5  # the camera lay on its side
        except _BROKEN as error:
            raise ValueError(f"{self.name}: the picture is damaged ({error})") from error
        width, height = image.size
        return (height, width) if turned else (width, height)

    def decoded(self) -> Image.Image:
        """Its pixels as RGB, turned as its EXIF note says, transparent parts on white."""
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


@dataclass(frozen=True, kw_only=True)
class PromptPictures:
    """Pictures that ids of a prompt stand for, numbered in order from the first one."""

    digests: tuple[str, ...]
    """SHA-256 of each file, in their order in the prompt."""
    first_id: int
    """Id of the first row, behind all that are tokens."""


def joined_prompts(
    prompts: Sequence[NDArray[np.int32]], pictures: Sequence[PromptPictures | None]
) -> tuple[list[NDArray[np.int32]], list[tuple[str, ...]]]:
    """Prompts of one batch, whose ids of pictures count through the batch.

    Args:
        prompts: ids of each, its own pictures numbered.
        pictures: of each.

    Returns:
        The prompts, and the digests of what ids of each stand for; prompts with the same pictures
        share their ids, and :func:`in_order` says which picture has which.
    """
    starts: dict[tuple[str, ...], int] = {}
    found, digests, count = [], [], 0
    for ids, shown in zip(prompts, pictures, strict=True):
        is_row = np.zeros(len(ids), dtype=bool) if shown is None else ids >= shown.first_id
        own = shown.digests if shown is not None and is_row.any() else ()
        if own:
            if own not in starts:
                starts[own], count = count, count + int(is_row.sum())
            ids = np.where(is_row, ids + starts[own], ids)
        found.append(ids)
        digests.append(own)
    return found, digests


def in_order(pictures: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Pictures of a batch in the order of their ids, from what :func:`joined_prompts` gave."""
    return tuple(chain.from_iterable(dict.fromkeys(pictures)))


class PictureFolder:
    """Pictures by their digests, beside the records that name them; made by the first one."""

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

    def get(self, digest: str, uid: str) -> Picture:
        """A picture by the SHA-256 of its file; whether it is the right one, its reader sees."""
        path = self.folder / digest
        return Picture(path, name=f"{uid}: {path}")


def look_in(backbone: Any, *folders: Path) -> None:
    """Lets a backbone look for pictures of records in the folders that hold these."""
    if (vision := getattr(backbone, "vision", None)) is not None:
        vision.folders += [PictureFolder(folder / PICTURES) for folder in folders]


def take_up(backbone: Any, uid: str, meta: Mapping[str, Any]) -> None:
    """Makes the pictures that a record's meta names known to a backbone that is to read it."""
    digests = meta.get("images", ())
    if not digests or backbone is None or backbone.spec.text_vocab_size is not None:
        return  # tokens of pictures are recorded themselves
    vision = seeing(backbone, uid)
    for digest in digests:
        if digest not in vision.known:
            holders = [folder for folder in vision.folders if digest in folder]
            vision.known[digest] = (holders or vision.folders)[0].get(digest, uid)


def know(backbone: Any, uid: str, pictures: Sequence[Picture]) -> None:
    """Makes the pictures of a sample known to a backbone that is to be trained on it."""
    for picture in pictures:
        named = copy(picture)
        named.name = f"{uid}: {picture.name}"
        seeing(backbone, uid).known.setdefault(picture.digest, named)


def placed(backbone: Any, ids: Sequence[int], digests: Sequence[str]) -> list[int]:
    """A prompt of training for decoding (:meth:`~lit_dlm.backbones.vision.Vision.placed`).

    The backbone knows its pictures; ``digests`` are what ids behind the vocabulary stand for.
    """
    if not digests:
        return list(ids)
    vision = backbone.vision
    result: list[int] = vision.placed(ids, map(vision.found, digests))
    return result


def seeing(backbone: Any, uid: str) -> Any:
    """What a backbone sees with."""
    vision = getattr(backbone, "vision", None)
    if vision is None:
        raise ValueError(
            f"{uid}: the prompt has pictures; expected a model that sees them "
            "(model.backbone.vision)"
        )
    return vision
