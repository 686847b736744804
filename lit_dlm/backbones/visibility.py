"""What a query sees and where it stands: padding, blocks, positions, the shift of predictions.

Boolean masks are ``True`` where a query sees a key. A *column* is an index into a canvas.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_dlm.backbones.base import BackboneSpec


def first_column(is_in: Tensor) -> Tensor:
    """``(B,)`` int64: first ``True`` column of each row of a ``(B, L)`` mask, 0 without one."""
    return is_in.bool().view(torch.uint8).argmax(1)


def position_ids_for(pad_mask: Tensor, positions: Literal["cumsum", "arange"]) -> Tensor:
    """Returns position ids ``(B, L)`` int64 under padding; the mask is nonzero on real tokens.

    ``cumsum`` counts from the first real token, so that left padding shifts no position;
    ``arange`` is the column number. Values on padding do not matter.
    """
    if positions == "cumsum":
        return (pad_mask.long().cumsum(dim=1) - 1).clamp_min(0)
    return torch.arange(pad_mask.shape[1], device=pad_mask.device).expand_as(pad_mask)


def canvas_positions(spec: BackboneSpec, ids: Tensor, pad_mask: Tensor | None) -> Tensor:
    """``(B, L)`` int64: position ids of a canvas, without padding the column numbers."""
    if pad_mask is not None:
        return position_ids_for(pad_mask, spec.positions)
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def key_visibility(pad_mask: Tensor) -> Tensor:
    """Lets every query see the real keys: ``(B, L)``, nonzero there, to ``(B, 1, 1, L)`` bool."""
    return pad_mask.bool()[:, None, None, :]


def block_numbers(real: Tensor, block_size: int, *, origin: int | None = None) -> Tensor:
    """``(1, L)`` or ``(B, L)`` int64: the block number of every column, negative before block 0.

    Block 0 starts at column ``origin``, or at the first real token of each row of ``(B, L)``.
    """
    first = 0 if origin is None else -origin
    columns = torch.arange(first, first + real.shape[1], device=real.device)[None]  # (1, L)
    if origin is None:
        columns = columns - first_column(real)[:, None]
    return torch.div(columns, block_size, rounding_mode="floor")


def canvas_blocks(
    spec: BackboneSpec, ids: Tensor, pad_mask: Tensor | None, response_start: int | None
) -> Tensor:
    """``(1, L)`` or ``(B, L)`` int64: the block of every column of a block model's canvas."""
    assert spec.block_size is not None
    origin = 0 if pad_mask is None else None
    if spec.block_origin == "response":
        origin = response_start
    blocks = block_numbers(ids if pad_mask is None else pad_mask, spec.block_size, origin=origin)
    return blocks.clamp_min(-1) if spec.whole_prompt else blocks


def attention_blocks(
    spec: BackboneSpec, ids: Tensor, pad_mask: Tensor | None, response_start: int | None
) -> Tensor:
    """``(1, L)`` or ``(B, L)`` int64: as :func:`canvas_blocks`, but of what sees itself whole.

    With ``causal_context`` each token before the first block with a mask is a block of its own.
    """
    blocks, length = canvas_blocks(spec, ids, pad_mask, response_start), ids.shape[1]
    if not spec.causal_context:
        return blocks
    first_open = torch.where(ids == spec.mask_id, blocks, length).amin(1, keepdim=True)
    columns = torch.arange(length, device=ids.device)
    return blocks * length + columns * (blocks < first_open)


def attention_visibility(
    spec: BackboneSpec,
    ids: Tensor,
    *,
    pad_mask: Tensor | None = None,
    response_start: int | None = None,
) -> Tensor | None:
    """Returns which keys each query sees in a canvas, by the attention the model was trained with.

    Bool, broadcastable to ``(B, 1, L, L)``, ``True`` where the query (third axis) may see the key.
    """
    # None if every query sees every key: a mask would rule out the fastest kernels.
    # Padding is hidden as a key. What it computes as a query is never read.
    if spec.attention == "full":
        return None if pad_mask is None else key_visibility(pad_mask)
    assert response_start is not None or spec.block_origin == "sequence"
    return block_causal_visibility(attention_blocks(spec, ids, pad_mask, response_start), pad_mask)


def block_causal_visibility(blocks: Tensor, real: Tensor | None = None) -> Tensor:
    """``(B, 1, L, L)`` bool: queries (third axis) see their own and earlier blocks (SDAR).

    Blocks are ``(B, L)`` or ``(1, L)`` int64; padding, not ``real``, is seen only by itself.
    """
    return hide_padding(blocks[:, None, :, None] >= blocks[:, None, None, :], real)


def hide_padding(visible: Tensor, real: Tensor | None) -> Tensor:
    """Hides padded keys; a query that is left with none sees itself."""
    if real is None:
        return visible
    return with_own_key(visible & real.bool()[:, None, None, :])


def with_own_key(visible: Tensor) -> Tensor:
    """Lets a query of ``(B, 1, L, L)`` that sees nothing see itself.

    Some kernels return NaN for a query without keys, which spreads to other rows in the next layer.
    """
    diagonal = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    return visible | (diagonal & ~visible.any(dim=-1, keepdim=True))


def added_mask(visible: Tensor, *, groups: int, dtype: torch.dtype) -> Tensor:
    """Returns an additive mask ``(B, 1, 1 or groups * W, K)``, to be made once for all layers.

    ``visible`` is ``(B, 1, 1 or W, K)`` bool, ``True`` where the query may see the key; ``groups``
    is the number of query heads that become queries of one key head.
    """
    B, _, rows, K = visible.shape
    # The kernel would copy a mask whose rows do not begin at multiples of eight.
    added = torch.zeros(B, 1, rows, -(-K // 8) * 8, dtype=dtype, device=visible.device)[..., :K]
    added.masked_fill_(~visible, -torch.inf)
    return added if rows == 1 or groups == 1 else added.repeat(1, 1, groups, 1)


def aligned(rows: Tensor, shift: int, *, starts: Tensor | None = None) -> Tensor:
    """``(B, L, ...)``: raw rows moved so that row ``i`` predicts token ``i``; shift 0 moves none.

    The first real token, in column ``starts`` ``(B,)`` int64 (0 by default), has no predictor under
    a shift; it keeps its own raw row, not that of the padding before it.
    """
    if shift == 0:
        return rows
    # Concatenated, not rolled: the last raw row predicts a token that is not on the canvas.
    moved = torch.cat([rows[:, :1], rows[:, :-1]], dim=1)
    if starts is None:
        return moved
    is_first = torch.arange(rows.shape[1], device=rows.device) == starts.unsqueeze(1)  # (B, L)
    return torch.where(is_first.reshape(*is_first.shape, *[1] * (rows.ndim - 2)), rows, moved)


def raw_columns(columns: Tensor, shift: int, *, starts: Tensor | None = None) -> Tensor:
    """The ``(B, K)`` columns whose raw rows predict ``(B, K)`` int64 canvas columns.

    ``aligned(rows, shift, starts=starts)`` at ``columns`` equals ``rows`` at the result.
    """
    if shift == 0:
        return columns
    source = (columns - shift).clamp_min(0)
    if starts is not None:
        source = torch.where(columns == starts.unsqueeze(1), columns, source)
    return source
