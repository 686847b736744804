"""Pictures as tokens in front of the words, as MMaDA has them (arXiv:2505.15809)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lit_dlm.system.options import one_of
from lit_dlm.vision.base import Vision, VisionSettings
from lit_dlm.vision.magvit import Magvit
from lit_dlm.vision.patches import PatchTokenizer
from lit_dlm.vision.pictures import Picture

_MOST_ENCODED = 1024
"""Most pictures whose tokens are kept: at most 40 MB at 1,024 tokens each."""
_MMADA_MARKS = {"<|soi|>": 126084, "<|eoi|>": 126085, "<|mmu|>": 126089}
"""Start and end of a picture, and the task of answering about one; MMaDA's text tokenizer has other
names for these ids."""


class TokenVision(Vision):
    """Shows a picture as tokens of the model's own vocabulary, made by a picture tokenizer."""

    def __init__(
        self,
        settings: VisionSettings,
        *,
        first_id: int,
        tokenizer: Magvit | PatchTokenizer,
        vocab_size: int | None = None,
        marks: Mapping[str, int] | None = None,
    ) -> None:
        """Sets the picture tokenizer, whose tokens begin at ``first_id``.

        By default ``vocab_size`` counts words and picture tokens, and ``marks``, the ids of
        ``<|soi|>``, ``<|eoi|>`` and ``<|mmu|>``, are MMaDA's.
        """
        super().__init__(settings, vocab_size=vocab_size or first_id + tokenizer.num_codes)
        one_of("none", of="vision.", train=settings.train)  # tokens have no gradient
        self.tokenizer = tokenizer
        self.resolution = settings.resolution or tokenizer.resolution
        self.first_id = first_id
        self.marks = _MMADA_MARKS | dict(marks or {})
        self._tokens: dict[str, list[int]] = {}

    def num_ids(self, picture: Picture) -> int:
        _ = picture.size  # refuses what is not a picture
        return (self.resolution // self.tokenizer.scale) ** 2

    def picture_ids(self, picture: Picture) -> list[int]:
        if picture.digest not in self._tokens:
            if len(self._tokens) == _MOST_ENCODED:  # the oldest one goes
                del self._tokens[next(iter(self._tokens))]
            codes = self.tokenizer.encode(square_pixels(picture, self.resolution)[None])
            self._tokens[picture.digest] = (codes.flatten() + self.first_id).tolist()
        return self._tokens[picture.digest]

    def embed(
        self, ids: Tensor, embed_words: Callable[[Tensor], Tensor], pictures: Sequence[str] | None
    ) -> Tensor:
        # In a decode the tokens are in the canvas already. A training batch has numbers in their
        # place, as records have for both kinds of models.
        if pictures:
            known = map(self.known_picture, pictures)
            tokens = [token for picture in known for token in self.picture_ids(picture)]
            index = (ids - self.vocab_size).clamp(0, len(tokens) - 1)
            ids = torch.where(ids >= self.vocab_size, ids.new_tensor(tokens)[index], ids)
        return embed_words(ids)

    def join(self, pieces: Sequence[Sequence[int]], pictures: Sequence[list[int]]) -> list[int]:
        # MMaDA was trained with the task first, then all pictures, then all words.
        ids = [self.marks["<|mmu|>"]]
        for picture in pictures:
            ids += [self.marks["<|soi|>"], *picture, self.marks["<|eoi|>"]]
        return ids + [number for piece in pieces for number in piece]

    def drawn(self, responses: Tensor) -> dict[int, Image.Image]:
        rows = (responses >= self.first_id).any(1).nonzero()[:, 0].tolist()
        # The token that marks its end is not part of the picture.
        return {row: self.draw(responses[row : row + 1, :-1])[0] for row in rows}

    def draw(self, ids: Tensor) -> list[Image.Image]:
        """Draws the square pictures of ``(B, N)`` int64 tokens, which are in line order.

        Anything other than a picture token is drawn grey, so that unfinished pictures can be shown.
        """
        side = math.isqrt(ids.shape[1])
        # Masks and words may stand in a picture that is not finished, or from a model that is not.
        codes = (ids - self.first_id).view(-1, side, side)
        is_drawn = (codes >= 0) & (codes < self.tokenizer.num_codes)
        pixels = self.tokenizer.decode(codes.where(is_drawn, 0))
        scale = pixels.shape[-1] // side
        shown = is_drawn[:, None].repeat_interleave(scale, 2).repeat_interleave(scale, 3)
        return [image_of(one) for one in pixels.cpu().where(shown.cpu(), 0.0)]


def square_pixels(picture: Picture, resolution: int) -> Tensor:
    """Returns a picture as dLLM-RL shows it to MMaDA: white margins make it square.

    MMaDA's own scripts crop a square from its middle instead. ``(3, resolution, resolution)``
    float32 in [-1, 1].
    """
    image = picture.decoded()
    side = max(image.size)
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    pixels = np.array(square.resize((resolution, resolution), Image.Resampling.BICUBIC))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1.0


def image_of(pixels: Tensor) -> Image.Image:
    """Returns the image of ``(3, height, width)`` floats that are about in [-1, 1]."""
    values = ((pixels.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round()
    return Image.fromarray(values.byte().permute(1, 2, 0).cpu().numpy())
