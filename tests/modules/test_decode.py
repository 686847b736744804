"""What a module makes of a problem before it decodes."""

from __future__ import annotations

from lit_dlm.backbones import HFBackbone
from lit_dlm.modules.decode import DecodeModule
from lit_dlm.tasks import PromptExample
from tests.rollouts import learner


def test_an_answer_may_begin_with_a_text_of_its_own() -> None:
    """It stands behind the chat template's own start, without special tokens."""
    example = PromptExample(uid="t/test/0", task="t", text="Tom has 3 pens.")
    plain = DecodeModule(HFBackbone("tiny"), tokenizer="tiny")
    begun = DecodeModule(HFBackbone("tiny"), tokenizer="tiny", answer_start="Tom has")
    ids = plain.encode(example)
    more = begun.encode(example)
    assert more[: len(ids)] == ids
    assert plain.tokenizer.decode(more[len(ids) :]) == "Tom has"
    assert learner(answer_start="Tom has").encode(example) == more
