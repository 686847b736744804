"""What a module makes of a problem before it decodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lit_dlm.backbones import HFBackbone
from lit_dlm.decoding import ConfidencePolicy, Decoder
from lit_dlm.modules.decode import DecodeModule, PromptBatch
from lit_dlm.tasks import PromptExample
from tests.rollouts import learner, policy


def test_an_answer_may_begin_with_a_text_of_its_own() -> None:
    """It stands behind the chat template's own start, without special tokens."""
    example = PromptExample(uid="t/test/0", task="t", text="Tom has 3 pens.")
    module = DecodeModule(HFBackbone("tiny"), tokenizer="tiny")
    ids = module.encode(example)
    more = module.encode(replace(example, answer_start="Tom has"))
    assert more[: len(ids)] == ids
    assert module.tokenizer.decode(more[len(ids) :]) == "Tom has"


def test_a_chat_template_replaces_the_one_of_the_tokenizer() -> None:
    example = PromptExample(uid="t/test/0", task="t", text="3 pens")
    text = "{% for message in messages %}has {{ message.content }}{% endfor %} Tom"
    module = DecodeModule(HFBackbone("tiny"), tokenizer="tiny", chat_template=text)
    ids = module.encode(example)
    assert ids == module.tokenizer.encode("has 3 pens Tom", add_special_tokens=False)
    assert learner(chat_template=text).encode(example) == ids


def test_an_unknown_chat_template_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"chat_template: .*dllm-rl-llada"):
        DecodeModule(HFBackbone("tiny"), tokenizer="tiny", chat_template="dllm-rl-lada")


def test_completions_end_at_an_end_of_text_unless_that_is_switched_off() -> None:
    """`2`, end of text, `3`, end of text: special tokens are no text in either case."""
    backbone = HFBackbone("tiny")
    for cut, text in ((True, "2"), (False, "23")):
        module = DecodeModule(backbone, tokenizer="tiny", cut_at_eos=cut)
        two, three = module.tokenizer.encode("23", add_special_tokens=False)
        end = backbone.spec.eos_ids[0]
        found = module.detokenizer(torch.tensor([[two, end, three, end]]))
        assert (found.texts, found.num_tokens) == ([text], [1])


def test_methods_without_a_window_are_described_with_that_of_the_model() -> None:
    """What run records and result files say, and verification decodes with."""
    decoders = {"plain": Decoder(policy=ConfidencePolicy())}
    found = []
    for family in ({}, {"attention": "block", "block_size": 3}):
        module = DecodeModule(policy(**family), tokenizer="tiny", decoders=decoders)
        found.append(module.decoders["plain"].describe()["window"])
    assert found == [
        {"name": "FullWindow"},
        {"name": "BlockWindow", "block_length": 3, "origin": "sequence"},
    ]


def test_a_sample_whose_logits_are_no_numbers_is_named() -> None:
    """One weight is enough: a decode of it would only look like wrong answers."""
    backbone = HFBackbone("tiny")
    backbone.model.model.norm.weight.data[3] = torch.nan
    module = DecodeModule(
        backbone, tokenizer="tiny", decoders={"one": Decoder(policy=ConfidencePolicy())}
    )
    examples = [PromptExample(uid=f"t/test/{n}", task="t", text="3 pens") for n in range(2)]
    ids = [module.encode(example) for example in examples]
    with pytest.raises(ValueError, match=r"^t/test/0@one, t/test/1@one: the model's prob"):
        module.decode(PromptBatch(examples, ids, "one", 4))
