"""Pictures of any size for a vision tower that takes squares: tiles in, rows out.

The scheme of LLaVA-OneVision that LLaDA-V uses (``anyres_max_N`` with ``spatial_unpad``,
arXiv:2408.03326, arXiv:2505.16933). A picture is scaled into the grid of tiles that wastes the
least; the whole picture, squeezed into one square, goes before the tiles as an overview. After the
tower, the tiles' rows are put together again, the black margin is cut off, rows are thinned out if
there are more than ``N`` tiles' worth, and every line ends with an extra row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_onevision.modeling_llava_onevision import unpad_image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

_THINNED_FROM = 1.1
"""Rows are thinned out if they exceed what is allowed by more than this factor on each side."""


@dataclass(frozen=True, kw_only=True)
class AnyRes:
    """Sizes of the scheme; the defaults are those of LLaDA-V."""

    tile: int = 384
    """Pixels on each side of a tile."""
    per_side: int = 27
    """Rows of the tower on each side of a tile."""
    max_tiles: int = 4
    """Most rows of a picture beside its overview, counted in tiles."""
    most_across: int = 6
    """Most tiles across, and most tiles down."""

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns tiles across and down for a picture of ``size`` (width, height) in pixels."""
        sides = [number * self.tile for number in range(1, self.most_across + 1)]
        sizes = [(width, height) for width in sides for height in sides]
        width, height = select_best_resolution(size, sizes)
        return width // self.tile, height // self.tile

    def tiles(self, picture: Image.Image) -> Tensor:
        """Returns overview and tiles, row by row: ``(1 + tiles, 3, tile, tile)`` in [-1, 1]."""
        across, down = self.grid(picture.size)
        width, height = across * self.tile, down * self.tile
        # As in the release: the side that fills the grid is exact, the other one rounded up.
        scale_w, scale_h = width / picture.width, height / picture.height
        if scale_w < scale_h:
            inner = width, min(math.ceil(picture.height * scale_w), height)
        else:
            inner = min(math.ceil(picture.width * scale_h), width), height
        padded = Image.new("RGB", (width, height))
        padded.paste(picture.resize(inner), ((width - inner[0]) // 2, (height - inner[1]) // 2))
        squares = [picture.resize((self.tile, self.tile))]
        for top in range(0, height, self.tile):
            squares += [
                padded.crop((left, top, left + self.tile, top + self.tile))
                for left in range(0, width, self.tile)
            ]
        processor: Any = SiglipImageProcessorPil(
            size={"height": self.tile, "width": self.tile},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )
        return processor(squares, return_tensors="pt")["pixel_values"]

    def merged(self, rows: Tensor, newline: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns rows ``(N, D)`` of the overview, then those of the picture, line by line.

        The tower's rows are ``(1 + tiles, per_side**2, D)``, the end of a line ``(D,)``, and the
        size width and height in pixels.
        """
        across, down = self.grid(size)
        side = self.per_side
        # From tile by tile to line by line: a line runs through all tiles beside each other.
        picture = rows[1:].unflatten(0, (down, across)).unflatten(2, (side, side))
        picture = picture.permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3)  # (D, lines, cells)
        picture = unpad_image(picture, size[::-1])  # the library has height before width
        _, lines, cells = picture.shape
        # Before the ends of lines are added: these are learnt rows, not to be averaged with cells.
        if thinned := self._thinned(lines, cells):
            picture = F.interpolate(picture[None], thinned, mode="bilinear")[0]
        ends = newline[:, None, None].expand(-1, picture.shape[1], 1)
        picture = torch.cat([picture, ends.to(picture.dtype)], dim=2).flatten(1).T
        return torch.cat([rows[0], picture])

    def num_rows(self, size: tuple[int, int]) -> int:
        """Returns how many rows :meth:`merged` makes of a picture of ``size`` (width, height)."""
        across, down = self.grid(size)
        # The margin as the library crops it, on a device without memory.
        shape = torch.empty(1, down * self.per_side, across * self.per_side, device="meta")
        _, lines, cells = unpad_image(shape, size[::-1]).shape
        lines, cells = self._thinned(lines, cells) or (lines, cells)
        return self.per_side**2 + lines * (cells + 1)

    def _thinned(self, lines: int, cells: int) -> Sequence[int] | None:
        # Both sides by the same factor, which keeps the shape. The release cuts the quotients off;
        # rounding would give other rows.
        times = math.sqrt(lines * cells / (self.max_tiles * self.per_side**2))
        return [int(lines // times), int(cells // times)] if times > _THINNED_FROM else None
