"""Tokenizers without remote code."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from lit_dlm.backbones import load_tokenizer
from tests.backbones.conftest import SHARED


def test_vocabulary_and_merges_load_as_the_dream_tokenizer():
    folder = SHARED / "tokenizers" / "dream"
    if not folder.is_dir():
        pytest.skip(f"no tokenizer at {folder}")
    tokenizer = load_tokenizer(str(folder))
    assert len(tokenizer) == 151667
    assert tokenizer.convert_tokens_to_ids(["<|mask|>", "<|im_end|>"]) == [151666, 151645]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (151643, 151643)
    text = "def f(x):\n    return x + 1  # 12<|mask|>"
    ids = tokenizer(text).input_ids
    assert ids[-1] == 151666
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_tokenizer_file_needs_no_class_of_its_own(tmp_path: Path):
    """The named class does not exist anywhere: it must not be looked for."""
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "ElsewhereTokenizer", "unk_token": "<unk>",'
        ' "auto_map": {"AutoTokenizer": ["elsewhere.ElsewhereTokenizer", null]}}'
    )
    assert load_tokenizer(str(tmp_path))("b a c").input_ids == [2, 1, 0]


def test_a_folder_without_tokenizer_files_says_what_was_expected(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected tokenizer\.json, or vocab\.json with merges"):
        load_tokenizer(str(tmp_path))
