"""Ids of special tokens: what must agree, and what is said when it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.backbones import resolve
from lit_dlm.backbones.base import UNKNOWN_ID
from tests.backbones.conftest import SHARED
from tests.backbones.reference import HF, LLADA
from tests.backbones.releases import DREAM
from tests.backbones.releases import LLADA as RELEASED_LLADA

SDAR: dict[str, Any] = {
    **DREAM,
    "model_type": "sdar",
    "vocab_size": 151936,
    "head_dim": 128,
    "mask_token_id": 151669,
    "bos_token_id": 151643,
}
RELEASED = {"dream": DREAM, "sdar": SDAR, "llada": RELEASED_LLADA}


def folder_of(tmp_path: Path, config: dict[str, Any], tokenizer: str | None) -> Path:
    """A model folder without weights, with the files of a released tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        source = SHARED / "tokenizers" / tokenizer
        if not source.is_dir():
            pytest.skip(f"no tokenizer at {source}")
        for name in ("added_tokens.json", "tokenizer_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", RELEASED)
def test_released_tokenizers_agree_with_their_configurations(tmp_path: Path, name: str):
    spec = resolve(folder_of(tmp_path, RELEASED[name], name)).spec
    assert (spec.mask_id, spec.eos_ids, spec.pad_id) == {
        "dream": (151666, (151643, 151645), 151643),
        "sdar": (151669, (151643, 151645), 151643),
        "llada": (126336, (126081, 126348), 126081),
    }[name]
    assert spec.forbidden_ids == (spec.mask_id,)


def test_the_tokenizer_of_a_sister_vocabulary_is_noticed(tmp_path: Path):
    """Dream's mask id is a tool tag there, and the other way round it is no token at all."""
    folder = folder_of(tmp_path, DREAM, "sdar")
    with pytest.raises(ValueError, match=r"no '<\|mask\|>', and id 151666 is '</tool_response>'"):
        resolve(folder)
    assert resolve(folder, spec_overrides={"mask_id": 151669}).spec.mask_id == 151669


def test_sdar_with_dreams_tokenizer_is_noticed(tmp_path: Path):
    with pytest.raises(ValueError, match="no '<MASK>'; is it the tokenizer of a sdar model"):
        resolve(folder_of(tmp_path, SDAR, "dream"))


def test_a_moved_end_of_turn_is_noticed():
    with pytest.raises(ValueError, match=r"eos_ids is 7 in the tokenizer \(<\|im_end\|>\)"):
        resolve(DREAM, added_tokens={"<|mask|>": 151666, "<|im_end|>": 7})


def test_a_reduced_vocabulary_is_its_own():
    spec = resolve(LLADA).spec
    assert (spec.mask_id, spec.eos_ids, spec.pad_id) == (3, (1,), 0)


def test_in_a_reduced_vocabulary_the_tokenizer_names_the_mask():
    config = {key: value for key, value in LLADA.items() if key != "mask_token_id"}
    assert resolve(config, added_tokens={"<|mdm_mask|>": 9}).spec.mask_id == 9
    with pytest.raises(ValueError, match=r"mask_id is 3 in config\.json, but the tokenizer gives"):
        resolve(LLADA, added_tokens={"<|mdm_mask|>": 9})


def test_what_nothing_names_is_unknown_and_said(caplog: pytest.LogCaptureFixture):
    config = {key: value for key, value in HF.items() if not key.endswith("token_id")}
    spec = resolve(config).spec
    assert (spec.mask_id, spec.eos_ids, spec.forbidden_ids) == (UNKNOWN_ID, (UNKNOWN_ID,), ())
    assert spec.pad_id == 0
    assert "the files name no mask_id; decoding needs it as spec_overrides.mask_id" in caplog.text
    caplog.clear()
    resolve(config, spec_overrides={"mask_id": 3, "eos_ids": [1]})
    assert not caplog.text
