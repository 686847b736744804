"""Equality with the families' published reference implementations, to 1e-5 in float32.

The fixtures hold the raw logits of tiny random models run through the references. Rows of padding
are left out, and so is the first real row of a shifted, padded sequence: the reference's shift
gives it a padding row.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dlm.backbones import load_backbone
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.visibility import aligned, first_column
from lit_dlm.training.layout import Slots

OVERRIDES: dict[str, dict[str, Any]] = {
    "dream": {"eos_ids": [1]},
    "llada": {},
    "sdar": {"eos_ids": [1], "mask_id": 3},
}


def load(parity: Path, family: str, **overrides: Any) -> tuple[HFBackbone, dict[str, Tensor]]:
    backbone = HFBackbone(str(parity / family), spec_overrides={**OVERRIDES[family], **overrides})
    return backbone, load_file(parity / family / "cases.safetensors")


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Different kernels order float32 sums differently; logits are about 5."""
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "ids", "case"),
    [
        ("dream", "in.ids", "out.none"),
        ("dream", "in.ids", "out.full_str"),
        ("llada", "in.ids", "out.none"),
        ("sdar", "in.x", "out.full_none"),
    ],
)
def test_unpadded_logits_equal_the_reference(parity: Path, family: str, ids: str, case: str):
    """The public entry needs nothing but the folder, which names no ends and SDAR's no mask."""
    backbone, cases = load(parity, family)
    expected = aligned(cases[case], backbone.spec.shift)
    assert_close(backbone(cases[ids]), expected)
    assert_close(load_backbone(parity / family)(cases[ids]), expected)
    if family == "dream":  # a causal slip would not pass as rounding
        assert (aligned(cases["out.causal"], 1) - expected).abs().max() > 0.1
    if backbone.spec.attention == "block":
        expected = cases["out.block"]
    forbidden = list(backbone.spec.forbidden_ids)
    expected[..., forbidden] = float("-inf")
    assert_close(backbone.denoise(cases[ids]).logits, expected)


@pytest.mark.parametrize(
    ("family", "case", "positions"),
    [
        ("dream", "out.key_only", "arange"),
        ("dream", "out.key_only_pos", "cumsum"),
        ("dream", "out.outer_inf", "cumsum"),
        ("llada", "out.bias_keyonly", "arange"),
    ],
)
def test_padded_logits_equal_the_reference(parity: Path, family: str, case: str, positions: str):
    """By a 2-D mask and by the 4-D one that means the same, with the reference's position ids."""
    backbone, cases = load(parity, family, positions=positions)
    ids, real = cases["in.ids"], cases["in.pad2d"].bool()
    assert not real.all()  # the fixture does exercise padding
    shift = backbone.spec.shift
    compared = real.clone()
    if shift:
        compared[torch.arange(len(real)), first_column(real)] = False
    expected = aligned(cases[case], shift)[compared]
    places = torch.arange(ids.shape[1]).expand_as(ids)
    places = cases["in.pos"] if positions == "cumsum" else places
    four = real[:, None, None, :].expand(-1, 1, real.shape[1], -1)
    if case == "out.outer_inf":
        four = four & real[:, None, :, None]
    else:
        assert_close(backbone(ids, real)[compared], expected)
        assert_close(backbone(ids, real.long(), places)[compared], expected)
    assert_close(backbone(ids, four, places)[compared], expected)


def test_explicit_masks_equal_the_reference(parity: Path):
    """SDAR's block-causal mask over blocks of 4, and the TraceRL layout with repeated positions."""
    backbone, cases = load(parity, "sdar")
    block = torch.arange(cases["in.x"].shape[1]) // 4
    visible = (block[:, None] >= block[None, :])[None, None]
    assert_close(backbone(cases["in.x"], visible), cases["out.block"])
    extended = backbone(cases["in.ext"], cases["masks.8_16_4"].bool(), cases["in.tok"])
    assert_close(extended, cases["out.train_ext"])
    layout = Slots.trace(8, 24, 4)
    positions = layout.positions(torch.arange(24)[None])
    assert torch.equal(positions.expand(2, -1), cases["in.tok"])
    assert_close(backbone(cases["in.ext"], layout.visibility(), positions), cases["out.train_ext"])
