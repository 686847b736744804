"""Attention functions of the decoders: windows against cached keys, and rows of any length.

transformers calls one of these in every layer, by its name in :data:`ROUTES`:

- ``sdpa``: torch's fused attention. Query heads that share a key head become further queries of
  that head. Under a mask, transformers would instead repeat keys and values for each of them; for a
  window of a few columns this costs more than the attention (SDAR-8B: 4 times the cache per layer).
- ``varlen``: torch's flash kernel for sequences of different lengths, which needs no mask, for all
  windows; it needs half precision on a GPU (Ampere or newer). Training forwards go through
  ``sdpa``.
- ``auto``: ``varlen`` where it runs, else ``sdpa``. With many keys, a CPU computes one sequence at
  a time, each with only the keys that it sees.

Boolean masks are ``True`` where a query sees a key; they are converted to what the kernel takes.
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
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# On Hopper torch prefers cuDNN, whose backward under a mask gives NaN at some lengths in torch 2.13
# (github.com/pytorch/pytorch/issues/196678).
torch.backends.cuda.enable_cudnn_sdp(False)

AttentionRoute = Literal["auto", "sdpa", "varlen"]


class Sequences(NamedTuple):
    """Sequences of queries with a range of keys each, as the ``varlen`` kernel takes them.

    In attention, the ``G`` query heads that share a key head count as further queries of it.
    """

    query_starts: Tensor
    """``(S + 1,)`` int32: index of each sequence's first query, then the number of all queries."""
    key_starts: Tensor
    """``(S + 1,)`` int32: index of each sequence's first key in the buffers, then ``B * L``."""
    num_keys: Tensor
    """``(S,)`` int32: number of keys that each sequence sees."""
    most_queries: int
    most_keys: int

    def grouped(self, groups: int) -> Sequences:
        """Returns the same sequences with ``groups`` queries in place of each query."""
        return self._replace(
            query_starts=self.query_starts * groups, most_queries=self.most_queries * groups
        )


