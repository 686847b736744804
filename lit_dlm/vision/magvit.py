"""MAGVIT-v2: pictures to tokens and back, as MMaDA and Show-o use it (arXiv:2310.05737).

A convolutional encoder maps 16 x 16 pixels to 13 numbers, whose signs are the bits of a token; a
decoder maps these back. The blocks are those of transformers' Janus; keys and sizes are those of
``showlab/magvitv2``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import (
    JanusVQVAEConvDownsample,
    JanusVQVAEConvUpsample,
    JanusVQVAEMidBlock,
    JanusVQVAEResnetBlock,
)

from lit_dlm.tensors.precision import without_autocast

_BLOCK = JanusVQVAEConfig()  # blocks read from it only that there is no dropout


@dataclass(frozen=True, kw_only=True)
class MagvitSizes:
    """Sizes of encoder and decoder; the defaults are the release's."""

    width: int = 128
    """Channels at multiple 1; itself a multiple of 32."""
    encoder: tuple[tuple[int, int], ...] = ((1, 4), (2, 3), (2, 4), (4, 3), (4, 4))
    """Multiple of ``width`` and number of blocks of each level, starting at the pixels."""
    decoder: tuple[tuple[int, int], ...] = ((1, 4), (1, 4), (2, 3), (2, 4), (4, 3))
    """The same for the decoder, also starting at the pixels."""
    num_bits: int = 13
    """Binary digits of a token."""

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> MagvitSizes:
        """Returns the sizes of stored weights, from their shapes."""
        width = weights["encoder.conv_in.weight"].shape[0]

        def levels(part: str) -> tuple[tuple[int, int], ...]:
            multiples: dict[int, list[int]] = {}
            for key, weight in weights.items():
                if match := re.fullmatch(rf"{part}\.(\d+)\.block\.\d+\.conv1\.weight", key):
                    multiples.setdefault(int(match[1]), []).append(weight.shape[0] // width)
            return tuple((multiples[n][0], len(multiples[n])) for n in sorted(multiples))

        return cls(
            width=width,
            encoder=levels("encoder.down"),
            decoder=levels("decoder.up"),
            num_bits=weights["encoder.quant_conv.weight"].shape[0],
        )


class _Level(nn.Module):
    """Some blocks, then a change to half or twice the size, if any."""

    def __init__(self, inner: int, outer: int, count: int, **scale: nn.Module | None) -> None:
        super().__init__()
        widths = [inner, *[outer] * count]
        self.block = nn.Sequential(
            *(JanusVQVAEResnetBlock(_BLOCK, one, other) for one, other in pairwise(widths))
        )
        for name, module in scale.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():  # in the order of construction: blocks, then the scale
            x = module(x)
        return x


class _Coder(nn.Module):
    """The first and last layers, which encoder and decoder share."""

    def __init__(self, first: int, inner: int, outer: int, last: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(first, inner, 3, padding=1)
        self.norm_out = nn.GroupNorm(32, outer, eps=1e-6)
        self.conv_out = nn.Conv2d(outer, last, 3, padding=1)

    def _out(self, x: Tensor) -> Tensor:
        return self.conv_out(F.silu(self.norm_out(x)))


class _Encoder(_Coder):
    def __init__(self, sizes: MagvitSizes) -> None:
        widths = [sizes.width, *(sizes.width * multiple for multiple, _ in sizes.encoder)]
        super().__init__(3, widths[0], widths[-1], sizes.num_bits)
        levels = []
        for number, (multiple, count) in enumerate(sizes.encoder, start=1):
            outer = sizes.width * multiple
            down = JanusVQVAEConvDownsample(outer) if number < len(sizes.encoder) else None
            levels.append(_Level(widths[number - 1], outer, count, downsample=down))
        self.down = nn.Sequential(*levels)
        self.mid = JanusVQVAEMidBlock(_BLOCK, widths[-1])
        self.quant_conv = nn.Conv2d(sizes.num_bits, sizes.num_bits, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.quant_conv(self._out(self.mid(self.down(self.conv_in(pixels)))))


class _Decoder(_Coder):
    def __init__(self, sizes: MagvitSizes) -> None:
        widths = [sizes.width * multiple for multiple, _ in sizes.decoder]
        super().__init__(sizes.num_bits, widths[-1], widths[0], 3)
        self.mid = JanusVQVAEMidBlock(_BLOCK, widths[-1])
        self.up = nn.ModuleList()
        for number, (outer, (_, count)) in enumerate(zip(widths, sizes.decoder, strict=True)):
            # Levels are numbered from the pixels in the release's keys, and run from the tokens.
            inner = widths[min(number + 1, len(widths) - 1)]
            up = JanusVQVAEConvUpsample(outer) if number else None
            self.up.append(_Level(inner, outer, count, upsample=up))
        self.post_quant_conv = nn.Conv2d(sizes.num_bits, sizes.num_bits, 1)

    def forward(self, bits: Tensor) -> Tensor:
        x = self.mid(self.conv_in(self.post_quant_conv(bits)))
        for level in reversed(self.up):
            x = level(x)
        return self._out(x)


class Magvit(nn.Module):
    """The picture tokenizer; its weights are float32 as in the release, and never trained here.

    Without a folder they are random, with the given sizes.
    """

    def __init__(self, folder: Path | None = None, *, sizes: MagvitSizes | None = None) -> None:
        super().__init__()
        weights: dict[str, Tensor] = {}
        if folder is not None:
            for path in sorted(filter(Path.is_file, folder.glob("*.safetensors"))):
                weights |= load_file(path)
            if "encoder.quant_conv.weight" not in weights:
                raise ValueError(f"vision.path: expected the weights of MAGVIT-v2, got {folder}")
            sizes = MagvitSizes.of(weights)
        sizes = sizes or MagvitSizes()
        self.num_bits = sizes.num_bits
        self.num_codes = 2**sizes.num_bits
        self.scale = 2 ** (len(sizes.encoder) - 1)
        """Pixels on each side of a token."""
        self.resolution = 32 * self.scale
        self.encoder = _Encoder(sizes)
        self.decoder = _Decoder(sizes)
        if weights:  # the codebook follows from the number of bits
            self.load_state_dict(
                {k: w for k, w in weights.items() if not k.startswith("quantize.")}
            )
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Returns tokens ``(B, height / scale, width / scale)`` int64 of pictures.

        ``pixels`` ``(B, 3, height, width)`` are floats in [-1, 1], sides multiples of
        :attr:`scale`. The first of the 13 numbers is the highest binary digit.
        """
        weight = self.encoder.conv_in.weight
        # A sign is all that counts, and near zero bfloat16 would flip some: other tokens than those
        # that the model was trained on.
        with without_autocast(weight.device):
            positive = self.encoder(pixels.to(weight)) > 0
        return (positive.permute(0, 2, 3, 1).long() * self._powers(positive.device)).sum(-1)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Returns pixels ``(B, 3, rows * scale, columns * scale)`` float32, about in [-1, 1]."""
        weight = self.decoder.conv_in.weight
        codes = codes.to(weight.device)
        # The decoder sees -1 and 1, as it did in training, and no numbers in between.
        bits = (codes[..., None] & self._powers(codes.device) > 0).to(weight.dtype) * 2 - 1
        with without_autocast(weight.device):
            return self.decoder(bits.permute(0, 3, 1, 2).contiguous()).float()

    def _powers(self, device: torch.device) -> Tensor:
        return 2 ** torch.arange(self.num_bits - 1, -1, -1, device=device)
