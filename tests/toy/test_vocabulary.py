"""The shipped tokenizer: it can be rebuilt, loses nothing, and keeps the promised lengths."""

import random
from pathlib import Path

import pytest

import lit_dlm
from lit_dlm.backbones import load_tokenizer
from lit_dlm.toy import Countdown, PythonFunctions, Sudoku, WordProblems
from lit_dlm.toy.vocabulary import (
    ASSISTANT,
    END,
    MASK,
    PAD,
    USER,
    build_tokenizer,
    unknown_words_hint,
)

ASSETS = Path(lit_dlm.__file__).parent / "assets"
MAX_PROMPT, MAX_RESPONSE = 28, 32


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(ASSETS / "tiny"))


@pytest.mark.slow
def test_the_shipped_files_are_what_the_builder_makes(tmp_path: Path) -> None:
    """A changed template would silently change ids under trained weights; this test notices."""
    tokenizer = build_tokenizer([WordProblems("train"), PythonFunctions("train")])
    tokenizer.save_pretrained(str(tmp_path))
    for model in ("tiny", "tiny-planning"):
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (tmp_path / name).read_bytes() == (ASSETS / model / name).read_bytes()


def _ids_of_turn(tokenizer, text: str) -> list[int]:
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def test_the_chat_template_wraps_a_user_turn(tokenizer) -> None:
    tokens = tokenizer.convert_ids_to_tokens(_ids_of_turn(tokenizer, "15,44"))
    assert tokens == [USER, "1", "5", ",", "4", "4", ASSISTANT]
    assert tokenizer.convert_tokens_to_ids([PAD, END, MASK, USER, ASSISTANT]) == [0, 1, 2, 3, 4]


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


def test_words_that_tiny_never_saw_are_told_and_no_others(tokenizer) -> None:
    told = unknown_words_hint(tokenizer, "What is 2 and 2? How many pens, Anna?")
    assert told is not None
    assert told.startswith("tiny never saw 'What', 'and', 'Anna': it is a toy")
    assert "8 names (Tom, " in told
    assert "8 things (pens, " in told
    rng = random.Random(3)
    for source in SOURCES[:2]:
        for _ in range(400):
            prompt, _ = source.draw_pair(rng)
            assert unknown_words_hint(tokenizer, prompt) is None, prompt
    assert unknown_words_hint(load_tokenizer("tiny-planning"), "What is 2 and 2?") is None
