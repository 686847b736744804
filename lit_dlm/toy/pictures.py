"""Small pictures for the embedded picture model: handwritten digits and drawn shapes.

The digits are scikit-learn's ``load_digits`` ("Optical Recognition of Handwritten Digits" of
E. Alpaydin and C. Kaynak, UCI, 1998, CC BY 4.0); those of ``train`` need scikit-learn, the others
are stored beside the model. A digest of the pixels, or of the shapes, decides the split.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from lit_dlm.backbones.location import ASSETS
from lit_dlm.system.extras import pip_install, required
from lit_dlm.tasks.base import PromptExample
from lit_dlm.tasks.drawings import PictureScorer
from lit_dlm.toy.generated import GeneratedTask, Problem
from lit_dlm.vision.patches import CODEBOOK, PatchTokenizer
from lit_dlm.vision.pictures import Picture, picture_from_text

FOLDER = ASSETS / "tiny-pictures"
SPLITS = ("train", "validation", "test")
SIDE = 8
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (60, 90, 255),
    "yellow": (240, 220, 40),
    "purple": (170, 60, 200),
}
SHAPES = {  # 3 x 3 pixels
    "square": ("###", "###", "###"),
    "ring": ("###", "#.#", "###"),
    "plus": (".#.", "###", ".#."),
    "cross": ("#.#", ".#.", "#.#"),
}
_ANSWER = re.compile(r"[a-z]+|\d+")
PICTURE_MARKS = ("<|mmu|>", "<|soi|>", "<|eoi|>")
"""Marks, as in MMaDA: a question about pictures follows; a picture begins; a picture ends."""

Pixels = NDArray[np.uint8]
Kind = Literal["digit", "sum", "colour", "count"]
Shape = tuple[int, int, int, str, str]
"""Quarter of the picture in reading order, offset down and across in it, colour and name."""


def split_of(data: bytes) -> str:
    """Returns the split that pixels or a description belong to: 15 % test, 10 % validation."""
    # By content: a digit that the data set holds twice cannot be both learnt and tested.
    fold = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") % 20
    return "test" if fold < 3 else "validation" if fold < 5 else "train"


@cache
def digits(split: str) -> list[tuple[Pixels, int]]:
    """Returns a split's handwritten digits, ``(8, 8)`` uint8, white on black, with their labels."""
    if split != "train":
        with Image.open(FOLDER / f"digits-{split}.png") as image:
            # A row of tiles for the digit 0, one for 1 and so on, black where there is none.
            tiles = np.array(image).reshape(10, SIDE, -1, SIDE).transpose(0, 2, 1, 3)
        return [(tile, label) for label, row in enumerate(tiles) for tile in row if tile.any()]
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError(
            "digits of the split train: expected scikit-learn, which is absent; "
            f"{pip_install(required('pictures'))}"
        ) from None
    data = load_digits()
    # Values are 0 to 16; made bytes first, as the digest of the pixels decides the split.
    grey = np.round(data.images * 255 / 16).astype(np.uint8)
    return [
        (one, int(label))
        for one, label in zip(grey, data.target, strict=True)
        if split_of(one.tobytes()) == split
    ]


def _perhaps_augmented(digit: Pixels, rng: random.Random) -> Pixels:
    """Returns the digit, in seven of ten cases turned, sheared, resized and moved a little."""
    if rng.random() >= 0.7:
        return digit
    # A thousand digits are few. All changes are one affine map at four times the size: after each
    # other at 8 x 8 they would blur the strokes away.
    size = 4 * SIDE
    scale, angle = rng.uniform(0.9, 1.12), rng.uniform(-0.2, 0.2)
    shear = rng.uniform(-0.15, 0.15)
    matrix = np.array([[1.0, -angle + shear], [angle, 1.0]]) / (4.0 * scale)
    centre = SIDE / 2 + np.array([rng.uniform(-0.5, 0.5), rng.uniform(-0.3, 0.3)])
    offset = centre - matrix @ np.full(2, size / 2)
    affine = (*matrix[0], offset[0], *matrix[1], offset[1])
    large = Image.fromarray(digit).transform(
        (size, size), Image.Transform.AFFINE, affine, Image.Resampling.BICUBIC
    )
    # As in the data set, each pixel counts the ink in 4 x 4 black-and-white cells.
    ink = (np.array(large) > 127).reshape(SIDE, 4, SIDE, 4).sum((1, 3))
    return np.round(ink * 255 / 16).astype(np.uint8)


