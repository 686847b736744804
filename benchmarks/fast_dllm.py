"""Decodes as Fast-dLLM does (arXiv 2505.22618), plainly on transformers' own model: a peer.

As in the release, every column that a forward covers, masked or not, goes through the head and a
float64 softmax; the prefix cache is cut at the block and extended by concatenation; the dual cache
copies the canvas's keys and values and writes the block's into the copy. Tokens are greedy, in
order of confidence, with an even number per step.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lit_dlm.backbones.hf import HFBackbone

Scheme = Literal["none", "prefix", "dual"]


def plain_model(backbone: HFBackbone) -> PreTrainedModel:
    """Transformers' own model on the same weights, bidirectional, with its SDPA."""
    config = type(backbone.model.config).from_dict(backbone.model.config.to_dict())
    config.is_causal, config._attn_implementation = False, "sdpa"
    with torch.device("meta"):
        model = backbone.architecture.model_class(config)
    model.load_state_dict(backbone.model.state_dict(), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model.eval()


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    start: int,
    block: int,
    steps: int,
    mask_id: int,
    scheme: Scheme,
) -> Tensor:
    """Fills the masks of ``(B, L)`` int64 ids, from column ``start`` on, block by block.

    The cells of a block divide the length of the response; the steps of the whole response are a
    multiple of its number of blocks.
    """
    ids = ids.clone()
    length = ids.shape[1]
    each = steps // ((length - start) // block)
    for begin in range(start, length, block):
        end = begin + block
        quotas = [block // each + (step < block % each) for step in range(each)]
        cache: _Columns | None = None
        for quota in quotas:
            if scheme == "none":
                columns, logits = 0, model(ids, use_cache=False).logits
            elif cache is None:
                cache = _Columns(len(model.model.layers))
                columns, logits = 0, model(ids, past_key_values=cache).logits
                if scheme == "prefix":
                    cache.crop_to(begin)
                cache.begin = begin if scheme == "dual" else None
            else:
                last = end if scheme == "dual" else length
                positions = torch.arange(begin, last, device=ids.device)[None]
                columns = begin
                logits = model(
                    ids[:, begin:last], past_key_values=cache, position_ids=positions
                ).logits
            _write(ids, logits, columns, end, quota, mask_id)
    return ids


def _write(ids: Tensor, logits: Tensor, first: int, end: int, quota: int, mask_id: int) -> None:
    """Commits the surest masked cells left of ``end``; ``logits`` begin at column ``first``."""
    logits[..., mask_id] = -torch.inf
    seen = ids[:, first : first + logits.shape[1]]
    proposed = logits.argmax(-1)
    probs = logits.to(torch.float64).softmax(-1).gather(-1, proposed[..., None])[..., 0]
    is_open = seen == mask_id
    is_open[:, end - first :] = False
    proposed = torch.where(is_open, proposed, seen)
    surest = torch.where(is_open, probs, -torch.inf).topk(quota, dim=1).indices
    seen.scatter_(1, surest, proposed.gather(1, surest))


class _Columns(Cache):
    """Keys and values that a forward appends to, or writes into from a column on."""

    def __init__(self, num_layers: int) -> None:
        self.begin: int | None = None
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])

    def crop_to(self, length: int) -> None:
        """Forgets all columns from ``length`` on."""
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


class _Layer(CacheLayerMixin):
    def __init__(self, cache: _Columns) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values, self.is_initialized = key_states, value_states, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Returns what attention sees: all columns, those of this forward in their places."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        assert self.keys is not None
        assert self.values is not None
        if self.cache.begin is None:
            return (
                torch.cat([self.keys, key_states], dim=2),
                torch.cat([self.values, value_states], dim=2),
            )
        at = slice(self.cache.begin, self.cache.begin + key_states.shape[2])
        self.keys, self.values = self.keys.clone(), self.values.clone()
        self.keys[:, :, at], self.values[:, :, at] = key_states, value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length if self.keys is None else self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        return -1  # there is no limit
