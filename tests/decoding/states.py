"""Hand-made decode states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lit_dlm.decoding import DecodeState
from tests.fakes import EOS, MASK


def state_with_masks(masks: Sequence[Sequence[int]], *, step: int = 0) -> DecodeState:
    """Two prompt columns, then one response column per entry; 1 = masked, 0 = token 5."""
    response = torch.tensor(masks)
    b = len(masks)
    prompt = torch.full((b, 2), 4)
    ids = torch.cat([prompt, torch.where(response == 1, MASK, 5)], dim=1)
    editable = torch.arange(ids.shape[1]).expand_as(ids) >= 2
    zeros = torch.zeros(b, dtype=torch.long)
    return DecodeState(
        ids=ids,
        editable=editable,
        masked=editable & (ids == MASK),
        positions=torch.arange(ids.shape[1]).expand_as(ids),
        rows=torch.arange(b),
        seeds=torch.arange(b) + 10,
        step=torch.full((b,), step),
        start=2,
        mask_id=MASK,
        eos_ids=torch.tensor([EOS]),
        pad_mask=None,
        block=zeros,
        block_step=zeros,
        block_masks=(ids == MASK).sum(1),
    )


def in_block(state: DecodeState, *, step: int, masks: int, num_blocks: int = 1) -> DecodeState:
    """The same state, ``step`` steps into a block that was entered with ``masks`` masks."""
    return replace(
        state,
        block_step=torch.full_like(state.block_step, step),
        block_masks=torch.full_like(state.block_masks, masks),
        num_blocks=num_blocks,
    )
