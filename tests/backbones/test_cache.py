"""Windows over a cached canvas: parity with the reference's cached forwards, and buffers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lit_dlm.backbones import attention
from lit_dlm.backbones.attention import Packing
from lit_dlm.backbones.base import Span
from lit_dlm.backbones.cache import CachedCanvas, WindowCache, WindowPlan
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.visibility import block_numbers
from tests.backbones.reference import slow_varlen_attn


def canvas_of(
    backbone: HFBackbone,
    length: int,
    *,
    rows: int = 1,
    pad_mask: torch.Tensor | None = None,
    block_size: int | None = None,
    **options: Any,
) -> CachedCanvas:
    real = torch.ones(rows, length, dtype=torch.bool) if pad_mask is None else pad_mask
    if block_size is not None:
        backbone.spec = replace(backbone.spec, block_size=block_size)
    return CachedCanvas(
        backbone,
        pad_mask=pad_mask,
        positions=(real.long().cumsum(1) - 1).clamp_min(0),
        blocks=None if block_size is None else block_numbers(real, block_size),
        **options,
    )


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Queries of each call of the flash kernel, in whose place a slow one is.

    With ``auto`` sequences go one by one.
    """
    queries: list[int] = []

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        queries.append(len(args[0]))
        return slow_varlen_attn(*args, **options)

    monkeypatch.setattr(attention, "varlen_attn", counted)
    monkeypatch.setattr(attention, "_MANY_KEYS", 1)
    return queries


