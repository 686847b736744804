"""The attention functions of the decoders: windows against cached keys, and rows of any lengths.

transformers calls one of these in every layer, by its name in :data:`ROUTES`:

- ``sdpa``: torch's fused attention. The query heads that share a key head become further queries of
  it: under a mask transformers would repeat keys and values for all of them, which for a window of
  a few columns costs more than the attention (SDAR-8B: four times the cache, in each layer).
- ``varlen``: torch's flash kernel for sequences of different lengths, which needs no mask, for
  windows in half precision on a GPU (Ampere or newer). Forwards that it cannot express, and those
  that are trained, go through ``sdpa``.
- ``auto``: ``varlen`` where it runs, else ``sdpa``; where keys are many a CPU takes one sequence
  after the other, so that none meets keys that it does not see.

Boolean masks say which keys a query sees (``True``); the route brings them into its kernel's form.
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

from lit_dlm.backbones.base import BackboneSpec
from lit_dlm.ops.masking import block_causal_visibility, block_numbers


def key_visibility(pad_mask: Tensor) -> Tensor:
    """Every query sees the real keys: ``(B, L)``, nonzero on these, to ``(B, 1, 1, L)`` bool."""
    return pad_mask.bool()[:, None, None, :]


def position_ids_for(pad_mask: Tensor, positions: Literal["cumsum", "arange"]) -> Tensor:
    """Position ids ``(B, L)`` int64 under padding; the mask is nonzero on real tokens.

    ``cumsum`` counts from the first real token, so that left padding does not move a row;
    ``arange`` is the column number. Values on padding do not matter.
    """
    if positions == "cumsum":
        return (pad_mask.long().cumsum(dim=1) - 1).clamp_min(0)
    return torch.arange(pad_mask.shape[1], device=pad_mask.device).expand_as(pad_mask)


def attention_visibility(
    spec: BackboneSpec,
    ids: Tensor,
    *,
    pad_mask: Tensor | None = None,
    response_start: int | None = None,
) -> Tensor | None:
    """Who sees whom in one forward over a canvas, by the layout the model was trained with.

    Bool, broadcastable to ``(B, 1, L, L)``, ``True`` where the query (third axis) may see the key.
    """
    # None where everyone sees all: a mask would keep the fastest kernels away.
    if spec.attention == "full":
        return None if pad_mask is None else key_visibility(pad_mask)
    counts_from_response = spec.block_origin == "response"
    assert spec.block_size is not None
    assert response_start is not None or not counts_from_response
    blocks = block_numbers(
        ids.shape[1] if pad_mask is None else pad_mask,
        spec.block_size,
        origin=response_start if counts_from_response else None,
        device=ids.device,
    )
    return block_causal_visibility(blocks, pad_mask)


AttentionRoute = Literal["auto", "sdpa", "varlen"]


class Sequences(NamedTuple):
    """Queries with a range of keys each, as the flash kernel for different lengths takes them.

    For attention the ``G`` query heads that share a key head are further queries of it.
    """

    query_starts: Tensor
    """``(S + 1,)`` int32: the first of each sequence's queries among all, and their number."""
    key_starts: Tensor
    """``(S + 1,)`` int32: its first key among the ``B * L`` of the buffers."""
    num_keys: Tensor
    """``(S,)`` int32: keys that it sees."""
    most_queries: int
    most_keys: int

    def grouped(self, groups: int) -> Sequences:
        """The same with ``G`` queries for each."""
        return self._replace(
            query_starts=self.query_starts * groups, most_queries=self.most_queries * groups
        )


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


