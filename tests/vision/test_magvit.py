"""MAGVIT-v2 against the release's own code, on weights that need no file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_dlm.vision.magvit import Magvit, MagvitSizes
from tests.vision.waves import waves

GOLDEN = Path(__file__).parents[1] / "golden" / "magvit.safetensors"
SIZES = MagvitSizes(width=32, encoder=((1, 1), (2, 2)), decoder=((1, 2), (2, 1)), num_bits=5)


@pytest.fixture(scope="module")
def magvit(tmp_path_factory: pytest.TempPathFactory) -> Magvit:
    folder = tmp_path_factory.mktemp("magvit")
    shapes = {name: p.shape for name, p in Magvit(sizes=SIZES).named_parameters()}
    # The release's file has its codebook too, which follows from the number of bits.
    extra = {"quantize.embedding": torch.zeros(32, 5)}
    save_file({n: waves(n, s) for n, s in shapes.items()} | extra, folder / "model.safetensors")
    return Magvit(folder)  # the sizes are those of the file


def test_tokens_and_pixels_are_those_of_the_release(magvit: Magvit) -> None:
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
    # encoder and decoder of the release's classes
    assert sum(p.numel() for p in released.parameters()) == 55_439_171 + 39_947_833
