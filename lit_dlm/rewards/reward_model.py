"""A learned reward: a sequence classifier reads the prompt and the response (RLHF)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_dlm.backbones.chat_template import apply_chat_template
from lit_dlm.backbones.loading import DType
from lit_dlm.backbones.location import locate, weight_files
from lit_dlm.backbones.tokenizer import load_tokenizer
from lit_dlm.rewards.base import Reward, RewardScore, Rollout
from lit_dlm.system.files import fitting
from lit_dlm.system.options import refuse_first
from lit_dlm.tensors.precision import without_autocast

# Responses of a group read together.
_BATCH_SIZE = 16


class RewardModel(Reward):
    """Pays the score that a transformers reward model gives to a conversation.

    The model is any ``AutoModelForSequenceClassification`` without code of its own, in safetensors,
    with a tokenizer that has a chat template and a padding token. Its first logit is the reward. It
    is loaded when the first rollouts are scored.

    Args:
        path: folder or hub id.
        dtype: of its weights.
        device: device of the model, such as ``cuda:1``; that of the rollouts by default.
        weight: factor in the sum of all rewards.
    """

    name = "reward_model"

    def __init__(
        self,
        path: str,
        *,
        dtype: DType = "bfloat16",
        device: str | None = None,
        weight: float = 1.0,
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.device = device
        self.weight = weight

    def setup(self, module: Any) -> None:
        self.device = self.device or str(module.trainer.strategy.root_device)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(self.path)
        message = f"{self.path}: expected a tokenizer with a"
        refuse_first(
            (tokenizer.chat_template is None, f"{message} chat template"),
            (tokenizer.pad_token is None, f"{message} padding token"),
        )
        # A sequence classifier reads the last token before the padding.
        tokenizer.padding_side = "right"
        return tokenizer

    @cached_property
    def model(self) -> PreTrainedModel:
        files = weight_files(folder := locate(self.path))
        with fitting(folder / f"config.json and {files[0].name}"):
            model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
                folder,
                dtype=getattr(torch, self.dtype),
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
            )
        # transformers finds the last token of a row by it.
        model.config.pad_token_id = self.tokenizer.pad_token_id
        return model.eval().to(self.device or "cpu")

    @torch.no_grad()
    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        texts = []
        for one in group:
            answer = {"role": "assistant", "content": one.example.answer_start + one.text}
            turns = [*one.example.turns, answer]
            # As text: the reward model has a tokenizer and a template of its own.
            texts.append(apply_chat_template(self.tokenizer, turns, tokenize=False))
        found: list[float] = []
        for first in range(0, len(texts), _BATCH_SIZE):
            some = texts[first : first + _BATCH_SIZE]
            batch = self.tokenizer(
                some, add_special_tokens=False, padding=True, return_tensors="pt"
            ).to(self.model.device)
            # In the reward model's own dtype, whatever the policy's precision.
            with without_autocast(self.model.device):
                logits = self.model(
                    input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
                ).logits
            found += logits[:, 0].float().tolist()
        return [RewardScore(total=value) for value in found]
