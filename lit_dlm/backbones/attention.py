"""The SDPA route of the decoders, without copies of cached keys and values.

Under a mask, transformers repeats the keys and values of every head for all query heads that share
it. For a window of a few columns against a long cache that copy costs more than the attention
(SDAR-8B: four times the cache, in each layer of each forward). The query heads of a group can as
well be further queries of their one key head.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GROUPED_SDPA = "lit_dlm_sdpa"
"""Name of the route among transformers' attention functions."""


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Args:
        module: the layer's attention module.
        query: ``(B, H, W, d)``.
        key: ``(B, h, K, d)``; each of its heads serves ``H / h`` neighbouring query heads.
        value: like ``key``.
        attention_mask: bool, broadcastable to ``(B, 1, W, K)``, ``True`` where the query sees the
            key; ``None``: everywhere.
        kwargs: as transformers passes them.

    Returns:
        ``(B, W, H, d)`` and no weights. Whatever is not a masked window against a longer cache goes
        through transformers' own function.
    """
    B, H, W, d = query.shape
    heads = key.shape[1]
    if attention_mask is None or heads == H or key.shape[2] <= W:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = F.scaled_dot_product_attention(
        query.reshape(B, heads, H // heads * W, d),
        key,
        value,
        attn_mask=attention_mask.expand(-1, -1, W, -1).repeat(1, 1, H // heads, 1),
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return output.reshape(B, H, W, d).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
