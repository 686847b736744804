"""The chunked head: hand values, the naive head, numerical gradients and the corners."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lit_dlm.tensors import fused_head
from lit_dlm.tensors.fused_head import TokenStats, token_stats, top_ids


def naive(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    logit_scale: float = 1.0,
    forbidden_ids: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """All logits at once, ordinary autograd; forbidden columns are left out."""
    logits = logit_scale * F.linear(rows, weight)
    keep = [v for v in range(len(weight)) if v not in forbidden_ids]
    log_probs = logits[:, keep].log_softmax(-1)
    columns = torch.tensor([keep.index(int(target)) for target in targets])
    ce = -log_probs.gather(1, columns[:, None])[:, 0]
    return ce, -(log_probs.exp() * log_probs).sum(-1)


def inputs(
    N: int, D: int, V: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, head weight and targets; targets avoid ids 0 and 2."""
    generator = torch.Generator().manual_seed(seed)
    rows, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((N, D), (V, D))
    )
    return rows, weight, torch.randint(3, V, (N,), generator=generator)


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor, **options: object
) -> list[Tensor]:
    """Gradients of a weighted sum of cross-entropies and entropies for the first tensors."""
    rows, weight, targets = tensors
    leaves = [value.clone().requires_grad_() for value in (rows, weight)]
    ce, entropy = function(*leaves, targets, **options)[:2]
    share = torch.linspace(0.5, 2.0, len(targets), dtype=ce.dtype)
    total = (ce * share).sum() - 0.7 * (entropy * share.flip(0)).sum()
    return list(torch.autograd.grad(total, leaves))


