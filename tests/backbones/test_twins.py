"""Twins against what is known of the releases, and as models of their families."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dlm.backbones import FromAR, HFBackbone
from lit_dlm.backbones.architecture import FAMILIES
from lit_dlm.backbones.resolution import read_config, resolve
from lit_dlm.backbones.tokenizer import load_tokenizer, read_added_tokens
from lit_dlm.backbones.vision import token_vision
from lit_dlm.config.files import load
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.vision.base import VisionSettings
from tests.shared_data import shared
from tests.twins import RELEASES, file_shapes, write_magvit_twin, write_twin
from tests.vision.models import picture

pytestmark = pytest.mark.slow  # writes and loads a model of each release

DREAM, LLADA, MMADA, SDAR, QWEN = (
    "Dream-org/Dream-v0-Instruct-7B",
    "GSAI-ML/LLaDA-8B-Instruct",
    "Gen-Verse/MMaDA-8B-MixCoT",
    "JetLM/SDAR-4B-Chat",
    "Qwen/Qwen2.5-0.5B-Instruct",
)


@pytest.mark.parametrize("release", RELEASES)
def test_a_twin_is_a_model_of_its_family(release: str, tmp_path: Path):
    folder = write_twin(tmp_path / release, release, hidden_size=16)
    starts = {"from_ar": FromAR(shift=1)} if release == QWEN else {}
    backbone: Any = HFBackbone(str(folder), **starts)
    tokenizer = load_tokenizer(str(folder))
    spec = backbone.spec
    if release == QWEN:
        assert spec.mask_id == len(tokenizer) == 151665
    else:
        assert spec.family.removesuffix("_moe") in release.lower().replace("-", "_")
        known = FAMILIES[spec.family].mask_tokens or ("<mask>",)  # by its id alone
        assert tokenizer.convert_ids_to_tokens(spec.mask_id) in known
    turns = [{"role": "user", "content": "What is 12 + 30?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(prompt).count("What is 12 + 30?") == 1
    canvas = torch.tensor([[*prompt, spec.mask_id, spec.mask_id]])
    logits = backbone.denoise(canvas, response_start=len(prompt)).logits
    assert logits.shape[-1] == RELEASES[release].config["vocab_size"]
    assert logits[..., 0].isfinite().all()


def test_tokens_of_pictures_begin_behind_the_tokenizer(tmp_path: Path):
    """MMaDA's matrix has 115 rows more than its tokenizer and the codes of pictures need."""
    folder = write_twin(tmp_path / MMADA, MMADA, hidden_size=8)
    codes = VisionSettings(path=str(write_magvit_twin(tmp_path / "magvit")), resolution=32)
    words = len(load_tokenizer(str(folder)))
    assert (words, RELEASES[MMADA].config["vocab_size"]) == (126349, 126349 + 115 + 8192)
    vision = token_vision(str(folder), codes)
    assert vision.first_id == Sampler().id_range(resolve(folder).spec)[1] == words
    drawn = load("decode/draw_mmada")["sampler"]["allowed_ids"]
    assert drawn == [words, words + 8192]
    # The release's picture tokenizer stays in float32, whatever the model is.
    seeing: Any = HFBackbone(str(folder), dtype="bfloat16", vision=codes).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        ids = seeing.vision.picture_ids(picture(32, 24))
    assert ids == vision.picture_ids(picture(32, 24))

    files = json.loads((folder / "tokenizer.json").read_text())
    files["added_tokens"].append({**files["added_tokens"][-1], "id": words, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(files))
    assert token_vision(str(folder), codes).first_id == words + 1


def test_the_sizes_are_those_of_the_releases():
    """7,615,616,512 parameters of Dream, 8,015,581,184 of LLaDA, 494,032,768 of Qwen2.5-0.5B.

    Of SDAR-30B-A3B as many as of Qwen3-30B-A3B, 30,532,122,624; of Nemotron-Labs-Diffusion-8B by
    hand ``34 (4096 (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096) + (2 * 131072 + 1) 4096``.
    """

    def count(release: str, **options: Any) -> int:
        shapes = file_shapes(resolve(RELEASES[release].config, **options))
        return sum(map(math.prod, shapes.values()))

    assert count(DREAM) == 7_615_616_512
    assert count(LLADA) == 8_015_581_184
    assert count("JetLM/SDAR-30B-A3B-Chat") == 30_532_122_624
    assert count("nvidia/Nemotron-Labs-Diffusion-8B") == 8_489_553_920
    assert count(QWEN, spec_overrides={"mask_id": 0}) == 494_032_768


def test_sdar_is_as_published(tmp_path: Path):
    published = shared("model_configs", "sdar_4b_chat")
    config = read_config(published)
    ours = RELEASES[SDAR].config
    assert {key for key in ours.keys() & config if ours[key] != config[key]} <= {"use_cache"}
    index = json.loads((published / "model.safetensors.index.json").read_text())
    folder = write_twin(tmp_path / SDAR, SDAR, hidden_size=16, num_layers=36)
    written = json.loads((folder / "model.safetensors.index.json").read_text())
    assert written["weight_map"].keys() == index["weight_map"].keys()
    resolved = resolve(config)
    spec, shapes = resolved.spec, file_shapes(resolved)
    assert (resolved.architecture.decoder, spec.family) == ("qwen3", "sdar")
    assert (spec.attention, spec.block_size, spec.mask_id, spec.shift) == ("block", 4, 151669, 0)
    assert file_shapes(resolve(ours)) == shapes
    assert shapes.keys() == index["weight_map"].keys()
    # bfloat16: two bytes a number.
    assert 2 * sum(map(math.prod, shapes.values())) == index["metadata"]["total_size"]


@pytest.mark.parametrize(("release", "name"), [(DREAM, "dream"), (LLADA, "llada"), (SDAR, "sdar")])
def test_special_tokens_and_template_are_as_published(release: str, name: str, tmp_path: Path):
    published = shared("tokenizers", name)
    folder = write_twin(tmp_path / release, release, hidden_size=8)
    # One release writes its mask in two ways.
    expected = {text: i for text, i in read_added_tokens(published).items() if text != "<MASK>"}
    assert read_added_tokens(folder) == expected
    config = json.loads((published / "tokenizer_config.json").read_text())
    tokenizer = load_tokenizer(str(folder))
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    for messages in (
        turns[:1],
        [*turns, {"role": "user", "content": "Three?"}],
        [{"role": "system", "content": "Be brief."}, *turns[:1]],
    ):
        ours, theirs = (
            tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False
            )
            for template in (None, config["chat_template"])
        )
        assert ours == theirs
