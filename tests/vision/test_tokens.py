"""Pictures of tokens: MAGVIT-v2 against the release's own code, and the nearest of some patches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lit_dlm.backbones.vision import token_vision
from lit_dlm.vision.base import VisionSettings
from lit_dlm.vision.magvit import Magvit, MagvitSizes
from lit_dlm.vision.patches import CODEBOOK, PatchTokenizer
from lit_dlm.vision.pictures import Picture
from lit_dlm.vision.tokens import TokenVision
from tests.vision.models import png, waves

GOLDEN = Path(__file__).parents[1] / "golden" / "magvit.safetensors"
SIZES = MagvitSizes(width=32, encoder=((1, 1), (2, 2)), decoder=((1, 2), (2, 1)), num_bits=5)


def test_tokens_and_pixels_are_those_of_the_release(tmp_path: Path) -> None:
    shapes = {name: p.shape for name, p in Magvit(sizes=SIZES).named_parameters()}
    # The release's file has its codebook too, which follows from the number of bits.
    extra = {"quantize.embedding": torch.zeros(32, 5)}
    save_file({n: waves(n, s) for n, s in shapes.items()} | extra, tmp_path / "model.safetensors")
    magvit = Magvit(tmp_path)  # the sizes are those of the file
    golden = load_file(GOLDEN)
    pixels = torch.sin(torch.arange(2 * 3 * 24 * 16).double() * 0.37).float().view(2, 3, 24, 16)
    codes = magvit.encode(pixels)
    assert torch.equal(codes, golden["codes"])
    drawn = magvit.decode(codes)
    assert drawn.shape == pixels.shape
    torch.testing.assert_close(drawn[:, :, ::3, ::2], golden["pixels"], atol=1e-5, rtol=0)


def test_released_sizes() -> None:
    with torch.device("meta"):
        released = Magvit()
    assert released.num_codes == 8192
    assert released.scale == 16
    # Pictures come from the host, wherever the weights are.
    assert released.encode(torch.zeros(1, 3, 32, 48)).shape == (1, 2, 3)
    # encoder and decoder of the release's classes
    assert sum(p.numel() for p in released.parameters()) == 55_439_171 + 39_947_833


BLACK, WHITE, LEFT = [[0, 0], [0, 0]], [[255, 255], [255, 255]], [[255, 0], [255, 0]]


@pytest.fixture
def vision(tmp_path: Path) -> TokenVision:
    Image.fromarray(np.array([*BLACK, *WHITE, *LEFT], np.uint8)).save(tmp_path / CODEBOOK)
    marks, tokenizer = {"<|soi|>": 1, "<|eoi|>": 2}, PatchTokenizer(tmp_path / CODEBOOK)
    return TokenVision(VisionSettings(), first_id=10, tokenizer=tokenizer, marks=marks)


def test_patches_are_coded_by_the_nearest(vision: TokenVision):
    """The upper left patch is grey 140, the next one half white, all others black.

    140 is 115 from white and 140 from black; 250 beside 0 is near the third.
    """
    pixels = np.zeros((8, 8), np.uint8)
    pixels[:2, :2] = 140
    pixels[:2, 2] = 250
    ids = vision.picture_ids(Picture(png(Image.fromarray(pixels))))
    assert ids == [11, 12, *[10] * 14]
    assert vision.join([[5], [6]], [ids]) == [126089, 1, *ids, 2, 5, 6]


def test_decoding_and_coding_again_changes_nothing(vision: TokenVision):
    codes, tokenizer = torch.tensor([[[0, 1, 2, 1]] * 4]), vision.tokenizer
    pixels = tokenizer.decode(codes)
    assert pixels.shape == (1, 3, 8, 8)
    assert torch.equal(tokenizer.encode(pixels), codes)
    # Codes are bytes, which the dtype of the model leaves alone.
    assert torch.equal(tokenizer.to(torch.bfloat16).decode(codes), pixels)


def test_unfinished_pictures_are_grey_where_nothing_is_drawn(vision: TokenVision):
    (image,) = vision.draw(torch.tensor([[11, 10, 3, 99]]))  # 3 and 99: no picture tokens
    assert np.array(image)[::2, ::2, 0].tolist() == [[255, 0], [128, 128]]


def test_a_model_without_picture_tokens_is_refused():
    with pytest.raises(ValueError, match="tiny: expected a model whose pictures are tokens"):
        token_vision("tiny", VisionSettings())
