"""Options of the families against a slow decoder written from their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dlm.backbones import load_backbone
from tests.backbones.folders import IDS, VARIANTS, assert_logits, write
from tests.backbones.reference import HF, LLADA, random_tensors, raw_logits


@pytest.mark.parametrize("words", [LLADA, HF], ids=["llada", "hf"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_shards_prefix_and_a_stored_head_do_not_matter(
    tmp_path: Path, words: dict[str, Any], tied: bool, shards: int
):
    """Keys without ``model.``; a tied model's file may hold the head (here wrong) or not."""
    key = "weight_tying" if words is LLADA else "tie_word_embeddings"
    config = {**words, key: tied}
    tensors = random_tensors(config)
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    for place, stored in (("with", tensors), ("without", bare)):
        folder = write(tmp_path / place, config, stored, shards=shards)
        assert_logits(load_backbone(folder), config, tensors)
    if tied:
        head = "model.transformer.ff_out.weight" if words is LLADA else "lm_head.weight"
        stored = {**tensors, head: next(iter(tensors.values())).clone()}  # the embedding
        folder = write(tmp_path / "head", config, stored, shards=shards)
        assert_logits(load_backbone(folder), config, tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bfloat16"])
def test_half_precision_stays_close(tmp_path: Path, dtype: Any):
    """bfloat16 keeps 8 bits: the argmax and a few per cent of logits near 10 are what it gives."""
    tensors = random_tensors(LLADA)
    backbone = load_backbone(write(tmp_path / "m", LLADA, tensors), dtype=dtype)
    assert str(backbone.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    logits = backbone(IDS)
    expected = raw_logits(LLADA, tensors, IDS).float()
    torch.testing.assert_close(logits.float(), expected, atol=0.6, rtol=0.1)


def test_the_vision_part_is_left_in_the_files(tmp_path: Path):
    config = {**VARIANTS["llada_v"], "mm_vision_tower": "elsewhere"}
    tensors = random_tensors(config)
    vision = {
        "model.vision_tower.vision_tower.embeddings.weight": torch.ones(2),
        "model.mm_projector.0.bias": torch.ones(2),
        "model.image_newline": torch.ones(2),
    }
    assert_logits(load_backbone(write(tmp_path / "v", config, tensors | vision)), config, tensors)


def test_a_boolean_mask_equals_the_slow_decoder(tmp_path: Path):
    config = VARIANTS["sdar"]
    tensors = random_tensors(config)
    blocks = torch.arange(7) // 3
    visible = (blocks[:, None] >= blocks[None])[None, None]
    backbone = load_backbone(write(tmp_path / "m", config, tensors))
    expected = raw_logits(config, tensors, IDS, visible).float()
    torch.testing.assert_close(backbone(IDS, mask=visible), expected, atol=1e-5, rtol=1e-5)


def test_a_query_without_keys_does_not_disturb_the_others(tmp_path: Path):
    """Row 0 has two pads; the outer product of the padding leaves their queries without a key."""
    tensors = random_tensors(LLADA)
    backbone = load_backbone(write(tmp_path / "m", LLADA, tensors))
    real = torch.tensor([[False] * 2 + [True] * 5, [True] * 7])
    outer = (real[:, :, None] & real[:, None, :])[:, None]
    logits = backbone(IDS, outer)
    assert logits.isfinite().all()
    by_keys = backbone(IDS, real, torch.arange(7).expand(2, -1))
    torch.testing.assert_close(logits[real], by_keys[real], atol=1e-5, rtol=1e-5)
