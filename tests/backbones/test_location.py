"""Names, folders and hub ids, and tokenizers; no test here touches a network or remote code."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import lit_dlm
from lit_dlm import DecodeModule
from lit_dlm.backbones import HFBackbone, load_tokenizer, location, tokenizer_of
from lit_dlm.backbones.location import locate
from lit_dlm.tasks import PromptExample
from tests.shared_data import shared


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Records hub downloads instead of running them."""
    calls: list[dict[str, Any]] = []

    def download(repo: str, **options: Any) -> str:
        calls.append({"repo": repo, **options})
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(location, "snapshot_download", download)
    return calls


def test_an_embedded_name_wins_over_a_folder_of_that_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assets = tmp_path / "assets"
    (assets / "small").mkdir(parents=True)
    (assets / "small" / "config.json").write_text("{}")
    (assets / "other").mkdir()  # no model
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(location, "ASSETS", assets)
    assert location.embedded_names() == ["small"]
    assert locate("small") == assets / "small"


@pytest.mark.parametrize(
    "path", ["absent", "./absent", "/absent/model", "a/b/c", "runs/absent", "runs/file", "", " "]
)
def test_a_wrong_path_is_an_error_and_no_download(
    hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"'{path}' is neither an existing folder"):
        locate(path)
    assert hub == []


def test_a_hub_id_is_downloaded_without_code_or_pickles(
    hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    """A failed download says that no folder exists either."""
    locate("Dream-org/Dream-v0-Instruct-7B@abc123")
    locate("owner/name", weights=False)
    asked = [(call["repo"], call["revision"]) for call in hub]
    assert asked == [("Dream-org/Dream-v0-Instruct-7B", "abc123"), ("owner/name", None)]
    assert ["*.safetensors" in call["allow_patterns"] for call in hub] == [True, False]
    assert not any({"*.py", "*.bin"} & set(call["allow_patterns"]) for call in hub)
    offline = Mock(side_effect=LocalEntryNotFoundError("no connection"))
    monkeypatch.setattr(location, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"'owner/name' is no existing folder.*no connection"):
        locate("owner/name")


def test_vocabulary_and_merges_load_as_the_dream_tokenizer():
    tokenizer = load_tokenizer(str(shared("tokenizers", "dream")))
    assert len(tokenizer) == 151667
    assert tokenizer.convert_tokens_to_ids(["<|mask|>", "<|im_end|>"]) == [151666, 151645]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (151643, 151643)
    text = "def f(x):\n    return x + 1  # 12<|mask|>"
    ids = tokenizer(text).input_ids
    assert ids[-1] == 151666
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_a_tokenizer_file_needs_no_class_of_its_own(tmp_path: Path):
    """The named class does not exist anywhere: it must not be looked for."""
    with pytest.raises(ValueError, match=r"expected tokenizer\.json, or vocab\.json with merges"):
        load_tokenizer(str(tmp_path))
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "ElsewhereTokenizer", "unk_token": "<unk>",'
        ' "auto_map": {"AutoTokenizer": ["elsewhere.ElsewhereTokenizer", null]}}'
    )
    assert load_tokenizer(str(tmp_path))("b a c").input_ids == [2, 1, 0]


def test_a_tokenizer_with_other_ids_than_the_model_is_refused(tmp_path: Path):
    """tiny has 462 tokens, an end of text 1 and a mask 2; Dream's lie far behind."""
    module = DecodeModule(HFBackbone("tiny"), tokenizer=str(shared("tokenizers", "dream")))
    with pytest.raises(ValueError, match=r"^model\.tokenizer: .*dream.*below 462, got 151666"):
        module.encode(PromptExample(uid="t/0", task="t", text="hi"))
    words = {f"w{number}": number for number in range(5)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(["w1", "w2", "w3"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for names, told in {
        '"eos_token": "w1"': None,
        '"eos_token": "w3"': "eos_token 1, got 3",
        '"eos_token": "w1", "mask_token": "w3"': "mask_token 2, got 3",
    }.items():
        (tmp_path / "tokenizer_config.json").write_text(f"{{{names}}}")
        if told is None:
            assert tokenizer_of(HFBackbone("tiny"), str(tmp_path)).eos_token_id == 1
        else:
            with pytest.raises(ValueError, match=f"^tokenizer: .* does not fit .*{told}"):
                lit_dlm.generate(HFBackbone("tiny"), ["w4"], tokenizer=str(tmp_path))
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="mask_token 2, got None"):
        tokenizer_of(HFBackbone("tiny"), str(tmp_path))
