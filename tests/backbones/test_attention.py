"""The SDPA route: a window against cached keys, some query heads for each key head."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from lit_dlm.backbones import attention
from lit_dlm.backbones.attention import grouped_sdpa
from lit_dlm.backbones.visibility import added_mask


def _inputs(*, window: int, mask_rows: int, mask_width: int):
    """Two rows, six query heads on two key heads, seven keys; the last one is hidden in row 0."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, window, 4, generator=generator)
    buffers = torch.randn(2, 2, 2, 9, 4, generator=generator)
    key, value = buffers[..., :7, :]  # views of longer buffers
    visible = torch.rand(mask_rows, 1, mask_width, 7, generator=generator) < 0.7
    visible[0, ..., -1] = False
    visible[..., 0] = True
    return query, key, value, visible


def _slow(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    B, H, W, _ = query.shape
    visible = visible.expand(B, 1, W, -1)
    output = torch.empty(B, W, H, value.shape[-1])
    for b, h, w in product(range(B), range(H), range(W)):
        seen = visible[b, 0, w]
        scores = key[b, h // 3][seen] @ query[b, h, w] * scale
        output[b, w, h] = scores.softmax(0) @ value[b, h // 3][seen]
    return output


@pytest.mark.parametrize(("mask_rows", "mask_width"), [(2, 3), (2, 1), (1, 3)])
def test_a_masked_window_equals_a_slow_loop_and_repeats_no_keys(
    mask_rows: int, mask_width: int, monkeypatch: pytest.MonkeyPatch
):
    query, key, value, visible = _inputs(window=3, mask_rows=mask_rows, mask_width=mask_width)
    seen: list[Tensor] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        seen.extend([k, v])
        return plain(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched)
    mask = added_mask(visible, groups=3, dtype=torch.float32)
    output, weights = grouped_sdpa(nn.Module(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, _slow(query, key, value, visible, 0.3))
    assert weights is None
    assert [tensor.data_ptr() for tensor in seen] == [key.data_ptr(), value.data_ptr()]


def test_an_added_mask_has_aligned_rows_and_says_the_same_of_every_group():
    """Two queries and three keys: rows begin every eight cells, where kernels read them as is."""
    visible = torch.tensor([[[[True, False, True], [False, True, True]]]])
    mask = added_mask(visible, groups=1, dtype=torch.bfloat16)
    inf = float("inf")
    assert mask.tolist() == [[[[0.0, -inf, 0.0], [-inf, 0.0, 0.0]]]]
    assert mask.stride()[-2:] == (8, 1)
    twice = added_mask(visible, groups=2, dtype=torch.float32)
    assert twice.tolist() == [[[[0.0, -inf, 0.0], [-inf, 0.0, 0.0]] * 2]]
