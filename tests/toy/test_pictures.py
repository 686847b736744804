"""Digits and shapes of the embedded picture model: splits, questions, grades and the classifier."""

import random
import sys
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import lit_dlm
from lit_dlm.backbones import load_tokenizer
from lit_dlm.toy.pictures import (
    COLOURS,
    FOLDER,
    SHAPES,
    DigitDrawings,
    PictureQuestions,
    as_tokens,
    digits,
    draw_shapes,
    png,
    split_of,
)
from lit_dlm.vision.patches import CODEBOOK, PatchTokenizer
from lit_dlm.vision.pictures import Picture, picture_to_text
from lit_dlm.vision.tokens import image_of

KINDS = ("digit", "sum", "colour", "count")


@pytest.mark.parametrize(("split", "count"), [("train", 1323), ("validation", 195), ("test", 279)])
def test_every_digit_is_in_one_split(split: str, count: int):
    if split == "train":
        pytest.importorskip("sklearn")
    found = digits(split)
    assert len(found) == count
    assert all(split_of(one.tobytes()) == split for one, _ in found)
    assert {label for _, label in found} == set(range(10))


def test_without_scikit_learn_training_digits_are_refused(monkeypatch: pytest.MonkeyPatch):
    digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"absent; pip install 'scikit-learn>=1\.5'$"):
        digits("train")


def test_drawn_shapes_keep_their_pixels_as_tokens():
    """Every patch of a shape is in the codebook."""
    tokenizer = PatchTokenizer(FOLDER / CODEBOOK)
    for colour, shape, down, across in product(COLOURS, SHAPES, (0, 1), (0, 1)):
        pixels = draw_shapes([(3, down, across, colour, shape)])
        values = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1.0
        drawn = tokenizer.decode(tokenizer.encode(values))
        assert np.array_equal(np.array(image_of(drawn[0])), pixels)


def test_a_shape_by_hand():
    pixels = draw_shapes([(1, 1, 0, "red", "plus")])
    ink = (pixels == COLOURS["red"]).all(-1)
    assert np.argwhere(ink).tolist() == [[1, 5], [2, 4], [2, 5], [2, 6], [3, 5]]
    assert not pixels[~ink].any()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_grade_as_right_and_prompts_are_stable(kind: str):
    task = PictureQuestions(kind, "test", num_examples=30)
    examples = task.examples()
    few = PictureQuestions(kind, "test", num_examples=10).examples()
    assert [one.text for one in examples[:10]] == [one.text for one in few]
    for example in examples:
        assert task.grade(example, task.reference_completion(example)).is_correct
        assert not task.grade(example, "none: 42").is_correct
        assert len(example.images) == (2 if kind == "sum" else 1)
        assert all(picture.size == (8, 8) for picture in example.images)


@pytest.mark.parametrize("kind", ["colour", "count"])
def test_training_prompts_read_as_the_model_reads_pictures(kind: str):
    """Marks and tokens of pictures, then the turn: what ``TokenVision`` makes of a question."""
    tokenizer = load_tokenizer(str(FOLDER))
    prompt, completion = PictureQuestions(kind, "train").draw_pair(random.Random(3))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    texts = tokenizer.convert_ids_to_tokens(ids)
    assert texts[:2] == ["<|mmu|>", "<|soi|>"]
    assert texts[18:20] == ["<|eoi|>", "<|user|>"]
    assert texts[-1] == "<|assistant|>"
    assert len(tokenizer(completion)["input_ids"]) < 17


def test_counts_and_colours_say_what_is_drawn():
    task = PictureQuestions("count", "validation", num_examples=40)
    for example in task.examples():
        pixels = np.array(example.images[0].decoded())
        quarters = [pixels[y : y + 4, x : x + 4] for y in (0, 4) for x in (0, 4)]
        wanted = COLOURS.get(example.text.split()[2])
        shown = [(part == wanted).all(-1).any() if wanted else part.any() for part in quarters]
        assert example.reference["answer"] == str(sum(map(bool, shown)))


def test_the_classifier_knows_held_out_digits_also_as_tokens():
    """Figures of the model's card: all of 279, and 0.97 once they were tokens."""
    task = DigitDrawings()
    prompts = task.examples()
    assert [one.text for one in prompts[:2]] == ["Draw the digit 0.", "Draw the digit 1."]
    for one, label in digits("test"):
        drawn = picture_to_text(Picture(png(one)).decoded())
        assert task.grade(prompts[label], drawn).is_correct
    assert task.grade(prompts[3], "a three").status == "no_answer"
    with pytest.raises(ValueError, match=r"digit_drawings/test/3: expected .*got pictures"):
        task.reference_completion(prompts[3])
    assert as_tokens(one).count("<|p") == 16


@pytest.mark.slow
def test_the_shipped_tokenizer_is_what_the_builder_makes(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(Path(lit_dlm.__file__).parents[1] / "experiments"))
    build_tokenizer = import_module("embedded_tokenizer").build_tokenizer

    sources = [*(PictureQuestions(kind, "train") for kind in KINDS), DigitDrawings("train")]
    num_codes = PatchTokenizer(FOLDER / CODEBOOK).num_codes
    build_tokenizer(sources, num_picture_tokens=num_codes).save_pretrained(str(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
