"""How a model sees: pictures become ids among those of the words.

Canvases, caches, padding, windows and batches thereby know nothing of pictures. Where pictures are
rows of a vision tower (:mod:`~lit_dlm.vision.tower`), their ids lie beyond the vocabulary; where
they are tokens (:mod:`~lit_dlm.vision.tokens`), a decode sees these.
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
from torch import Tensor, nn

from lit_dlm.vision.pictures import IMAGE_MARK, PICTURES, Picture, PictureFolder


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """How a backbone sees."""

    train: Literal["none", "projector", "all"] = "none"
    """What of the tower is trained: nothing, the projector that maps it to the decoder, or both."""
    path: str | None = None
    """Weights of the picture tokenizer where the model's own folder has none (MMaDA:
    ``showlab/magvitv2``)."""
    resolution: int | None = None
    """Pixels on each side of a picture that becomes tokens; by default 512 with MAGVIT-v2."""


class Vision(nn.Module):
    """Pictures to ids, and ids to embeddings.

    As records hold it, a prompt has ids behind the vocabulary where its pictures belong, numbered
    in order. A batch of training has such prompts and names its pictures; a decode gets prompts
    into which their pictures were inserted.
    """

    before_text = ""
    """What goes before the text for each picture that has no mark in it."""

    def __init__(self, settings: VisionSettings, *, vocab_size: int) -> None:
        super().__init__()
        self.settings = settings
        self.vocab_size = vocab_size
        """Ids from here on are pictures."""
        self.folders: list[PictureFolder] = []
        """Where pictures of records are looked for."""
        self.known: dict[str, Picture] = {}
        """Pictures of samples that are trained on, by digest."""

    def encode(
        self,
        text: str,
        pictures: Sequence[Picture],
        *,
        render: Callable[[str], str],
        tokenize: Callable[[str], list[int]],
    ) -> list[int]:
        """Ids of a prompt with pictures, as records hold it; only their headers are read.

        In the text ``<image>`` says where pictures go. ``render`` is the chat template,
        ``tokenize`` adds no special tokens.
        """
        num_marks = render(text).count(IMAGE_MARK)
        missing = len(pictures) - num_marks
        if missing < 0:
            raise ValueError(
                f"expected a picture for each {IMAGE_MARK} of the text, got {num_marks} places "
                f"and {len(pictures)} pictures"
            )
        rendered = render(missing * self.before_text + text)
        pieces = [tokenize(piece) for piece in rendered.split(IMAGE_MARK)]
        ends = list(accumulate(map(self.num_ids, pictures), initial=self.vocab_size))
        return self.join(pieces, [list(range(*pair)) for pair in pairwise(ends)])

    def insert(self, ids: Sequence[int], pictures: Iterable[Picture]) -> list[int]:
        """Ids of a prompt of :meth:`encode` for decoding; its pictures stay until released."""
        num_places = sum(number >= self.vocab_size for number in ids)
        if not num_places:
            return list(ids)
        rows = [row for picture in pictures for row in self.picture_ids(picture)]
        if len(rows) != num_places:
            self.release(rows)
            raise ValueError(
                f"expected pictures of {num_places} rows, as recorded, got {len(rows)}"
            )
        numbers = iter(rows)
        return [number if number < self.vocab_size else next(numbers) for number in ids]

    def known_picture(self, digest: str) -> Picture:
        """A picture by the SHA-256 of its file, which may have changed on disk since."""
        picture = self.known[digest]
        if picture.digest != digest:
            raise ValueError(f"{picture.name}: the picture is damaged: it has another digest")
        return picture

    @abstractmethod
    def num_ids(self, picture: Picture) -> int:
        """How many ids a picture becomes; only its header is read."""

    @abstractmethod
    def picture_ids(self, picture: Picture) -> list[int]:
        """The ids that one picture becomes in a decode."""

    @abstractmethod
    def join(self, pieces: Sequence[Sequence[int]], pictures: Sequence[list[int]]) -> list[int]:
        """The prompt: ids of its words before, between and behind the pictures, and theirs."""

    @abstractmethod
    def embed(
        self, ids: Tensor, embed_words: Callable[[Tensor], Tensor], pictures: Sequence[str] | None
    ) -> Tensor:
        """Embeddings ``(B, L, D)`` of a canvas.

        Args:
            ids: ``(B, L)`` int64.
            embed_words: embeddings of tokens.
            pictures: digests of what the ids behind the vocabulary stand for, in order; ``None``:
                those that were inserted.
        """

    def stored_weights(self) -> dict[str, nn.Parameter]:
        """Weights that belong to the model's own files, by their keys there."""
        return {}

    def release(self, ids: Iterable[int]) -> None:
        """Lets go of the pictures of a prompt with these ids, which is done with."""


