"""A minimal picture tokenizer: a token is the nearest of some patches of pixels.

The embedded picture model has it in place of MAGVIT-v2 (:mod:`~lit_dlm.vision.magvit`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

CODEBOOK = "codebook.png"
"""File in a model's folder: the patches one below the other, so it is as wide as one patch."""
_PATCHES_ACROSS = 4


class PatchTokenizer(nn.Module):
    """Maps pictures to tokens and back, by the codebook of a path."""

    _patches: Tensor

    def __init__(self, path: Path) -> None:
        super().__init__()
        with Image.open(path, formats=["PNG"]) as image:
            strip = np.array(image.convert("RGB"))  # (C * S, S, 3)
        self.scale = strip.shape[1]
        """Pixels on each side of a token."""
        self.resolution = _PATCHES_ACROSS * self.scale
        self.num_codes = len(strip) // self.scale
        patches = torch.from_numpy(strip).view(self.num_codes, self.scale, self.scale, 3)
        # As bytes, so that no change of the model's dtype rounds them.
        self.register_buffer("_patches", patches.permute(0, 3, 1, 2).contiguous(), persistent=False)

    def encode(self, pixels: Tensor) -> Tensor:
        """As Magvit's :meth:`~lit_dlm.vision.magvit.Magvit.encode`; the first patch wins ties."""
        size = self.scale
        levels = ((pixels.to(self._patches.device).double() + 1.0) * 127.5).round()
        cells = levels.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 1, 4, 5)
        # The square of the distance without that of the picture, which is the same for all codes.
        # Whole numbers in float64: exact, so that ties are ties everywhere.
        codes = self._patches.flatten(1).double()
        flat = cells.flatten(3)
        return (codes.square().sum(1) - 2.0 * flat @ codes.T).argmin(-1)

    def decode(self, codes: Tensor) -> Tensor:
        rows, columns = codes.shape[1:]
        cells = self._patches[codes.to(self._patches.device)].permute(0, 3, 1, 4, 2, 5)
        pixels = cells.reshape(len(codes), 3, rows * self.scale, columns * self.scale)
        return pixels.float() / 127.5 - 1.0
