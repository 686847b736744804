"""Equality with the families' published reference implementations, to 1e-5 in float32.

The fixtures hold the raw logits of tiny random models run through the references. Rows of padding
are left out, and so is the first real row of a shifted, padded sequence: the reference's shift
gives it a padding row.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.ops.alignment import aligned, first_real_columns

OVERRIDES = {"dream": {"eos_ids": [1]}, "llada": {}, "sdar": {"eos_ids": [1], "mask_id": 3}}


def load(parity: Path, family: str, attn: str) -> tuple[HFBackbone, dict[str, Tensor]]:
    backbone = HFBackbone(
        str(parity / family),
        attn_implementation=attn,  # type: ignore[arg-type]
        spec_overrides=OVERRIDES[family],
    )
    return backbone, load_file(parity / family / "cases.safetensors")


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Different kernels order float32 sums differently; logits are about 5."""
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "ids", "case"),
    [
        ("dream", "in.ids", "out.none"),
        ("llada", "in.ids", "out.none"),
        ("sdar", "in.x", "out.full_none"),
    ],
)
def test_unpadded_logits_equal_the_reference(
    parity: Path, family: str, ids: str, case: str, attn: str
):
    backbone, cases = load(parity, family, attn)
    expected = aligned(cases[case], backbone.spec.shift)
    assert_close(backbone(cases[ids]), expected)
    forbidden = torch.tensor(backbone.spec.forbidden_ids)
    denoised = backbone.denoise(cases[ids]).logits
    assert torch.isneginf(denoised[..., forbidden]).all()
    allowed = torch.ones(backbone.vocab_size, dtype=torch.bool).index_fill(0, forbidden, False)
    assert_close(denoised[..., allowed], expected[..., allowed])


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "case", "positions"),
    [
        ("dream", "out.key_only", "arange"),
        ("dream", "out.key_only_pos", "cumsum"),
        ("llada", "out.bias_keyonly", "arange"),
    ],
)
def test_padded_logits_equal_the_reference(
    parity: Path, family: str, case: str, positions: str, attn: str
):
    overrides = {**OVERRIDES[family], "positions": positions}
    backbone = HFBackbone(
        str(parity / family),
        attn_implementation=attn,  # type: ignore[arg-type]
        spec_overrides=overrides,
    )
    cases = load_file(parity / family / "cases.safetensors")
    real = cases["in.pad2d"].bool()
    shift = backbone.spec.shift
    compared = real.clone()
    if shift:
        compared[torch.arange(len(real)), first_real_columns(real)] = False
    assert not real.all()  # the fixture does exercise padding
    actual = backbone(cases["in.ids"], real)
    assert_close(actual[compared], aligned(cases[case], shift)[compared])


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_explicit_masks_equal_the_reference(parity: Path, attn: str):
    """SDAR's block-causal mask over blocks of 4, and the TraceRL layout with repeated positions."""
    backbone, cases = load(parity, "sdar", attn)
    block = torch.arange(cases["in.x"].shape[1]) // 4
    visible = (block[:, None] >= block[None, :])[None, None]
    assert_close(backbone(cases["in.x"], visible), cases["out.block"])
    extended = backbone(cases["in.ext"], cases["masks.8_16_4"].bool(), cases["in.tok"])
    assert_close(extended, cases["out.train_ext"])


def test_the_causal_result_is_far_away(parity: Path):
    """Guards the fixtures' power: a causal slip would not pass as rounding."""
    backbone, cases = load(parity, "dream", "sdpa")
    causal = aligned(cases["out.causal"], 1)
    assert (backbone(cases["in.ids"]) - causal).abs().max() > 0.1
