"""Pictures as the nearest of some patches, and pictures of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_dlm.backbones.vision import token_vision
from lit_dlm.vision.base import VisionSettings
from lit_dlm.vision.patches import CODEBOOK, PatchTokenizer
from lit_dlm.vision.pictures import Picture
from lit_dlm.vision.tokens import TokenVision

BLACK, WHITE, LEFT = [[0, 0], [0, 0]], [[255, 255], [255, 255]], [[255, 0], [255, 0]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> PatchTokenizer:
    strip = np.array([*BLACK, *WHITE, *LEFT], np.uint8)
    Image.fromarray(strip).save(tmp_path / CODEBOOK)
    return PatchTokenizer(tmp_path / CODEBOOK)


def picture(tmp_path: Path) -> Picture:
    """8 x 8 pixels: the upper left patch grey 140, the next one half white, all others black."""
    pixels = np.zeros((8, 8), np.uint8)
    pixels[:2, :2] = 140
    pixels[:2, 2] = 250
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return Picture(tmp_path / "picture.png")


def test_patches_are_coded_by_the_nearest(tmp_path: Path, tokenizer: PatchTokenizer):
    """140 is 115 from white and 140 from black; 250 beside 0 is near the third."""
    vision = TokenVision(
        VisionSettings(), first_id=10, tokenizer=tokenizer, marks={"<|soi|>": 1, "<|eoi|>": 2}
    )
    ids = vision.picture_ids(picture(tmp_path))
    assert ids == [11, 12, *[10] * 14]
    assert vision.join([[5], [6]], [ids]) == [126089, 1, *ids, 2, 5, 6]


def test_decoding_and_coding_again_changes_nothing(tokenizer: PatchTokenizer):
    codes = torch.tensor([[[0, 1, 2, 1]] * 4])
    pixels = tokenizer.decode(codes)
    assert pixels.shape == (1, 3, 8, 8)
    assert torch.equal(tokenizer.encode(pixels), codes)
    # Codes are bytes, which the dtype of the model leaves alone.
    assert torch.equal(tokenizer.to(torch.bfloat16).decode(codes), pixels)


def test_unfinished_pictures_are_grey_where_nothing_is_drawn(tokenizer: PatchTokenizer):
    vision = TokenVision(VisionSettings(), first_id=10, tokenizer=tokenizer)
    (image,) = vision.draw(torch.tensor([[11, 10, 3, 99]]))  # 3 and 99: no picture tokens
    assert np.array(image)[::2, ::2, 0].tolist() == [[255, 0], [128, 128]]


def test_a_model_without_picture_tokens_is_refused():
    with pytest.raises(ValueError, match="tiny: expected a model whose pictures are tokens"):
        token_vision("tiny", VisionSettings())