@dataclass(frozen=True)
class Packing:
    """Windows of different widths side by side in one row, and their grid for attention.

    The grid has one row per window and is as wide as the widest of them; cells past the end of a
    window hold some other query and are dropped.
    """

    rows: Tensor
    """``(1, T)`` int64: row of the buffers that each query belongs to."""
    cells: Tensor
    """``(n, W)`` int64: index of the query in each cell of the grid."""
    windows: Tensor
    """``(T,)`` int64: row of the grid that each query is in."""
    offsets: Tensor
    """``(T,)`` int64: column of the grid that each query is in."""

    def grid(self, packed: Tensor) -> Tensor:
        """Lays packed queries ``(1, H, T, d)`` out as a grid ``(n, H, W, d)``."""
        return packed[0].transpose(0, 1)[self.cells].transpose(1, 2)

    def pack(self, grid: Tensor) -> Tensor:
        """Packs a grid ``(n, H, W, d)`` into one row ``(1, T, H, d)``."""
        return grid.transpose(1, 2)[self.windows, self.offsets][None]


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Returns compiled FlexAttention; uncompiled, it would hold a whole matrix of scores."""
    # A kernel is compiled for each model, with or without gradients, for one row or several; past
    # the limit torch would compile no more.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, fullgraph=True)


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
    """Computes the attention of one layer with torch's fused kernels.

    Queries are ``(B, H, W, d)``, or ``(1, H, T, d)`` with a packing; keys and values are
    ``(B, h, K, d)``, and each key head serves ``H / h`` neighbouring query heads. Returns
    ``(B, W, H, d)``, or ``(1, T, H, d)``, and no weights. The mask is one of :func:`added_mask` or,
    for a whole canvas, ``(B, 1, L, L)`` bool or a block mask.
    """
    # Rows of training with many states: their mask is never made as a matrix.
    if isinstance(attention_mask, BlockMask):
        attend: Any = _compiled_flex() if query.is_cuda else flex_attention
        if torch.is_autocast_enabled(query.device.type):  # autocast covers SDPA only
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        scale = kwargs.get("scaling")
        if kwargs.get("dropout"):
            raise ValueError("attention_dropout: expected 0 in rows with a block mask")
        output = attend(query, key, value, block_mask=attention_mask, scale=scale, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None
    # Whole canvases, and so training, keep transformers' own order of summation.
    if packing is None and (attention_mask is None or attention_mask.dtype == torch.bool):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # Keys lie in whole buffers, row by row; so queries are laid out in rows, too.
    if packing is not None:
        query = packing.grid(query)
    B, H, W, d = query.shape
    heads = key.shape[1]
    # A mask that is not repeated for the groups would not fit their queries.
    is_grouped = attention_mask is None or attention_mask.shape[2] in (1, H // heads * W)
    output = F.scaled_dot_product_attention(
        query.reshape(B, heads, H // heads * W, d) if is_grouped else query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
        enable_gqa=not is_grouped,
    ).reshape(B, H, W, d)
    if packing is not None:
        return packing.pack(output), None
    return output.transpose(1, 2).contiguous(), None


def together(rows: Tensor, keys: Tensor, values: Tensor, of: Sequences, scale: float) -> Tensor:
    """Returns all sequences' attention ``(T, h, d)`` by torch's kernel for different lengths."""
    return varlen_attn(  # type: ignore[return-value]
        rows,
        keys,
        values,
        of.query_starts,
        of.key_starts,
        of.most_queries,
        of.most_keys,
        scale=scale,
        seqused_k=of.num_keys,
    )


def one_by_one(rows: Tensor, keys: Tensor, values: Tensor, of: Sequences, scale: float) -> Tensor:
    """Returns what :func:`together` does, with a call for each sequence."""
    # Read once for all sequences; on a CPU this waits for nothing.
    output = torch.empty_like(rows)
    starts = of.query_starts.tolist()
    firsts, counts = of.key_starts.tolist(), of.num_keys.tolist()
    # Loops over sequences: with many keys each call takes longer than its overhead, and none
    # computes keys that it does not see.
    for begin, end, first, count in zip(starts, starts[1:], firsts, counts, strict=False):
        seen = slice(first, first + count)
        attended = F.scaled_dot_product_attention(
            rows[begin:end].transpose(0, 1)[None],
            keys[seen].transpose(0, 1)[None],
            values[seen].transpose(0, 1)[None],
            scale=scale,
        )
        output[begin:end] = attended[0].transpose(0, 1)
    return output


def varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Sequences | None = None,
    attend: Callable[..., Tensor] = together,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of one layer over sequences of different lengths.

    Without ``sequences`` this is :func:`grouped_sdpa`. With them there is no mask, they count the
    queries of all ``H / h`` query heads of a key head, and keys and values are whole buffers
    ``(B, h, L, d)``, stored as ``(B, L, h, d)``.
    """
    if sequences is None:
        return grouped_sdpa(module, query, key, value, attention_mask, **kwargs)
    B, H, W, d = query.shape
    grouped = query.unflatten(1, (key.shape[1], -1)).permute(0, 3, 2, 1, 4)  # (B, W, G, h, d)
    # Under autocast, rotated queries of float32 weights are float32.
    rows = grouped.flatten(0, 2).contiguous().to(value.dtype)
    keys, values = key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)
    output = attend(rows, keys, values, sequences, kwargs.get("scaling"))
    return output.view(grouped.shape).transpose(2, 3).reshape(B, W, H, d), None


def auto(module: nn.Module, query: Tensor, *others: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Calls :func:`varlen`, on a CPU with a call for each sequence."""
    attend = one_by_one if query.device.type == "cpu" else together
    return varlen(module, query, *others, attend=attend, **kwargs)


ROUTES: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "auto": auto, "varlen": varlen, "sdpa": grouped_sdpa
}  # fmt: skip
"""Attention functions by the setting ``attn_implementation``. They share one signature."""

for _name, _function in ROUTES.items():
    AttentionInterface.register(f"lit_dlm_{_name}", _function)

_MANY_KEYS = 512
"""Number of keys from which attention on a CPU costs more than the overhead of its calls."""


def sequences_from(
    route: str, device: torch.device, dtype: torch.dtype, *, num_heads: int
) -> int | None:
    """Returns from how many keys per row windows are described by sequences; ``None``: never.

    ``route`` is a key of :data:`ROUTES`, ``num_heads`` the number of key heads.
    """
    if route == "auto" and device.type == "cpu":
        # One sequence at a time has no more parallel parts than there are key heads.
        return _MANY_KEYS if torch.get_num_threads() <= num_heads else None
    is_half = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return 0 if route == "varlen" or (route == "auto" and is_half and _has_flash(device)) else None


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether torch and the GPU (Ampere or newer) have the flash kernel with these arguments."""
    is_ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    return is_ampere and "seqused_k" in inspect.signature(varlen_attn).parameters
