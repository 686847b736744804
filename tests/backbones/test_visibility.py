"""Padding turned into masks and position ids."""

from __future__ import annotations

import torch

from lit_dlm.backbones.visibility import key_visibility, position_ids_for

PAD_MASK = torch.tensor([[False, True, True], [True, True, True]])


def test_every_query_sees_exactly_the_real_keys():
    visible = key_visibility(PAD_MASK)
    assert visible.tolist() == [[[[False, True, True]]], [[[True, True, True]]]]
    assert torch.equal(key_visibility(PAD_MASK.long()), visible)


def test_counted_positions_start_at_the_first_real_token():
    """One pad: its own value does not matter and is clamped to 0; tokens count 0, 1."""
    assert position_ids_for(PAD_MASK, "cumsum").tolist() == [[0, 0, 1], [0, 1, 2]]


def test_column_positions_ignore_padding():
    assert position_ids_for(PAD_MASK, "arange").tolist() == [[0, 1, 2], [0, 1, 2]]