@pytest.fixture(autouse=True, scope="module", params=[(3, 12, 3), (4096, 1_000_000, 256)])
def slices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds with slices of a few rows and ids, the last ones less, and in one piece."""
    rows, elements, smallest = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_head, "CHUNK_ROWS", rows)
        patch.setitem(fused_head.CHUNK_ELEMENTS, "cpu", elements)
        patch.setattr(fused_head, "_SMALLEST_SLICE", smallest)
        yield


def test_values_by_hand() -> None:
    """Logits (ln 1, ln 2, ln 5) over a sum of 8: probabilities 1/8, 1/4, 5/8.

    Target 1: CE = ln 4. H = ln(8)/8 + ln(4)/4 + 5/8 ln(8/5).
    """
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    stats = token_stats(torch.ones(2, 1), weight, torch.tensor([1, 2]))
    entropy = math.log(8) / 8 + math.log(4) / 4 + 0.625 * math.log(1.6)
    torch.testing.assert_close(stats.ce, torch.tensor([math.log(4), math.log(1.6)]))
    torch.testing.assert_close(stats.entropy, torch.tensor([entropy, entropy]))
    torch.testing.assert_close(stats.log_prob, -stats.ce)
    assert stats.is_top.tolist() == [False, True]


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 64])
@pytest.mark.parametrize("forbidden_ids", [(), (0, 2)])
def test_equals_the_naive_head(
    chunk_rows: int, forbidden_ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients in float64 to 1e-12, so to the last bits that sums may differ in."""
    monkeypatch.setattr(fused_head, "CHUNK_ROWS", chunk_rows)
    tensors = inputs(7, 5, 11, dtype=torch.float64)
    options = {"logit_scale": 0.7, "forbidden_ids": forbidden_ids}
    found = token_stats(*tensors, **options)
    expected = naive(*tensors, **options)
    torch.testing.assert_close(found[:2], expected, rtol=1e-12, atol=1e-12)
    found, expected = (gradients(f, *tensors, **options) for f in (token_stats, naive))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_float32_gradients_are_within_1e_6_of_exact_ones() -> None:
    """Relative to the norm, against float64; a vocabulary that no slice divides."""
    tensors = inputs(37, 48, 1009, seed=1)
    exact = gradients(naive, *(t.double() if t.is_floating_point() else t for t in tensors))
    for ours, theirs in zip(gradients(token_stats, *tensors), exact, strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 1e-6


@pytest.mark.parametrize("trainable", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("which", ["ce", "entropy", "both"])
def test_gradcheck(trainable: tuple[int, ...], which: str) -> None:
    *leaves, targets = inputs(4, 3, 6, dtype=torch.float64)
    for index in trainable:
        leaves[index].requires_grad_()

    def scores(rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        stats = token_stats(rows, weight, targets, logit_scale=1.3, forbidden_ids=[0, 2])
        return stats[:2] if which == "both" else (getattr(stats, which),)

    assert torch.autograd.gradcheck(scores, tuple(leaves))


@settings(max_examples=25, deadline=None)
@given(
    N=st.integers(1, 9),
    V=st.integers(4, 40),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_ranges(N: int, V: int, seed: int, spread: float) -> None:
    """Entropy in [0, ln V], cross-entropy at least 0, and other rows change no value."""
    rows, weight, targets = inputs(N, 4, V, seed=seed)
    stats = token_stats(rows * spread, weight, targets)
    assert (stats.ce >= 0).all()
    assert (stats.entropy >= 0).all()
    assert (stats.entropy <= math.log(V) + 1e-5).all()
    alone = [token_stats(rows[n : n + 1] * spread, weight, targets[n : n + 1]) for n in range(N)]
    expected = TokenStats(*(torch.cat(parts) for parts in zip(*alone, strict=True)))
    # One row at a time may take another kernel: a few roundings of logits up to a few hundred.
    torch.testing.assert_close(stats.ce, expected.ce, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(stats.entropy, expected.entropy, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """Equal to float32 arithmetic on the rounded inputs."""
    tensors = inputs(5, 8, 300, dtype=dtype)
    wide = [t.float() if t.is_floating_point() else t for t in tensors]
    found = token_stats(*tensors)
    assert found.ce.dtype == torch.float32
    expected = token_stats(*wide)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # Rounded once, at the end.
    rounded = [exact.to(dtype) for exact in gradients(token_stats, *wide)]
    ours = gradients(token_stats, *tensors)
    torch.testing.assert_close(ours, rounded, rtol=1e-2, atol=1e-6)


class TensorCores(TorchDispatchMode):
    """Products with an ``out_dtype``, which CPUs do not have: exact, then rounded once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, dict(kwargs or {})
        if packet not in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            return func(*args, **kwargs)
        self.calls.append((packet.__name__, args[-1] if "dtype" in func._overloadname else None))
        if "dtype" not in func._overloadname:
            return func(*args, **kwargs)
        *factors, out_dtype = args
        assert {factor.dtype for factor in factors[-2:]} <= {torch.bfloat16, torch.float16}
        out = kwargs.pop("out")
        assert out.dtype == out_dtype == torch.float32
        return out.copy_(packet(*(factor.double() for factor in factors), **kwargs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensor_cores_multiply_half_precision_as_it_is(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 on the rounded inputs.

    Scores differ by float32 roundings. Gradients from bfloat16 inputs do by one rounding of the
    logits' gradient (2^-9 of each of its elements) and one of the result; those from float16 inputs
    by that of the result (2^-11).
    """
    monkeypatch.setattr(fused_head, "_has_tensor_cores", lambda tensor: True)
    tensors = inputs(6, 8, 300, dtype=dtype)
    tensors = (tensors[0], tensors[1] / 4, tensors[2])
    exact = [t.double() if t.is_floating_point() else t for t in tensors]
    with TensorCores() as cores:
        found = token_stats(*tensors, forbidden_ids=(0, 2))
        ours = gradients(token_stats, *tensors, forbidden_ids=(0, 2))
    expected = naive(*exact, forbidden_ids=(0, 2))
    torch.testing.assert_close(found[:2], expected, check_dtype=False, rtol=1e-5, atol=1e-5)
    wanted = gradients(naive, *exact, forbidden_ids=(0, 2))
    for one, other in zip(ours, wanted, strict=True):
        error = float((one.double() - other).norm() / other.norm())
        assert error < (2**-8 if dtype == torch.bfloat16 else 2**-11)
    is_wide = {name for name, out_dtype in cores.calls if out_dtype is None}
    assert is_wide == (set() if dtype == torch.bfloat16 else {"addmm_"})


def test_autocast_changes_nothing() -> None:
    given = inputs(5, 8, 50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_stats(*given)
    torch.testing.assert_close(found, token_stats(*given), rtol=0, atol=0)


def test_large_logits_stay_exact() -> None:
    """Logits near 1e4, apart by ln 3: p = (1/4, 3/4), whatever the common level."""
    weight = torch.tensor([[1e4, 0.0], [1e4, 1.0]])
    rows = torch.tensor([[1.0, math.log(3)]], requires_grad=True)
    stats = token_stats(rows, weight, torch.tensor([1]))
    # The spacing of float32 numbers at 1e4 is 1e-3.
    torch.testing.assert_close(stats.ce, torch.tensor([math.log(4 / 3)]), rtol=0, atol=1e-3)
    stats.ce.sum().backward()
    torch.testing.assert_close(rows.grad[0, 1], torch.tensor(-0.25), rtol=0, atol=1e-3)


def test_no_rows_give_no_scores_and_zero_gradients() -> None:
    """The head's gradient exists and is zero: a data-parallel run waits for every parameter's."""
    rows = torch.zeros(0, 4, requires_grad=True)
    weight = torch.ones(6, 4, requires_grad=True)
    stats = token_stats(rows, weight, torch.zeros(0, dtype=torch.long))
    assert [tuple(part.shape) for part in stats] == [(0,), (0,), (0,)]
    (stats.ce.sum() + stats.entropy.sum()).backward()
    assert rows.grad.shape == (0, 4)
    assert weight.grad.eq(0).all()


def test_a_forbidden_target_is_impossible_and_others_are_not_disturbed() -> None:
    rows, weight, _ = inputs(2, 3, 5)
    rows.requires_grad_()
    stats = token_stats(rows, weight, torch.tensor([2, 4]), forbidden_ids=(2,))
    assert stats.ce[0] == math.inf
    assert not stats.is_top[0]
    assert stats.entropy.isfinite().all()
    stats.ce[1].backward()
    assert rows.grad.isfinite().all()


def test_only_a_few_numbers_per_row_are_saved() -> None:
    rows, weight, targets = inputs(60, 4, 50)
    ce = token_stats(rows.requires_grad_(), weight, targets).ce
    saved = sum(
        value.numel()
        for value in ce.grad_fn.saved_tensors
        if value.data_ptr() not in (rows.data_ptr(), weight.data_ptr())
    )
    assert saved <= 4 * 60  # the targets among them


@pytest.mark.slow
def test_no_slice_waits_for_the_device() -> None:
    """A size that depends on values, or a value that is read, fails on fake tensors."""
    with FakeTensorMode():
        rows = torch.empty(8, 6, requires_grad=True)
        weight = torch.empty(40, 6, requires_grad=True)
        targets = torch.empty(8, dtype=torch.long)
        stats = token_stats(rows, weight, targets, forbidden_ids=(0, 5, 39, 30))
        (stats.ce + stats.entropy).sum().backward()
    assert weight.grad.shape == weight.shape


def test_top_ids_are_those_of_full_logits() -> None:
    """Of equal ones the lowest, also where they are in two slices."""
    torch.manual_seed(0)
    rows, weight = torch.randn(7, 5), torch.randn(600, 5)
    rows[0], weight[[20, 500]] = 1.0, 9.0
    logits = rows @ weight.T
    assert logits[0].argmax() == 20
    assert torch.equal(top_ids(rows, weight), logits.argmax(1))
    logits[:, 20] = -torch.inf
    assert torch.equal(top_ids(rows, weight, forbidden_ids=[20]), logits.argmax(1))
