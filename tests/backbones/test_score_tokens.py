"""Scores of chosen cells against the full logits of the same backbone."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from lit_dlm.backbones import HFBackbone, attention
from lit_dlm.backbones.base import Rows
from lit_dlm.training.layout import Slots, wants_block_mask
from tests.backbones.conftest import tiny_architecture


def backbone(**changes: Any) -> HFBackbone:
    torch.manual_seed(3)
    return HFBackbone(architecture=tiny_architecture(**changes), trainable=True)


def canvas() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Canvas, targets, cells to score and padding: two rows, the second left-padded by two."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(5, 32, (2, 7), generator=generator)
    rows = torch.tensor([[0, 0, 1, 0, 1, 1, 0], [0, 0, 0, 1, 0, 1, 1]]).bool()
    pad_mask = torch.ones(2, 7, dtype=torch.bool)
    pad_mask[1, :2] = False
    return targets.masked_fill(rows, 3), targets, rows, pad_mask


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shift": 1},
        {"logit_scale": 0.25, "tie_embeddings": True},
        {"forbidden_ids": (0, 4), "positions": "arange"},
        {"attention": "block", "block_size": 2},
    ],
)
def test_scores_are_those_of_the_logits_of_denoise_and_rows_its_hidden_states(
    changes: dict[str, Any],
) -> None:
    model = backbone(**changes)
    ids, targets, rows, pad_mask = canvas()
    stats, hidden = model.score_with_hidden(Rows(ids, targets, rows, pad_mask), temperature=2.0)
    denoised = model.denoise(ids, pad_mask=pad_mask, hidden_layers=(-1,))
    logits, wanted = denoised.logits[rows] / 2.0, targets[rows]
    expected = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    torch.testing.assert_close(stats.ce, expected)
    finite = logits.masked_fill(logits == -torch.inf, -1e30)
    entropy = torch.distributions.Categorical(logits=finite).entropy()
    torch.testing.assert_close(stats.entropy, entropy)
    assert stats.is_top.equal(logits.argmax(-1) == wanted)
    torch.testing.assert_close(hidden, denoised.hidden[:, :, 0][rows])
    assert model.encode_rows(Rows(ids, targets, rows, pad_mask)).equal(hidden)
    assert model.score_tokens(Rows(ids, ids, rows)).ce.isinf().all()  # all of them masks
    alone = model.score_tokens(Rows(ids, targets, rows, pad_mask), temperature=2.0)
    assert all(one.equal(other) for one, other in zip(stats, alone, strict=True))


@pytest.mark.parametrize("shift", [0, 1])
def test_an_attention_mask_of_the_caller_is_used_as_given(shift: int) -> None:
    """As in ``forward``, which forbids no id either."""
    model = backbone(shift=shift)
    ids, targets, rows, _ = canvas()
    visible = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(2)) < 0.6
    positions = torch.arange(7).flip(0).expand(2, -1)
    stats = model.score_tokens(Rows(ids, targets, rows, visible, positions), forbidden_ids=())
    log_probs = model(ids, visible, positions).log_softmax(-1)[rows]
    expected = log_probs.gather(1, targets[rows][:, None]).squeeze(1)
    torch.testing.assert_close(stats.log_prob, expected)
    with pytest.raises(ValueError, match=r"expected \(B, L\), or a boolean \(B, 1, L, L\)"):
        model.score_tokens(Rows(ids, targets, rows, visible.float()))


def test_gradients_equal_those_of_full_logits_and_are_zero_without_cells() -> None:
    model = backbone(shift=1)
    ids, targets, rows, _ = canvas()
    parameters = list(model.parameters())
    stats = model.score_tokens(Rows(ids, targets, rows))
    found = torch.autograd.grad(stats.ce.sum() - 0.5 * stats.entropy.sum(), parameters)
    log_probs = model.denoise(ids).logits[rows].log_softmax(-1)
    ce = -log_probs.gather(1, targets[rows][:, None]).sum()
    kept = log_probs[:, torch.arange(32) != 3]  # all but the mask
    expected = torch.autograd.grad(ce + 0.5 * (kept.exp() * kept).sum(), parameters)
    torch.testing.assert_close(found, expected)
    model.score_tokens(Rows(ids, targets, torch.zeros_like(rows))).ce.sum().backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in parameters)


@pytest.mark.parametrize("origin", ["sequence", "response"])
@pytest.mark.parametrize("copies", [1, 2])
def test_attention_by_blocks_equals_the_matrix(origin: Any, copies: int) -> None:
    """Rows of clean and noisy copies, of which the second uses one: within 1e-5.

    Without gradients, which FlexAttention has on GPUs alone.
    """
    model = backbone(attention="block", block_size=2, decoder="qwen3", num_kv_heads=1)
    _, clean, _, pad_mask = canvas()
    layout = Slots.trace(3, 7, 2, pad_mask=pad_mask, origin=origin)
    used = torch.tensor([copies, 1])
    packed = layout.packed(copies)
    rows = packed.is_noisy & (packed.copy < used[:, None]) & (packed.source >= 3)
    targets = clean[:, packed.source]
    ids = targets.masked_fill(rows, 3)
    positions = packed.positions(torch.arange(7).expand(2, -1))
    masks: list[Any] = [packed.visibility(used), packed.block_mask(used)]
    if copies == 1:
        masks += [layout.visibility(), layout.block_mask()]
    found = []
    for mask in masks:
        with torch.no_grad():
            stats = model.score_tokens(Rows(ids, targets, rows, mask, positions))
        found.append((stats.ce, stats.entropy))
        assert len(stats.ce) > 5
        torch.testing.assert_close(found[-1], found[0], rtol=1e-5, atol=1e-5)


def test_autocast_rounds_what_attention_by_blocks_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms give queries and keys in float32 and values are bfloat16; SDAR's norms are as here."""
    seen = []

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        seen.append({query.dtype, key.dtype, value.dtype})
        return query

    monkeypatch.setattr(attention, "flex_attention", attend)
    model = backbone(attention="block", block_size=2, decoder="qwen3", num_kv_heads=1)
    layout = Slots.trace(3, 7, 2)
    ids, rows = torch.ones(1, len(layout.copy), dtype=torch.long), layout.is_noisy[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.score_tokens(Rows(ids, ids, rows, layout.block_mask()))
    assert seen == [{torch.bfloat16}] * 3


@pytest.mark.parametrize("origin", ["sequence", "response"])
@pytest.mark.parametrize("copies", [1, 4])
def test_tiles_hold_all_that_is_visible_and_few_others(origin: Any, copies: int) -> None:
    """Two rows of 300 + 700 cells, one of them padded, the second with half of the copies."""
    pad_mask = torch.ones(2, 1000, dtype=torch.bool)
    pad_mask[1, :200] = False
    layout = Slots.trace(300, 1000, 4, pad_mask=pad_mask, origin=origin)
    layout = layout.packed(copies).in_whole_tiles()
    used = torch.tensor([copies, -(-copies // 2)])
    mask, rows = layout.block_mask(used), len(layout.copy) // 128
    assert len(layout.copy) % 128 == 0
    real = layout.real & (layout.copy < used[:, None])
    visible = layout.visibility(used)[:, 0] & real[:, :, None]
    visible = visible.view(2, rows, 128, rows, 128).transpose(2, 3).flatten(3)

    def tiles(counts: Tensor, places: Tensor) -> Tensor:
        listed = torch.arange(rows) < counts[:, 0, :, None]
        return torch.zeros(2, rows, rows, dtype=torch.bool).scatter(2, places[:, 0].long(), listed)

    some = tiles(mask.kv_num_blocks, mask.kv_indices)
    every = tiles(mask.full_kv_num_blocks, mask.full_kv_indices)
    queries = real.view(2, rows, 128).all(-1)[..., None]
    assert not (some & every).any()
    assert not (visible.any(-1) & ~some & ~every).any()
    assert (visible.all(-1) | ~every | ~queries).all()
    assert (some | every).sum() <= 1.05 * (visible.any(-1) | torch.eye(rows).bool()).sum()
    assert every.sum() >= 0.9 * visible.all(-1).sum()


@pytest.mark.slow
def test_ragged_batches_are_compiled_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without gradients, one row and several, padded or not: 8 kernels for any lengths.

    A value model of other sizes takes as many again, and torch's own limit is 8 in all.
    """
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    attend = attention._compiled_flex.__wrapped__()
    generator = torch.Generator().manual_seed(0)
    compiled = []
    for batch in range(20):
        rows, copies = 1 + batch % 3, 1 + batch % 4
        prompt, length = torch.randint(70, 200, (2,), generator=generator).tolist()
        pad_mask = torch.ones(rows, prompt + length, dtype=torch.bool) if batch % 5 else None
        layout = Slots.trace(prompt, prompt + length, 4, pad_mask=pad_mask, origin="sequence")
        layout = layout.packed(copies).in_whole_tiles()
        mask = layout.block_mask(torch.full((rows,), copies) if copies > 1 else None)
        query = torch.randn(rows, 2, len(layout.copy), 16)
        with torch.set_grad_enabled(batch % 2 == 0):
            attend(query, query, query, block_mask=mask, scale=0.25, enable_gqa=True)
        compiled.append(counter.frame_count)
    assert torch._dynamo.config.recompile_limit >= 64
    assert compiled[-1] == compiled[13] <= 8


def test_attention_by_blocks_is_for_long_rows_on_gpus() -> None:
    long = torch.device("cuda")
    assert [wants_block_mask(length, long) for length in (511, 512)] == [False, True]
    assert not wants_block_mask(10**6, torch.device("cpu"))
