"""How a model sees: pictures become ids among those of the words.

So canvases, caches, padding, windows and batches need not know about pictures. Where pictures are
rows of a vision tower (:mod:`~lit_dlm.vision.tower`), their ids lie beyond the vocabulary; where
they are tokens (:mod:`~lit_dlm.vision.tokens`), a decode has these tokens as ids.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from lit_dlm.vision.pictures import IMAGE_MARK, PICTURES, Picture, PictureFolder


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """How a backbone sees pictures."""

    train: Literal["none", "projector", "all"] = "none"
    """What is trained: nothing, the tower's projector to the decoder, or the tower as well."""
    path: str | None = None
    """Weights of the picture tokenizer where the model's own folder has none (MMaDA:
    ``showlab/magvitv2``)."""
    resolution: int | None = None
    """Pixels on each side of a picture that becomes tokens; by default 512 with MAGVIT-v2."""


class Vision(nn.Module):
    """Maps pictures to ids, and ids to embeddings.

    In a record, a prompt has ids beyond the vocabulary in the place of its pictures, numbered in
    order. A training batch has such prompts and names its pictures; a decode gets prompts with
    their pictures inserted.
    """

    before_text = ""
    """Text put before a prompt for each picture that has no mark in it."""

    def __init__(self, settings: VisionSettings, *, vocab_size: int) -> None:
        super().__init__()
        self.settings = settings
        self.vocab_size = vocab_size
        """Ids from here on represent pictures."""
        self.folders: list[PictureFolder] = []
        """Folders that are searched for pictures of records."""
        self.known: dict[str, Picture] = {}
        """Pictures of training samples, by digest."""

    def encode(
        self,
        text: str,
        pictures: Sequence[Picture],
        *,
        render: Callable[[str], str],
        tokenize: Callable[[str], list[int]],
    ) -> list[int]:
        """Returns the ids of a prompt with pictures as in records; reads only pictures' headers.

        ``<image>`` in the text marks where pictures go. ``render`` applies the chat template,
        ``tokenize`` adds no special tokens.
        """
        # Of the rendered text, in which earlier turns may have marks, too.
        num_marks = render(text).count(IMAGE_MARK)
        missing = len(pictures) - num_marks
        if missing < 0:
            raise ValueError(
                f"expected a picture for each {IMAGE_MARK} of the text, got {num_marks} places "
                f"and {len(pictures)} pictures"
            )
        rendered = render(missing * self.before_text + text)
        pieces = [tokenize(piece) for piece in rendered.split(IMAGE_MARK)]
        # Numbers and not rows: a record must be readable without the model, wherever its table was.
        ends = list(accumulate(map(self.num_ids, pictures), initial=self.vocab_size))
        return self.join(pieces, [list(range(*pair)) for pair in pairwise(ends)])

    def insert(self, ids: Sequence[int], pictures: Iterable[Picture]) -> list[int]:
        """Returns ids of a prompt of :meth:`encode` for decoding; pictures stay until released."""
        num_places = sum(number >= self.vocab_size for number in ids)
        if not num_places:
            return list(ids)
        rows = [row for picture in pictures for row in self.picture_ids(picture)]
        if len(rows) != num_places:
            self.release(rows)  # else they would stay for as long as the model
            raise ValueError(
                f"expected pictures of {num_places} rows, as recorded, got {len(rows)}"
            )
        numbers = iter(rows)
        return [number if number < self.vocab_size else next(numbers) for number in ids]

    def known_picture(self, digest: str) -> Picture:
        """Returns a picture by its file's SHA-256; refuses a file that has changed since."""
        picture = self.known[digest]
        if picture.digest != digest:
            raise ValueError(f"{picture.name}: the picture is damaged: it has another digest")
        return picture

    @abstractmethod
    def num_ids(self, picture: Picture) -> int:
        """Returns how many ids a picture becomes; only its header is read."""

    @abstractmethod
    def picture_ids(self, picture: Picture) -> list[int]:
        """Returns the ids of a picture in a decode."""

    @abstractmethod
    def join(self, pieces: Sequence[Sequence[int]], pictures: Sequence[list[int]]) -> list[int]:
        """Joins ids of words (before, between and after pictures) and of pictures into a prompt."""

    @abstractmethod
    def embed(
        self, ids: Tensor, embed_words: Callable[[Tensor], Tensor], pictures: Sequence[str] | None
    ) -> Tensor:
        """Returns the embeddings ``(B, L, D)`` of a canvas ``(B, L)`` int64.

        ``pictures`` are digests of those that ids beyond the vocabulary represent, in order;
        ``None``: those that were inserted.
        """

    def stored_weights(self) -> dict[str, nn.Parameter]:
        """Returns the weights that belong in the model's own files, by their keys there."""
        return {}

    def drawn(self, responses: Tensor) -> dict[int, Image.Image]:
        """Returns the pictures that rows of ``(B, G)`` int64 responses hold, by row."""
        return {}

    def release(self, ids: Iterable[int]) -> None:
        """Releases the pictures of a finished prompt with these ids."""


