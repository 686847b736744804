"""Padding turned into masks and position ids."""

from __future__ import annotations

import torch

from lit_dlm.backbones.visibility import key_visibility, mask_for, position_ids_for

PAD_MASK = torch.tensor([[False, True, True], [True, True, True]])


def test_every_query_sees_exactly_the_real_keys():
    visible = key_visibility(PAD_MASK)
    assert visible.shape == (2, 1, 3, 3)
    for query in range(3):
        assert torch.equal(visible[:, 0, query], PAD_MASK)
    assert torch.equal(key_visibility(PAD_MASK.long()), visible)


def test_the_eager_mask_adds_nothing_where_visible_and_the_minimum_elsewhere():
    visible = key_visibility(PAD_MASK)
    assert mask_for("sdpa", visible, torch.float32) is visible
    for dtype in (torch.float32, torch.bfloat16):
        additive = mask_for("eager", visible, dtype)
        assert additive.dtype == dtype
        assert additive[0, 0, 0].tolist() == [torch.finfo(dtype).min, 0.0, 0.0]
        assert not additive[1].any()


def test_counted_positions_start_at_the_first_real_token():
    """One pad: its own value does not matter and is clamped to 0; tokens count 0, 1."""
    assert position_ids_for(PAD_MASK, "cumsum").tolist() == [[0, 0, 1], [0, 1, 2]]


def test_column_positions_ignore_padding():
    assert position_ids_for(PAD_MASK, "arange").tolist() == [[0, 1, 2], [0, 1, 2]]
