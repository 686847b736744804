"""Pictures of samples and records, given to the backbone that is to see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.vision.base import Vision
from lit_dlm.vision.pictures import PICTURES, Picture, PictureFolder


@dataclass(frozen=True, kw_only=True)
class PromptPictures:
    """Pictures that ids of a prompt stand for, numbered in order from the first one."""

    digests: tuple[str, ...]
    """SHA-256 of each file, in their order in the prompt."""
    first_id: int
    """Id of the first row, behind all that are tokens."""


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
