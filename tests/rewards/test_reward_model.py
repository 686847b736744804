"""A learned reward against plain forwards of the same classifier."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lit_dlm.backbones import load_tokenizer
from lit_dlm.rewards import RewardModel, reward_model
from tests.rewards.classifiers import save_classifier
from tests.rewards.groups import SUM, rollout

TEXTS = ["7", "3+4 is 7", "eight", "", "3 + 4 = 7 because 4 + 3 = 7"]


def test_rewards_are_the_logits_of_unpadded_conversations_at_every_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = save_classifier(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    plain.config.pad_token_id = 0
    expected = []
    for text in TEXTS:
        turns = [{"role": "user", "content": SUM.text}, {"role": "assistant", "content": text}]
        ids = load_tokenizer("tiny").apply_chat_template(turns, return_dict=False)
        expected.append(float(plain(input_ids=torch.tensor([ids])).logits.detach()[0, 0]))
    assert max(expected) - min(expected) > 0.1
    reward = RewardModel(str(folder), dtype="float32")
    group = [rollout(text, number=number) for number, text in enumerate(TEXTS)]
    for batch_size in (1, 2, 8):
        monkeypatch.setattr(reward_model, "_BATCH_SIZE", batch_size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = [score.total for score in reward.score(group)]
        assert found == pytest.approx(expected, abs=1e-4)


def test_what_a_tokenizer_lacks_is_named(tmp_path: Path):
    folder = save_classifier(tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": None}))
    with pytest.raises(ValueError, match=f"{folder}: expected a tokenizer with a padding token"):
        RewardModel(str(folder), dtype="float32").score([rollout("7")])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="expected a tokenizer with a chat template"):
        RewardModel(str(folder), dtype="float32").score([rollout("7")])
