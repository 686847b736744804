"""Options of the families against a slow decoder written from their tables."""

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


@pytest.mark.parametrize("config", [LLADA, VARIANTS["sdar"]])
def test_a_boolean_mask_equals_the_slow_decoder(tmp_path: Path, config: dict[str, Any]):
    """Row 0 has two pads, whose queries are given no key: they see themselves alone."""
    tensors = random_tensors(config)
    blocks, real = torch.arange(7) // 3, torch.tensor([[False] * 2 + [True] * 5, [True] * 7])
    visible = (blocks[:, None] >= blocks) & real[:, :, None] & real[:, None, :]
    logits = load_backbone(write(tmp_path / "m", config, tensors))(IDS, mask=visible[:, None])
    assert logits.isfinite().all()
    seen = (visible | torch.eye(7).bool())[:, None]
    expected = raw_logits(config, tensors, IDS, seen).float()
    torch.testing.assert_close(logits[real], expected[real], atol=1e-5, rtol=1e-5)
