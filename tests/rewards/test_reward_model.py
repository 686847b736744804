"""A learned reward against plain forwards of the same classifier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lit_dlm.backbones import load_tokenizer
from lit_dlm.rewards import RewardModel
from tests.rewards.classifiers import save_classifier
from tests.rewards.groups import SUM, rollout

TEXTS = ["7", "3+4 is 7", "eight", "", "3 + 4 = 7 because 4 + 3 = 7"]


def plain(folder: Path, text: str, label: int) -> float:
    """The logit of one conversation without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    turns = [{"role": "user", "content": SUM.text}, {"role": "assistant", "content": text}]
    ids = load_tokenizer("tiny").apply_chat_template(turns, return_dict=False)
    model.config.pad_token_id = 0
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, label])


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_rewards_are_the_logits_of_conversations(
    tmp_path: Path, label: int, batch_size: int
) -> None:
    folder = save_classifier(tmp_path, num_labels=2)
    reward = RewardModel(str(folder), label=label, batch_size=batch_size, dtype="float32")
    group = [rollout(text, number=number) for number, text in enumerate(TEXTS)]
    expected = [plain(folder, text, label) for text in TEXTS]
    assert max(expected) - min(expected) > 0.1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [score.total for score in reward.score(group)]
    assert found == pytest.approx(expected, abs=1e-4)


def test_models_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path)
    with pytest.raises(ValueError, match=r"label: expected 0 to 0, the labels of .*, got 1"):
        RewardModel(str(folder), label=1, dtype="float32").score([rollout("7")])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="expected a tokenizer with a chat template"):
        RewardModel(str(folder), dtype="float32").score([rollout("7")])
    with pytest.raises(ValueError, match="batch_size: expected at least 1"):
        RewardModel(str(folder), batch_size=0)
