"""LLaDA-V's pictures against the release's own code, and the table that holds their rows."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lit_dlm.decoding as d
from lit_dlm.backbones.base import Rows
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.vision.anyres import AnyRes
from lit_dlm.vision.base import VisionSettings
from lit_dlm.vision.pictures import Picture
from lit_dlm.vision.tokens import square_pixels
from lit_dlm.vision.tower import TowerVision
from tests.decoding.states import as_rows_alone, decoded
from tests.vision.models import MASK, SMALL, picture, write_seeing

GOLDEN = Path(__file__).parents[1] / "golden" / "llada_v.safetensors"
CASES = {
    "one_tile": ([[5, 6], [7, 8, 9]], [0]),
    "wide": ([[5], [7]], [1]),
    "tall": ([[], [11, 12]], [2]),
    "two": ([[3], [4], [9]], [0, 1]),
}
"""What stands around the pictures, and which ones."""
PICTURES = [picture(50, 40), picture(130, 60), picture(90, 300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("llada_v") / "model")


@pytest.fixture
def backbone(folder: Path) -> HFBackbone:
    return HFBackbone(str(folder), vision=VisionSettings()).eval()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> HFBackbone:
    path = write_seeing(tmp_path_factory.mktemp("small") / "model", vision_config=SMALL)
    return HFBackbone(str(path), vision=VisionSettings()).eval()


def seeing(backbone: HFBackbone) -> TowerVision:
    assert isinstance(backbone.vision, TowerVision)
    return backbone.vision


def prompt(backbone: HFBackbone, pieces: list[list[int]], *pictures: Picture) -> list[int]:
    vision = seeing(backbone)
    return vision.join(pieces, [vision.picture_ids(one) for one in pictures])


@pytest.mark.parametrize("case", CASES)
def test_rows_hidden_states_and_logits_are_those_of_the_release(backbone: HFBackbone, case: str):
    golden = load_file(GOLDEN)
    pieces, which = CASES[case]
    pictures = [PICTURES[number] for number in which]
    ids = torch.tensor([prompt(backbone, pieces, *pictures)])
    assert ids.shape[1] == int(golden[f"{case}.num_rows"])
    tiles = [seeing(backbone).scheme.tiles(one.decoded()) for one in pictures]
    sums = torch.stack([one.flatten()[::997].sum() for one in tiles])
    torch.testing.assert_close(sums, golden[f"{case}.tiles"], atol=1e-4, rtol=0)

    rows = torch.arange(0, ids.shape[1], max(1, ids.shape[1] // 16))
    with torch.no_grad():
        found = backbone.denoise(ids, hidden_layers=[0, 2])
    assert found.hidden is not None
    embeds, hidden = found.hidden[0, rows].unbind(1)
    found = {"embeds": embeds, "hidden": hidden, "logits": found.logits[0, rows, :MASK]}
    for name, values in found.items():  # the mask, the last word, is never proposed
        wanted = golden[f"{case}.{name}"][:, : values.shape[1]]
        torch.testing.assert_close(values, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", [None, d.PrefixCache(), d.DualCache()])
def test_padded_rows_decode_as_alone(small: HFBackbone, cache):
    """Prompts with one picture, none and two, side by side and each on its own."""
    components = {
        "policy": d.ConfidencePolicy(),
        "quota": d.FixedQuota(2),
        "window": d.BlockWindow(4),
    }
    decoder = d.Decoder(**components, cache=cache)
    one = prompt(small, CASES["one_tile"][0], PICTURES[0])
    two = prompt(small, CASES["two"][0], picture(20, 60), PICTURES[0])
    together = as_rows_alone(decoder, small, [one, [5, 6, 7], two], 8)
    # A picture is not just room: another one changes what is written.
    other = prompt(small, CASES["one_tile"][0], picture(60, 300))
    changed = decoded(decoder, small, [other], 8, seed=11)
    assert changed.ids[0, -8:].tolist() != together.ids[0, -8:].tolist()


def test_released_pictures_make_room_and_held_ones_stay(backbone: HFBackbone):
    vision = seeing(backbone)
    first = vision.picture_ids(PICTURES[0])
    assert vision.picture_ids(PICTURES[0]) == first  # one picture, two prompts
    second = vision.picture_ids(PICTURES[1])
    assert second[0] == first[-1] + 1
    rows = vision.rows()[: len(first)].clone()
    vision.release([7, *first])
    assert vision.picture_ids(PICTURES[2])[0] == second[-1] + 1  # the first one is still held
    vision.release(first)
    vision.release(second)
    assert vision.picture_ids(picture(51, 40))[0] == first[0]
    assert vision.picture_ids(PICTURES[0])[0] not in first
    again = vision.rows()[vision.picture_ids(PICTURES[0])[0] - 120 :][: len(first)]
    assert torch.equal(again, rows)


@pytest.mark.parametrize(("train", "learns"), [("projector", False), ("all", True)])
def test_what_is_trained(folder: Path, train, learns: bool):
    backbone = HFBackbone(str(folder), vision=VisionSettings(train=train))
    vision = seeing(backbone)
    vision.known[PICTURES[0].digest] = PICTURES[0]
    shown = [PICTURES[0].digest]
    ids = torch.tensor([[5, *range(120, 120 + vision.num_ids(PICTURES[0])), 7, MASK, MASK]])
    rows = ids == MASK
    targets = ids.masked_fill(rows, 9)
    before = backbone.score_tokens(Rows(ids, targets, rows, pictures=shown)).ce
    before.sum().backward()
    assert vision.projector[0].weight.grad is not None
    assert float(vision.newline.grad.abs().sum()) > 0
    patch = vision.tower.embeddings.patch_embedding.weight
    assert (patch.grad is not None) == learns
    assert all(p.grad is None for p in backbone.model.parameters())
    torch.optim.SGD([p for p in vision.parameters() if p.requires_grad], lr=0.1).step()
    with torch.no_grad():  # rows of the table follow the weights
        after = backbone.score_tokens(Rows(ids, targets, rows, pictures=shown)).ce
    assert not torch.allclose(before, after)
    words = torch.tensor([[5, 7, MASK]])
    stats = backbone.score_tokens(Rows(words, words, words == MASK))
    stats.ce.sum().backward()  # no picture, no gap


@pytest.mark.parametrize("size", [(50, 40), (54, 54), (55, 54), (700, 40), (40, 700), (400, 400)])
def test_num_rows_is_what_merging_gives(size: tuple[int, int]):
    scheme = AnyRes(tile=54, per_side=9, max_tiles=4)
    across, down = scheme.grid(size)
    merged = scheme.merged(torch.zeros(1 + across * down, 81, 2), torch.zeros(2), size)
    assert len(merged) == scheme.num_rows(size)


def test_rows_of_a_page_by_hand():
    """Two tiles side by side, with 27 x 27 rows each: 27 lines of 54 cells and an end."""
    assert AnyRes().grid((768, 384)) == (2, 1)
    assert AnyRes().num_rows((768, 384)) == 729 + 27 * 55
    # 768 x 300 leaves 27 * 300 / 384 = 21.1 lines: three of padding above and below.
    assert AnyRes().num_rows((768, 300)) == 729 + 21 * 55
    # 36 tiles are thinned out to four tiles' worth of rows.
    assert AnyRes().num_rows((2304, 2304)) == 729 + 54 * 55


def test_a_picture_becomes_square_on_white():
    pixels = square_pixels(picture(40, 20), 32)
    assert pixels.shape == (3, 32, 32)
    assert torch.equal(pixels[:, 0], torch.ones(3, 32))
    assert float(pixels[:, 16].min()) < 0.9