@dataclass(frozen=True, kw_only=True)
class PromptPictures:
    """Pictures that ids of a prompt stand for, numbered in order from the first one."""

    digests: tuple[str, ...]
    """SHA-256 of each file, in their order in the prompt."""
    first_id: int
    """Id of the first row, behind all that are tokens."""


def prompt_pictures(meta: Mapping[str, Any], first_id: int) -> PromptPictures | None:
    """What ids of a recorded prompt from the first one on stand for."""
    digests = meta.get("images")
    return PromptPictures(digests=tuple(digests), first_id=first_id) if digests else None


def batch_prompts(
    prompts: Sequence[NDArray[np.int32]], pictures: Sequence[PromptPictures | None]
) -> tuple[list[NDArray[np.int32]], list[tuple[str, ...]]]:
    """Prompts of one batch, whose ids of pictures count through the batch, and their digests.

    Prompts with the same pictures share their ids; :func:`batch_pictures` says which picture has
    which.
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


def batch_pictures(pictures: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Pictures of a batch in the order of their ids, from what :func:`batch_prompts` gave."""
    return tuple(chain.from_iterable(dict.fromkeys(pictures)))


def vision_of(backbone: Any, uid: str) -> Vision:
    """What a backbone sees with, for the sample ``uid`` that has pictures."""
    vision: Vision | None = getattr(backbone, "vision", None)
    if vision is None:
        raise ValueError(
            f"{uid}: the prompt has pictures; expected a model that sees them "
            "(model.backbone.vision)"
        )
    return vision


def add_picture_folders(backbone: Any, *folders: Path) -> None:
    """Lets a backbone look for pictures of records in the folders that hold these."""
    if (vision := getattr(backbone, "vision", None)) is not None:
        vision.folders += [PictureFolder(folder / PICTURES) for folder in folders]


def add_pictures(backbone: Any, uid: str, pictures: Sequence[Picture]) -> None:
    """Gives a backbone the pictures of a sample that it is to be trained on."""
    for picture in pictures:
        named = copy(picture)
        named.name = f"{uid}: {picture.name}"
        vision_of(backbone, uid).known.setdefault(picture.digest, named)


def find_pictures(backbone: Any, uid: str, meta: Mapping[str, Any]) -> None:
    """Finds the pictures that a record's meta names for a backbone that is to read it."""
    digests = meta.get("images", ())
    if not digests or backbone is None or backbone.spec.text_vocab_size is not None:
        return  # tokens of pictures are recorded themselves
    vision = vision_of(backbone, uid)
    for digest in digests:
        if digest not in vision.known:
            holders = [folder for folder in vision.folders if digest in folder]
            vision.known[digest] = (holders or vision.folders)[0].get(digest, uid)


def insert_pictures(backbone: Any, ids: Sequence[int], digests: Sequence[str]) -> list[int]:
    """A prompt of training for decoding: known pictures take the places of its numbered ids."""
    if not digests:
        return list(ids)
    vision: Vision = backbone.vision
    return vision.insert(ids, map(vision.known_picture, digests))
