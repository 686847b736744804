"""A masked diffusion model that starts from an autoregressive checkpoint.

As Dream was made from Qwen2.5 and SDAR from Qwen3: the decoder keeps its weights, attention turns
bidirectional, and a mask token is added (arXiv:2410.17891 describes the adaptation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_dlm.backbones.location import read_json_object
from lit_dlm.backbones.special_tokens import read_added_tokens


@dataclass(frozen=True, kw_only=True)
class FromAR:
    """How an autoregressive Qwen2, Llama or Qwen3 checkpoint becomes a diffusion model."""

    shift: Literal[0, 1]
    """1 keeps next-token prediction: row ``i - 1`` predicts token ``i`` (Dream); 0 trains row ``i``
    to predict token ``i`` (SDAR). Give it explicitly: the other value needs other training."""
    mask_token: str = "<|mask|>"
    """How the mask token is written, where the tokenizer has one already."""
    mask_id: int | None = None
    """Its id; by default that of ``mask_token``, else the first id behind the tokenizer's last."""
    attention: Literal["full", "block"] = "full"
    """Attention layout to train."""
    block_size: int | None = None
    """Block length, with block attention."""

    def __post_init__(self) -> None:
        if self.shift not in (0, 1):
            raise ValueError(f"from_ar.shift: expected 0 or 1, got {self.shift!r}")
        if self.mask_id is not None and self.mask_id < 0:
            raise ValueError(f"from_ar.mask_id: expected an id from 0, got {self.mask_id}")

    def find_mask_id(
        self, vocab_size: int, added_tokens: Mapping[str, int], *, tokenizer_size: int | None
    ) -> int:
        """Decides the id of the mask token.

        Args:
            vocab_size: rows of the checkpoint's embedding.
            added_tokens: text to id of the tokenizer's added tokens.
            tokenizer_size: ids that the tokenizer uses; ``None`` without a tokenizer.

        Returns:
            The id. From ``vocab_size`` on, the embedding and the head have to grow.

        Raises:
            ValueError: the tokenizer gives the mask token another id, or uses the id otherwise.
        """
        known = added_tokens.get(self.mask_token)
        if self.mask_id is None:
            if known is not None:
                return known
            return vocab_size if tokenizer_size is None else tokenizer_size
        if known is not None and known != self.mask_id:
            raise ValueError(
                f"from_ar.mask_id: got {self.mask_id}, but the tokenizer gives "
                f"{self.mask_token!r} the id {known}"
            )
        if known is None and tokenizer_size is not None and self.mask_id < tokenizer_size:
            raise ValueError(
                f"from_ar.mask_id: got {self.mask_id}, which the tokenizer uses for another token; "
                f"expected an id from {tokenizer_size} on, or None"
            )
        return self.mask_id

    def spec_fields(self) -> dict[str, Any]:
        """The fields of the backbone's specification that this decides."""
        return {"shift": self.shift, "attention": self.attention, "block_size": self.block_size}


def tokenizer_size(folder: Path) -> int | None:
    """One more than the largest id of a folder's tokenizer.

    Args:
        folder: with ``tokenizer.json`` or ``vocab.json``, and added tokens.

    Returns:
        The size, or ``None`` without a vocabulary file.
    """
    largest = max(read_added_tokens(folder).values(), default=-1)
    if (folder / "tokenizer.json").is_file():
        model = read_json_object(folder / "tokenizer.json").get("model", {})
        vocabulary = model.get("vocab", {})
        # Unigram models list pairs in the order of their ids.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max([largest, *ids]) + 1
    if (folder / "vocab.json").is_file():
        return max([largest, *read_json_object(folder / "vocab.json").values()]) + 1
    return None


@torch.no_grad()
def add_mask_row(model: PreTrainedModel, *, mask_id: int, vocab_size: int) -> None:
    """Gives the mask token its rows in the embedding and the head, in place.

    Both matrices grow where needed. The new rows, and the mask's own row where the checkpoint has
    an unused one there, start at the mean of the checkpoint's rows: an ordinary size, and no
    token's meaning.

    Args:
        model: with its weights loaded.
        mask_id: id of the mask token.
        vocab_size: rows wanted, at least ``mask_id + 1``.
    """
    embedding, head = model.model.embed_tokens, model.lm_head
    tied = head.weight is embedding.weight
    embedding.weight = _grown(embedding.weight, vocab_size, mask_id)
    head.weight = embedding.weight if tied else _grown(head.weight, vocab_size, mask_id)
    embedding.num_embeddings = head.out_features = vocab_size
    for holder in (model.config, model, model.model):
        holder.vocab_size = vocab_size


def _grown(weight: Tensor, num_rows: int, mask_id: int) -> nn.Parameter:
    mean = weight.float().mean(dim=0).to(weight.dtype)
    grown = weight
    if num_rows > len(weight):
        grown = torch.cat([weight, mean.expand(num_rows - len(weight), -1)])
    grown[mask_id] = mean
    return nn.Parameter(grown.detach(), requires_grad=weight.requires_grad)
