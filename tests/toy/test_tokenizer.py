"""The shipped tokenizer: it can be rebuilt, loses nothing, and keeps the promised lengths."""

import random
import runpy
from pathlib import Path

import pytest

import lit_dlm
from lit_dlm.backbones import load_tokenizer
from lit_dlm.toy import Countdown, PythonFunctions, Sudoku, WordProblems

ROOT = Path(lit_dlm.__file__).parents[1]
ASSETS = ROOT / "lit_dlm/assets"
MAX_PROMPT, MAX_RESPONSE = 28, 32


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(ASSETS / "tiny"))


@pytest.mark.slow
def test_the_shipped_files_are_what_the_script_makes(tmp_path: Path, monkeypatch) -> None:
    """A changed template would silently change ids under trained weights; this test notices."""
    monkeypatch.setattr("sys.argv", ["embedded_tokenizer.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "experiments/embedded_tokenizer.py"), run_name="__main__")
    for model in ("tiny", "tiny-planning"):
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (tmp_path / name).read_bytes() == (ASSETS / model / name).read_bytes()


def _ids_of_turn(tokenizer, text: str) -> list[int]:
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def test_the_chat_template_wraps_a_user_turn(tokenizer) -> None:
    tokens = tokenizer.convert_ids_to_tokens(_ids_of_turn(tokenizer, "15,44"))
    assert tokens == ["<|user|>", "1", "5", ",", "4", "4", "<|assistant|>"]
    marks = ["<|pad|>", "<|endoftext|>", "<|mask|>", "<|user|>", "<|assistant|>"]
    assert tokenizer.convert_tokens_to_ids(marks) == [0, 1, 2, 3, 4]


SOURCES = [
    WordProblems("train"),
    PythonFunctions("train"),
    Sudoku("train"),
    Countdown("train", counts=(3, 4)),
    Countdown("train", counts=(2, 3, 4), style="expression"),
]


@pytest.mark.parametrize("source", SOURCES)
def test_lengths_and_round_trip(source, tokenizer) -> None:
    rng = random.Random(11)
    for _ in range(400):
        prompt, completion = source.draw_pair(rng)
        assert len(_ids_of_turn(tokenizer, prompt)) <= MAX_PROMPT, prompt
        response = tokenizer(completion)["input_ids"]
        assert len(response) + 1 <= MAX_RESPONSE, completion
        assert tokenizer.decode(response) == completion


@pytest.mark.parametrize("text", ["Grüße, 日本 🙂\tx", "", "  two  spaces\n\n\n", "<unk>"])
def test_any_text_survives(text: str, tokenizer) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_single_tokens_and_variables_have_one_form(tokenizer) -> None:
    assert tokenizer.tokenize("34+7=41") == ["3", "4", "+", "7", "=", "4", "1"]
    assert tokenizer.tokenize("sum(v*v for v in xs if v>3)").count("v") == 4
