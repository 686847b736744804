"""A random reward model in the layout of transformers."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from lit_dlm.backbones import load_tokenizer


def save_classifier(folder: Path) -> Path:
    """Writes a classifier of two layers that reads the embedded model's vocabulary."""
    tokenizer = load_tokenizer("tiny")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 1}
    no_ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = Qwen2Config(
        vocab_size=len(tokenizer), initializer_range=0.5, **sizes, **heads, **no_ids
    )
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
