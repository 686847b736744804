"""Which keys a query sees, and the position ids that go with it.

Masks are boolean here, ``True`` where a query sees a key; :mod:`lit_dlm.backbones.attention` brings
them into the form of its kernels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