@dataclass(frozen=True, kw_only=True)
class PromptPictures:
    """Pictures that ids of a prompt represent; the ids are numbered in order from ``first_id``."""

    digests: tuple[str, ...]
    """SHA-256 of each file, in their order in the prompt."""
    first_id: int
    """Id of the first row of a picture, larger than that of any token."""


def prompt_pictures(meta: Mapping[str, Any], first_id: int) -> PromptPictures | None:
    """Returns the pictures that ids of a recorded prompt from ``first_id`` on represent."""
    digests = meta.get("images")
    return PromptPictures(digests=tuple(digests), first_id=first_id) if digests else None


def batch_prompts(
    prompts: Sequence[NDArray[np.int32]], pictures: Sequence[PromptPictures | None]
) -> tuple[list[NDArray[np.int32]], list[tuple[str, ...]]]:
    """Numbers picture ids through a batch; returns its prompts and the digests of their pictures.

    Prompts with the same pictures share ids; :func:`batch_pictures` lists them in this order.
    """
    # Many states of one response are in a batch: each picture goes through the tower once.
    starts: dict[tuple[str, ...], int] = {}
    numbered, digests, count = [], [], 0
    for ids, shown in zip(prompts, pictures, strict=True):
        is_row = np.zeros(len(ids), dtype=bool) if shown is None else ids >= shown.first_id
        own = shown.digests if shown is not None and is_row.any() else ()
        if own:
            if own not in starts:
                starts[own], count = count, count + int(is_row.sum())
            ids = np.where(is_row, ids + starts[own], ids)
        numbered.append(ids)
        digests.append(own)
    return numbered, digests


def batch_pictures(pictures: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns a batch's pictures in the order of their ids, from those of :func:`batch_prompts`."""
    return tuple(chain.from_iterable(dict.fromkeys(pictures)))


def vision_of(backbone: Any, uid: str) -> Vision:
    """Returns what a backbone sees with; raises ``ValueError``, naming ``uid``, if it has none."""
    vision: Vision | None = getattr(backbone, "vision", None)
    if vision is None:
        raise ValueError(
            f"{uid}: the prompt has pictures; expected a model that sees them "
            "(model.backbone.vision)"
        )
    return vision


def add_picture_folders(backbone: Any, *folders: Path) -> None:
    """Lets a backbone search for pictures in the folders of records."""
    if (vision := getattr(backbone, "vision", None)) is not None:
        vision.folders += [PictureFolder(folder / PICTURES) for folder in folders]


def add_pictures(backbone: Any, uid: str, pictures: Sequence[Picture]) -> None:
    """Gives a backbone the pictures of a training sample."""
    for picture in pictures:
        # A copy, whose errors name this sample; several samples may share a picture.
        named = copy(picture)
        named.name = f"{uid}: {picture.name}"
        vision_of(backbone, uid).known.setdefault(picture.digest, named)


def find_pictures(backbone: Any, uid: str, meta: Mapping[str, Any]) -> None:
    """Finds the pictures that a record's meta names, for the backbone that will read the record."""
    digests = meta.get("images", ())
    if not digests or backbone is None or backbone.spec.text_vocab_size is not None:
        return  # picture tokens are in the record itself
    vision = vision_of(backbone, uid)
    for digest in digests:
        if digest not in vision.known:
            # Where no folder has it, the first one says so; its error names record and path.
            holders = [folder for folder in vision.folders if digest in folder]
            vision.known[digest] = (holders or vision.folders)[0].get(digest, uid)


def insert_pictures(backbone: Any, ids: Sequence[int], digests: Sequence[str]) -> list[int]:
    """Returns a training prompt for decoding, with known pictures in place of its numbered ids."""
    if not digests:
        return list(ids)
    vision: Vision = backbone.vision
    return vision.insert(ids, map(vision.known_picture, digests))
