"""Prompts that ask for pictures, and what a scorer says of them."""

from __future__ import annotations

import pytest
from PIL import Image

from lit_dlm.tasks import DrawingPrompts, PromptExample
from lit_dlm.vision.pictures import Picture, picture_from_text, picture_to_text
from tests.e2e.runs import write_jsonl


class Redness:
    """The share of red in the first pixel."""

    def score(self, picture: Picture, example: PromptExample) -> float:
        assert example.text == "Draw red."
        return picture.decoded().getpixel((0, 0))[0] / 255


@pytest.mark.parametrize(("red", "score", "status"), [(204, 0.8, "right"), (51, 0.2, "wrong")])
def test_a_scorer_judges_what_is_drawn(tmp_path, red: int, score: float, status: str):
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "Draw red."}])
    task = DrawingPrompts(str(tmp_path / "prompts.jsonl"), scorer=Redness())
    assert task.is_graded
    (example,) = task.examples()
    verdict = task.grade(example, picture_to_text(Image.new("RGB", (4, 4), (red, 0, 0))))
    assert (verdict.status, verdict.score) == (status, pytest.approx(score))
    assert task.grade(example, "a red square").status == "no_answer"


def test_only_pictures_are_pictures():
    image = Image.new("RGB", (5, 4), (1, 2, 3))
    found = picture_from_text(picture_to_text(image))
    assert found is not None
    assert found.decoded().tobytes() == image.tobytes()
    assert picture_from_text("data:image/png;base64,@") is None
    assert picture_from_text("red") is None
    broken = picture_from_text(picture_to_text(image)[:-48])
    assert broken is not None
    with pytest.raises(ValueError, match="the drawn picture: the picture is damaged"):
        broken.decoded()