def draw_shapes(shapes: Sequence[Shape]) -> Pixels:
    """Returns pixels ``(8, 8, 3)`` of shapes on black."""
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    for quarter, down, across, colour, shape in shapes:
        top, left = 4 * (quarter // 2) + down, 4 * (quarter % 2) + across
        ink = np.array([[cell == "#" for cell in row] for row in SHAPES[shape]])
        pixels[top : top + 3, left : left + 3][ink] = COLOURS[colour]
    return pixels


def png(pixels: Pixels) -> bytes:
    """Returns pixels ``(8, 8)`` or ``(8, 8, 3)`` as the bytes of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@cache
def _tokenizer() -> PatchTokenizer:
    return PatchTokenizer(FOLDER / CODEBOOK)


def as_tokens(pixels: Pixels) -> str:
    """Returns a picture's tokens as the embedded model's tokenizer writes them."""
    colour = np.broadcast_to(pixels[..., None], (SIDE, SIDE, 3)) if pixels.ndim == 2 else pixels
    # In float64, where bytes there and back are exact: a patch must meet its own code.
    values = torch.from_numpy(colour.copy()).permute(2, 0, 1)[None].double() / 127.5 - 1.0
    return "".join(f"<|p{code}|>" for code in _tokenizer().encode(values).flatten().tolist())


class PictureQuestions(GeneratedTask):
    """Questions about a picture, or about two of digits; other options as for generated tasks.

    Args:
        kind: what is asked: which ``digit`` it is; the ``sum`` of two; the ``colour`` of a shape;
            the ``count`` of all shapes, or of those of a colour, which the answer lists first.
    """

    splits = SPLITS
    missing = "no word in the completion"

    def __init__(
        self, kind: Kind, split: str = "test", *, num_examples: int = 200, **options: Any
    ) -> None:
        self.kind = kind
        self.name = f"picture_{kind}"
        super().__init__(split, num_examples, **options)

    def draw(self, rng: random.Random) -> Problem:
        return self._draw_of_split(rng, self.split)

    def _draw_of_split(self, rng: random.Random, split: str) -> Problem:
        # The split is that of the pictures, not of the questions about them.
        return self._drawn(rng, split)[0]

    def _drawn(
        self, rng: random.Random, split: str, *, augments: bool = False
    ) -> tuple[Problem, list[Pixels]]:
        if self.kind in ("digit", "sum"):
            chosen = rng.choices(digits(split), k=1 if self.kind == "digit" else 2)
            pictures = [_perhaps_augmented(one, rng) if augments else one for one, _ in chosen]
            labels = [label for _, label in chosen]
            question, completion = "Which digit is this?", str(labels[0])
            if self.kind == "sum":
                question = "What is the sum of the two digits?"
                completion = f"{labels[0]}+{labels[1]}={sum(labels)}"
        else:
            shapes = _shapes(rng, split)
            pictures = [draw_shapes(shapes)]
            question, completion = (_colour if self.kind == "colour" else _count)(rng, shapes)
        key = question + "".join(one.tobytes().hex() for one in pictures)
        reference = {"completion": completion, "answer": _ANSWER.findall(completion)[-1]}
        images = () if augments else tuple(Picture(png(one)) for one in pictures)
        return Problem(key=key, text=question, reference=reference, images=images), pictures

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        problem, pictures = self._drawn(rng, "train", augments=True)
        about, start, end = PICTURE_MARKS
        shown = "".join(f"{start}{as_tokens(one)}{end}" for one in pictures)
        return f"{about}{shown}{problem.text}", str(problem.reference["completion"])

    def write_answer(self, reference: dict[str, Any], rng: random.Random) -> str:
        return str(reference["completion"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        words = _ANSWER.findall(completion)
        return words[-1] if words else None


def _shapes(rng: random.Random, split: str) -> list[Shape]:
    while True:
        quarters = sorted(rng.sample(range(4), rng.randint(1, 4)))
        shapes = [
            (q, rng.randint(0, 1), rng.randint(0, 1), rng.choice([*COLOURS]), rng.choice([*SHAPES]))
            for q in quarters
        ]
        # Positions do not matter: the same shapes elsewhere are in the same split.
        if split_of(str([shape[3:] for shape in shapes]).encode()) == split:
            return shapes


def _colour(rng: random.Random, shapes: Sequence[Shape]) -> tuple[str, str]:
    kinds = [shape for *_, shape in shapes]
    alone = [one for one in shapes if kinds.count(one[-1]) == 1]
    if not alone:  # every kind of shape occurs more than once
        first = shapes[0]
        return "What colour is the first shape?", first[-2]
    *_, colour, shape = rng.choice(alone)
    return f"What colour is the {shape}?", colour


def _count(rng: random.Random, shapes: Sequence[Shape]) -> tuple[str, str]:
    # Colours that are there are more likely: with few shapes, most of the five are not.
    wanted = rng.choice([None, None, *COLOURS, *(colour for *_, colour, _ in shapes)])
    listed = [one for one in shapes if wanted in (None, one[-2])]
    named = ", ".join(f"{colour} {shape}" for *_, colour, shape in listed) or "none"
    of_colour = "" if wanted is None else f"{wanted} "
    return f"How many {of_colour}shapes are there?", f"{named}: {len(listed)}"


class PictureDrills:
    """Drills for the start: lines of three pictures, each followed by ``=`` and what it shows."""

    def draw_drill(self, rng: random.Random) -> str:
        _, start, end = PICTURE_MARKS
        line = ""
        for _ in range(3):
            if rng.random() < 0.5:
                pixels, label = rng.choice(digits("train"))
                pixels, caption = _perhaps_augmented(pixels, rng), str(label)
            else:
                shapes = _shapes(rng, "train")
                pixels = draw_shapes(shapes)
                caption = " ".join(f"{colour} {shape}" for *_, colour, shape in shapes)
            line += f"{start}{as_tokens(pixels)}{end}={caption}"
        return line


class DigitScorer(PictureScorer):
    """Scores whether a drawn digit is the one asked for, by scikit-learn's ``MLPClassifier``.

    ``experiments/picture_model_files.py`` has fitted its 64 hidden units to the training digits.
    """

    @cached_property
    def _classifier(self) -> nn.Module:
        weights = load_file(FOLDER / "classifier.safetensors")
        layers = [nn.Linear(*weights[f"{n}.weight"].shape[::-1]) for n in (0, 2)]
        classifier = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        classifier.load_state_dict(weights)
        return classifier.requires_grad_(False)

    def seen(self, picture: Picture) -> int:
        grey = np.array(picture.decoded().convert("L").resize((SIDE, SIDE)), np.float32) / 255.0
        return int(self._classifier(torch.from_numpy(grey).flatten()).argmax())

    def score(self, picture: Picture, example: PromptExample) -> float:
        return float(self.seen(picture) == example.reference["digit"])


class DigitDrawings(GeneratedTask):
    """Ten prompts that ask for pictures of digits, graded by :class:`DigitScorer`."""

    name = "digit_drawings"
    splits = SPLITS
    missing = "no picture"
    answer_field = "digit"
    scorer = DigitScorer()

    def examples(self) -> Sequence[PromptExample]:
        num = min(self.num_examples, 10)
        return [self._example(_drawing(digit), str(digit)) for digit in range(num)]

    def draw(self, rng: random.Random) -> Problem:
        return _drawing(rng.choice(digits(self.split))[1])

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        pixels, label = rng.choice(digits("train"))
        # Sometimes of no digit in particular: what a digit looks like is worth learning by itself.
        text = _drawing(label).text if rng.random() < 0.9 else "Draw a digit."
        return text, as_tokens(pixels)

    def reference_completion(self, example: PromptExample) -> str:
        raise ValueError(f"{example.uid}: expected a task whose answers are texts, got pictures")

    def extract(self, example: PromptExample, completion: str) -> str | None:
        picture = picture_from_text(completion)
        return None if picture is None else str(self.scorer.seen(picture))


def _drawing(digit: int) -> Problem:
    return Problem(key=str(digit), text=f"Draw the digit {digit}.", reference={"digit": digit})