def two_rows(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and padding that hides two columns of the first row."""
    ids = torch.randint(4, 32, (2, length), generator=torch.Generator().manual_seed(1))
    pad_mask = torch.ones(2, length, dtype=torch.bool)
    pad_mask[0, :2] = False
    return ids, pad_mask


@torch.no_grad()
def test_cached_blocks_equal_the_references(parity: Path):
    """Twelve tokens are kept; block 4 as masks and with its tokens, then block 5 behind it.

    A window's keys and values are overwritten by the next forward over it, which is what the
    reference calls not storing.
    """
    overrides = {"eos_ids": [1], "mask_id": 3}
    backbone = HFBackbone(str(parity / "sdar"), spec_overrides=overrides)
    cases = load_file(parity / "sdar" / "cases.safetensors")
    ids = cases["in.x"]
    allowed = torch.arange(backbone.vocab_size) != 3
    canvas = canvas_of(backbone, 24, block_size=4)

    def check(case: str, columns: range) -> None:
        logits = canvas.read(torch.tensor([list(columns)])).logits
        torch.testing.assert_close(
            logits[..., allowed], cases[case][..., allowed], atol=1e-5, rtol=0
        )

    masked = ids.clone()
    masked[:, 12:16] = 3
    canvas.run(masked, canvas.plan([Span(0, 16, 16)], block_causal=True))
    check("out.b4_masked", range(12, 16))
    canvas.run(ids, canvas.plan([Span(12, 16, 16)]))
    check("out.b4_nostore", range(12, 16))
    canvas.run(ids, canvas.plan([Span(12, 20, 20)], block_causal=True))
    check("out.b5", range(16, 20))


@pytest.mark.parametrize("attn", ["sdpa", "varlen", "auto"])
@pytest.mark.parametrize(
    "spans", [[Span(2, 6, 10), Span(5, 9, 9)], [Span(3, 9, 9), Span(7, 9, 10)]]
)
@torch.no_grad()
def test_rows_with_different_spans_equal_rows_alone(
    make_backbone, attn: str, spans: list[Span], called: list[int]
):
    """Spans of one width or of two in one forward, after a forward over everything."""
    backbone = make_backbone(num_heads=4, num_kv_heads=2, head_dim=8, attn=attn)
    reference = make_backbone(num_heads=4, num_kv_heads=2, head_dim=8)
    ids, pad_mask = two_rows(10)
    changed = ids.clone()
    changed[:, 5] = 30

    def run(rows: list[int], backbone: HFBackbone = reference) -> torch.Tensor:
        canvas = canvas_of(backbone, 10, pad_mask=pad_mask[rows], hidden_layers=(-2,))
        canvas.run(ids[rows], canvas.plan([Span(0, 10, 10)] * len(rows)))
        canvas.run(changed[rows], canvas.plan([spans[row] for row in rows]))
        denoised = canvas.read(torch.arange(10).expand(len(rows), -1))
        return torch.cat([denoised.logits[..., 4:], denoised.hidden.flatten(2)], -1)

    together = run([0, 1], backbone)
    assert bool(called) == (attn == "varlen")
    for row in (0, 1):
        torch.testing.assert_close(together[row, 2:], run([row])[0, 2:], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("attn", ["sdpa", "varlen", "auto"])
@torch.no_grad()
def test_blocks_out_of_phase_equal_rows_alone(make_backbone, attn: str, called: list[int]):
    """Row 0 goes on in its block while row 1 enters one: widths 2 and 4, causal by blocks."""
    backbone = make_backbone(num_heads=4, num_kv_heads=2, head_dim=8, attn=attn)
    ids, pad_mask = two_rows(8)

    def run(rows: list[int]) -> torch.Tensor:
        canvas = canvas_of(backbone, 8, pad_mask=pad_mask[rows], block_size=2)
        canvas.run(ids[rows], canvas.plan([Span(0, 6, 6)] * len(rows), block_causal=True))
        changed = ids[rows].clone()
        changed[:, 5] = 9
        spans = [Span(4, 6, 6), Span(4, 8, 8)]
        canvas.run(changed, canvas.plan([spans[row] for row in rows], block_causal=rows != [0]))
        return canvas.read(torch.arange(8).expand(len(rows), -1)).logits[..., 4:]

    together = run([0, 1])
    # The two heads that share a key head are further queries.
    assert called == ([24] * 3 + [12] * 3 if attn == "varlen" else [])
    for row in (0, 1):
        torch.testing.assert_close(together[row, 2:], run([row])[0, 2:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_forward_over_a_part_of_the_rows_leaves_the_others_alone(make_backbone):
    backbone = make_backbone()
    ids = torch.randint(4, 32, (3, 8), generator=torch.Generator().manual_seed(2))
    canvas = canvas_of(backbone, 8, rows=3)
    everything = torch.arange(8).expand(3, -1)
    canvas.run(ids, canvas.plan([Span(0, 8, 8)] * 3))
    before = canvas.read(everything).logits
    canvas.run(ids.roll(1, 1), canvas.plan([Span(2, 5, 8)], rows=[1]))
    after = canvas.read(everything).logits
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert torch.equal(after[1, [0, 1, 5, 6, 7]], before[1, [0, 1, 5, 6, 7]])
    assert not torch.isclose(after[1, 2:5, 4:], before[1, 2:5, 4:]).all()


@torch.no_grad()
def test_a_column_that_no_forward_covered_is_predicted_uniformly(make_backbone):
    canvas = canvas_of(make_backbone(), 8)
    canvas.run(torch.full((1, 8), 5), canvas.plan([Span(0, 4, 4)]))
    assert canvas.read(torch.tensor([[6]])).logits.unique().tolist() == [-torch.inf, 0.0]


def test_writes_reach_only_the_planned_rows_and_columns():
    """Row 1 of 2 at columns 4 and 5; then column 2 of row 0 and 0 to 1 of row 1, side by side."""
    cache = WindowCache(length=6, num_rows=2)
    cache.plan = WindowPlan(rows=torch.tensor([1]), columns=torch.tensor([[4, 5]]), kv_end=6)
    new = torch.tensor([8.0, 9.0]).view(1, 1, 2, 1)
    seen, values = cache.update(new, -new, 0)
    assert seen.flatten().tolist() == [0, 0, 0, 0, 8, 9]
    assert values.flatten().tolist() == [0, 0, 0, 0, -8, -9]
    cache.plan = WindowPlan(
        rows=torch.arange(2),
        columns=torch.tensor([[2, 0, 1]]),
        kv_end=6,
        packing=Packing(
            rows=torch.tensor([[0, 1, 1]]),
            cells=torch.tensor([[0, 0], [1, 2]]),
            windows=torch.tensor([0, 1, 1]),
            offsets=torch.tensor([0, 0, 1]),
        ),
    )
    new = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    seen, _ = cache.update(new, new, 0)
    assert seen[:, 0, :, 0].tolist() == [[0, 0, 1, 0, 0, 0], [2, 3, 0, 0, 8, 9]]


def test_keys_of_all_rows_are_seen_without_a_copy():
    cache = WindowCache(length=6, num_rows=2)
    new = torch.ones(2, 1, 2, 4)
    for columns in ([[0, 1], [0, 1]], [[2, 3], [4, 5]]):  # rows drift apart
        cache.plan = WindowPlan(rows=torch.arange(2), columns=torch.tensor(columns), kv_end=6)
        keys, values = cache.update(new, new, 0)
        for seen, buffer in zip((keys, values), cache.buffers[0], strict=True):
            assert seen.data_ptr() == buffer.data_ptr()


@torch.no_grad()
def test_under_autocast_keys_are_kept_in_half_precision_and_predict_the_same(make_backbone):
    """Rotation leaves keys in float32, which attention rounds: rounding them once is the same."""
    backbone = make_backbone()
    ids = torch.arange(3, 11)[None]
    canvas = canvas_of(backbone, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        canvas.run(ids, canvas.plan([Span(0, 8, 8)]))
        canvas.run(ids, canvas.plan([Span(4, 8, 8)]))
        found = canvas.read(torch.arange(8)[None]).logits
        expected = backbone.denoise(ids).logits
    assert {one.dtype for one in canvas._cache.buffers[0]} == {torch.bfloat16}
    assert found.equal(expected)
