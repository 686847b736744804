"""What a module makes of a problem before it decodes."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lit_dlm.backbones import HFBackbone
from lit_dlm.decoding import ConfidencePolicy, Decoder
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.predict.decode import DecodeModule, PromptBatch
from lit_dlm.tasks import PromptExample
from tests.finetuning.runs import Data, examples, quiet, small
from tests.rollouts import learner, policy
from tests.training.supervised import BLOCK

EXAMPLE = PromptExample(uid="t/test/0", task="t", text="3 pens")
DECODERS = {"one": Decoder(policy=ConfidencePolicy())}


@pytest.fixture(scope="module")
def backbone() -> HFBackbone:
    return HFBackbone("tiny")


def test_an_answer_may_begin_with_a_text_of_its_own(backbone: HFBackbone) -> None:
    """It stands behind the chat template's own start, without special tokens."""
    module = DecodeModule(backbone, tokenizer="tiny")
    ids = module.encode(EXAMPLE)
    more = module.encode(replace(EXAMPLE, answer_start="Tom has"))
    assert more[: len(ids)] == ids
    assert module.tokenizer.decode(more[len(ids) :]) == "Tom has"


def test_a_chat_template_replaces_the_one_of_the_tokenizer(backbone: HFBackbone) -> None:
    text = "{% for message in messages %}has {{ message.content }}{% endfor %} Tom"
    module = DecodeModule(backbone, tokenizer="tiny", chat_template=text)
    ids = module.encode(EXAMPLE)
    assert ids == module.tokenizer.encode("has 3 pens Tom", add_special_tokens=False)
    assert learner(chat_template=text).encode(EXAMPLE) == ids
    with pytest.raises(ValueError, match=r"chat_template: .*dllm-rl-llada"):
        DecodeModule(backbone, tokenizer="tiny", chat_template="dllm-rl-lada")


def test_completions_end_at_an_end_of_text_unless_that_is_switched_off(
    backbone: HFBackbone,
) -> None:
    """`2`, end of text, `3`, end of text: special tokens are no text in either case; nor are masks
    around `2`, where a decode ended before they were written."""
    for cut, text in ((True, "2"), (False, "23")):
        module = DecodeModule(backbone, tokenizer="tiny", cut_at_eos=cut)
        two, three = module.tokenizer.encode("23", add_special_tokens=False)
        end = backbone.spec.eos_ids[0]
        mask = backbone.spec.mask_id
        ids = torch.tensor([[two, end, three, end], [mask, two, mask, end]])
        found = module.detokenizer(ids, torch.zeros_like(ids, dtype=torch.bool))
        assert (found.texts, found.num_tokens) == ([text, "2"], [1, 1])


def test_methods_without_a_window_are_described_with_that_of_the_model() -> None:
    """What run records and result files say, and verification decodes with."""
    blocks = {"name": "BlockWindow", "block_length": 3, "origin": "sequence"}
    for family, window in (({}, {"name": "FullWindow"}), (BLOCK, blocks)):
        module = DecodeModule(policy(**family), tokenizer="tiny", decoders=DECODERS)
        assert module.decoders["one"].describe()["window"] == window


def test_a_sample_whose_logits_are_no_numbers_is_named() -> None:
    """One weight is enough: a decode of it would only look like wrong answers."""
    broken = HFBackbone("tiny")
    broken.model.model.norm.weight.data[3] = torch.nan
    module = DecodeModule(broken, tokenizer="tiny", decoders=DECODERS)
    examples = [replace(EXAMPLE, uid=f"t/test/{n}") for n in range(2)]
    ids = [module.encode(example) for example in examples]
    with pytest.raises(ValueError, match=r"^t/test/0@one, t/test/1@one: the model's prob"):
        module.decode(PromptBatch(examples, ids, "one", 4))


def test_a_script_sees_loss_and_accuracy_and_loads_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    seen: dict[str, object] = {}
    note = LambdaCallback(on_train_batch_end=lambda one, *_: seen.update(one.progress_bar_metrics))
    with caplog.at_level(logging.INFO):
        trainer = quiet(tmp_path, max_steps=3, callbacks=[note])
        module = SFTModule(small(), tokenizer="tiny", warmup_steps=0)
        trainer.fit(module, Data(examples(), batch_size=4))
    assert seen.keys() == {"train/loss", "train/accuracy"}
    assert "Tip" not in caplog.text
    trainer.save_checkpoint(tmp_path / "run.ckpt")

    given = {"backbone": small(), "tokenizer": "tiny"}
    recwarn.clear()
    again = SFTModule.load_from_checkpoint(tmp_path / "run.ckpt", **given)
    assert not [one for one in recwarn if "keys" in str(one.message)]
    weights = dict(module.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in again.named_parameters())
    with pytest.raises(ValueError, match=r"SFTModule\.load_from_checkpoint: .*export.*'backbone'"):
        SFTModule.load_from_checkpoint(tmp_path / "run.ckpt")