def added_mask(visible: Tensor, *, groups: int, dtype: torch.dtype) -> Tensor:
    """A mask ``(B, 1, 1 or groups * W, K)`` that is added to the scores, made once for all layers.

    ``visible`` is ``(B, 1, 1 or W, K)`` bool, ``True`` where the query may see the key; ``groups``
    query heads to a key head become queries of one.
    """
    B, _, rows, K = visible.shape
    # The kernel copies a mask whose rows do not begin at multiples of eight.
    added = torch.zeros(B, 1, rows, -(-K // 8) * 8, dtype=dtype, device=visible.device)[..., :K]
    added.masked_fill_(~visible, -torch.inf)
    return added if rows == 1 or groups == 1 else added.repeat(1, 1, groups, 1)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention as a kernel; uncompiled it has a matrix of scores."""
    # Kernels differ by model, gradients and one row or several; past the limit none would be made.
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
    """Attention of one layer through torch's fused kernels.

    Queries ``(B, H, W, d)``, or ``(1, H, T, d)`` with a packing, and keys and values
    ``(B, h, K, d)``, each head of which serves ``H / h`` neighbouring query heads, give
    ``(B, W, H, d)``, or ``(1, T, H, d)``, and no weights. The mask is from :func:`added_mask`, or
    of a whole canvas ``(B, 1, L, L)`` bool or by blocks.
    """
    if isinstance(attention_mask, BlockMask):
        attend: Any = _compiled_flex() if query.is_cuda else flex_attention
        if torch.is_autocast_enabled(query.device.type):  # which knows SDPA alone
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        scale = kwargs.get("scaling")
        output = attend(query, key, value, block_mask=attention_mask, scale=scale, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None
    # Whole canvases get transformers' own order of sums, which training keeps.
    if packing is None and (attention_mask is None or attention_mask.dtype == torch.bool):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
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


def _grouped(query: Tensor, heads: int) -> Tensor:
    """``(B * W * G, h, d)`` queries of ``(B, h * G, W, d)``."""
    parts = query.unflatten(1, (heads, -1)).permute(0, 3, 2, 1, 4)  # (B, W, G, h, d)
    return parts.flatten(0, 2).contiguous()


def _ungrouped(output: Tensor, query: Tensor) -> Tensor:
    """``(B, W, h * G, d)`` of :func:`_grouped`'s rows for queries ``(B, h * G, W, d)``."""
    B, H, W, d = query.shape
    heads = output.shape[1]
    return output.view(B, W, H // heads, heads, d).transpose(2, 3).reshape(B, W, H, d)


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

    As :func:`grouped_sdpa`, or with ``sequences``: then there is no mask, they count the queries of
    all ``H / h`` heads of a key head, and the keys are whole buffers ``(B, h, L, d)`` whose memory
    is ``(B, L, h, d)``.
    """
    if sequences is None:
        return grouped_sdpa(module, query, key, value, attention_mask, **kwargs)
    output = varlen_attn(
        # Under autocast rotated queries of float32 weights are float32.
        _grouped(query, key.shape[1]).to(value.dtype),
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        sequences.query_starts,
        sequences.key_starts,
        sequences.most_queries,
        sequences.most_keys,
        scale=kwargs.get("scaling"),
        seqused_k=sequences.num_keys,
    )
    return _ungrouped(output, query), None  # type: ignore[arg-type]


def one_by_one(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Sequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, each sequence over its own keys; arguments as in :func:`varlen`."""
    if sequences is None:
        return grouped_sdpa(module, query, key, value, attention_mask, **kwargs)
    rows = _grouped(query, key.shape[1])
    keys, values = key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)
    output = torch.empty_like(rows)
    starts = sequences.query_starts.tolist()
    firsts, counts = sequences.key_starts.tolist(), sequences.num_keys.tolist()
    for begin, end, first, count in zip(starts, starts[1:], firsts, counts, strict=False):
        seen = slice(first, first + count)
        attended = F.scaled_dot_product_attention(
            rows[begin:end].transpose(0, 1)[None],
            keys[seen].transpose(0, 1)[None],
            values[seen].transpose(0, 1)[None],
            scale=kwargs.get("scaling"),
        )
        output[begin:end] = attended[0].transpose(0, 1)
    return _ungrouped(output, query), None


def auto(module: nn.Module, query: Tensor, *others: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """:func:`varlen` or, on a CPU, :func:`one_by_one`."""
    attend = one_by_one if query.device.type == "cpu" else varlen
    return attend(module, query, *others, **kwargs)


ROUTES: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "auto": auto, "varlen": varlen, "sdpa": grouped_sdpa
}  # fmt: skip
"""Attention functions by the setting ``attn_implementation``. They share one signature."""

for _name, _function in ROUTES.items():
    AttentionInterface.register(f"lit_dlm_{_name}", _function)


_MANY_KEYS = 512
"""Keys from which on a CPU's attention costs more than its calls."""


def sequences_from(
    route: str, device: torch.device, dtype: torch.dtype, *, num_heads: int
) -> int | None:
    """Keys of a row from which on windows describe themselves by sequences; ``None``: never.

    ``route`` is a key of :data:`ROUTES`, ``num_heads`` counts the key heads.
    """
    if route == "auto" and device.type == "cpu":
        # One sequence after the other has no more parallel parts than key heads.
        return _MANY_KEYS if torch.get_num_threads() <= num_heads else None
    is_half = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return 0 if route == "varlen" or (route == "auto" and is_half and _has_flash(device)) else None


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether torch and the card (an Ampere or newer) have the flash kernel as it is called."""
    is_ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    return is_ampere and "seqused_k" in inspect.signature(varlen_attn).parameters
