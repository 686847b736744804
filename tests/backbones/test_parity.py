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

from lit_dlm.backbones import load_backbone
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.window_cache import WindowCache, WindowPlan
from lit_dlm.ops.alignment import aligned, first_real_columns
from lit_dlm.ops.masking import TwoCopyLayout, block_causal_visibility, block_numbers

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
    if backbone.spec.attention == "block":
        expected = cases["out.block"]
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


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "ids", "case"),
    [
        ("dream", "in.ids", "out.none"),
        ("dream", "in.ids", "out.full_str"),
        ("llada", "in.ids", "out.none"),
        ("sdar", "in.x", "out.full_none"),
    ],
)
def test_the_public_entry_needs_nothing_but_the_folder(
    parity: Path, family: str, ids: str, case: str, attn: str
):
    """The reduced vocabularies name no ends, and SDAR's no mask: logits need neither."""
    backbone = load_backbone(parity / family, attn_implementation=attn)  # type: ignore[arg-type]
    cases = load_file(parity / family / "cases.safetensors")
    assert_close(backbone(cases[ids]), aligned(cases[case], backbone.spec.shift))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "case", "positions"),
    [
        ("dream", "out.key_only", "columns"),
        ("dream", "out.key_only_pos", "in.pos"),
        ("dream", "out.outer_inf", "in.pos"),
        ("llada", "out.bias_keyonly", None),
    ],
)
def test_padding_through_the_public_entry(
    parity: Path, family: str, case: str, positions: str | None, attn: str
):
    """As a 2-D mask and as the 4-D one that means the same, with the reference's position ids."""
    backbone = load_backbone(parity / family, attn_implementation=attn)  # type: ignore[arg-type]
    cases = load_file(parity / family / "cases.safetensors")
    ids, real = cases["in.ids"], cases["in.pad2d"].bool()
    places = torch.arange(ids.shape[1]).expand_as(ids) if positions == "columns" else None
    places = cases[positions] if positions == "in.pos" else places
    four = real[:, None, None, :].expand(-1, 1, real.shape[1], -1)
    if case == "out.outer_inf":
        four = four & real[:, None, :, None]
    compared = real.clone()
    if backbone.spec.shift:  # the first real token's row would be that of a pad
        compared[torch.arange(len(real)), first_real_columns(real)] = False
    expected = aligned(cases[case], backbone.spec.shift)[compared]
    assert expected.isfinite().all()
    assert_close(backbone(ids, mask=four, position_ids=places)[compared], expected)
    if case != "out.outer_inf":
        assert_close(backbone(ids, mask=real.long(), position_ids=places)[compared], expected)
        assert_close(backbone(ids, mask=real)[compared], expected)  # rotary: only differences


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_cached_decoding_equals_the_reference(parity: Path, attn: str):
    """Three blocks of 4 prefilled; the fourth as masks, then with its tokens; then the fifth.

    A window's keys and values are overwritten by the next forward over it, which is what the
    reference calls not storing.
    """
    backbone, cases = load(parity, "sdar", attn)
    ids = cases["in.x"]
    columns = torch.arange(ids.shape[1])[None]
    cache = WindowCache(length=ids.shape[1], num_rows=1)

    def window(tokens: Tensor, start: int) -> Tensor:
        end = start + tokens.shape[1]
        cache.plan = WindowPlan(rows=torch.tensor([0]), columns=columns[:, start:end], kv_end=end)
        visible = (
            block_causal_visibility(block_numbers(end, 4))[:, :, start:] if start == 0 else None
        )
        last, _ = backbone.encode_window(
            tokens, cache=cache, visible=visible, position_ids=columns[:, start:end]
        )
        return backbone.model.lm_head(last)

    window(ids[:, :12], 0)
    assert_close(window(torch.full((1, 4), 3), 12), cases["out.b4_masked"])
    assert_close(window(ids[:, 12:16], 12), cases["out.b4_nostore"])
    assert_close(window(ids[:, 16:20], 16), cases["out.b5"])


def test_the_layout_builder_gives_the_reference_row(parity: Path):
    """Mask and repeated positions of the trace layout, from the builder alone."""
    backbone, cases = load(parity, "sdar", "sdpa")
    layout = TwoCopyLayout.trace(8, 24, 4)
    positions = layout.positions(torch.arange(24)[None])
    assert torch.equal(positions.expand(2, -1), cases["in.tok"])
    assert_close(backbone(cases["in.ext"], layout.visibility(), positions), cases["out.train_ext"])
