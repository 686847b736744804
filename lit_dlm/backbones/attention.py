"""The attention functions of the decoders: windows against cached keys, and rows of any lengths.

transformers calls one of these in every layer, by its name in :data:`ROUTES`:

- ``sdpa``: torch's fused attention. The query heads that share a key head become further queries of
  it: under a mask transformers would repeat keys and values for all of them, which for a window of
  a few columns costs more than the attention (SDAR-8B: four times the cache, in each layer).
- ``varlen``: torch's flash kernel for sequences of different lengths, which needs no mask, for
  windows in half precision on a GPU. Forwards that it cannot express, and those that are trained,
  go through ``sdpa``.
- ``auto``: ``varlen`` where it runs, else ``sdpa``.
- ``eager``: plain products and a softmax, as a reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

AttentionRoute = Literal["auto", "sdpa", "varlen", "eager"]


class Sequences(NamedTuple):
    """Queries with a range of keys each, as the flash kernel for different lengths takes them."""

    query_starts: Tensor
    """``(S + 1,)`` int32: the first of each sequence's queries among all, and their number."""
    key_starts: Tensor
    """``(S + 1,)`` int32: its first key among the ``B * L`` of the buffers."""
    num_keys: Tensor
    """``(S,)`` int32: keys that it sees."""
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class Packing:
    """Windows of different widths side by side in one row, and their grid for attention.

    The grid has a row for each window and is as wide as the widest; cells behind the end of a
    window hold a query of another and are dropped.
    """

    rows: Tensor
    """``(1, T)`` int64: row of the buffers that each query belongs to."""
    cells: Tensor
    """``(n, W)`` int64: the query in each cell of the grid."""
    windows: Tensor
    """``(T,)`` int64: row of the grid that each query is in."""
    offsets: Tensor
    """``(T,)`` int64: and its column."""

    def grid(self, packed: Tensor) -> Tensor:
        """``(n, H, W, d)`` of ``(1, H, T, d)``."""
        return packed[0].transpose(0, 1)[self.cells].transpose(1, 2)

    def pack(self, grid: Tensor) -> Tensor:
        """``(1, T, H, d)`` of ``(n, H, W, d)``."""
        return grid.transpose(1, 2)[self.windows, self.offsets][None]


def added_mask(
    visible: Tensor, *, groups: int, dtype: torch.dtype, hidden: float = -torch.inf
) -> Tensor:
    """A mask that is added to the scores, made once for all layers.

    Args:
        visible: ``(B, 1, 1 or W, K)`` bool, ``True`` where the query may see the key.
        groups: query heads to a key head that become queries of one.
        dtype: of the scores.
        hidden: what is added where a query does not see a key; a finite value gives a row without
            keys no NaN.

    Returns:
        ``(B, 1, 1 or groups * W, K)`` of ``dtype``, 0 where visible.
    """
    B, _, rows, K = visible.shape
    # The kernel copies a mask whose rows do not begin at multiples of eight.
    added = torch.zeros(B, 1, rows, -(-K // 8) * 8, dtype=dtype, device=visible.device)[..., :K]
    added.masked_fill_(~visible, hidden)
    return added if rows == 1 or groups == 1 else added.repeat(1, 1, groups, 1)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention as a kernel; uncompiled it has a matrix of scores."""
    return torch.compile(flex_attention)


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer through torch's fused kernels.

    Args:
        module: the layer's attention module.
        query: ``(B, H, W, d)``, or ``(1, H, T, d)`` with a packing.
        key: ``(B, h, K, d)``; each of its heads serves ``H / h`` neighbouring query heads.
        value: like ``key``.
        attention_mask: from :func:`added_mask`, or of a whole canvas ``(B, 1, L, L)`` bool or by
            blocks, then through FlexAttention; ``None``: all is seen.
        packing: of windows of different widths.
        kwargs: as transformers passes them.

    Returns:
        ``(B, W, H, d)``, or ``(1, T, H, d)``, and no weights. Whole canvases without a mask or
        under a matrix go through transformers' own function.
    """
    if isinstance(attention_mask, BlockMask):
        attend: Any = _compiled_flex() if query.is_cuda else flex_attention
        scale = kwargs.get("scaling")
        output = attend(query, key, value, block_mask=attention_mask, scale=scale, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None
    if packing is None and (attention_mask is None or attention_mask.dtype == torch.bool):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if packing is not None:
        query = packing.grid(query)
    B, H, W, d = query.shape
    heads = key.shape[1]
    output = F.scaled_dot_product_attention(
        query.reshape(B, heads, H // heads * W, d),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    ).reshape(B, H, W, d)
    if packing is not None:
        return packing.pack(output), None
    return output.transpose(1, 2).contiguous(), None


def varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Sequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer through the flash kernel for sequences of different lengths.

    Arguments are those of :func:`grouped_sdpa`, and ``sequences`` where the forward has them: then
    there is no mask, and the keys are whole buffers ``(B, h, L, d)`` whose memory is
    ``(B, L, h, d)``.
    """
    if sequences is None:
        return grouped_sdpa(module, query, key, value, attention_mask, **kwargs)
    B, H, W, d = query.shape
    output = varlen_attn(
        query.transpose(1, 2).reshape(B * W, H, d),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        sequences.query_starts,
        sequences.key_starts,
        sequences.most_queries,
        sequences.most_keys,
        scale=kwargs.get("scaling"),
        enable_gqa=True,
        seqused_k=sequences.num_keys,
    )
    return output.view(B, W, H, d), None  # type: ignore[union-attr]


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer by products and a softmax; arguments as in :func:`grouped_sdpa`."""
    if packing is not None:
        query = packing.grid(query)
    output, _ = eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output if packing is None else packing.pack(output.transpose(1, 2)), None


ROUTES: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "auto": varlen, "varlen": varlen, "sdpa": grouped_sdpa, "eager": eager
}  # fmt: skip
"""Attention functions by the setting ``attn_implementation``. They share one signature."""

for _name, _function in ROUTES.items():
    AttentionInterface.register(f"lit_dlm_{_name}", _function)


def takes_sequences(route: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether forwards of windows are to describe themselves by sequences, without a mask.

    Args:
        route: a key of :data:`ROUTES`.
        device: of the model.
        dtype: of the attention.
    """
    if route != "auto":
        return route == "varlen"
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and varlen_attn is not None
        and "seqused_k" in inspect.signature(varlen_attn).parameters
    )
