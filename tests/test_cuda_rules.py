"""The rules of :mod:`tests.cuda_rules`, and what depends on them alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dlm.backbones import Architecture, HFBackbone
from lit_dlm.backbones.attention import sequences_from
from lit_dlm.backbones.base import Rows, Span
from lit_dlm.backbones.cache import CachedCanvas
from lit_dlm.decoding import BlockCache, BlockWindow, ConfidencePolicy, Decoder
from tests.backbones.reference import slow_varlen_attn
from tests.cuda_rules import autocast_lists, cuda_rules
from tests.decoding.states import decoded

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def test_the_lists_are_those_that_torch_registers_for_cuda():
    names = {f"aten::{name}" for listed in autocast_lists().values() for name in listed}
    known = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    apart = {"cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy"}
    assert names == {name for name in known if name.removeprefix("aten::") not in apart}


def _results() -> dict[str, torch.dtype]:
    half, wide = torch.ones(8, 8, dtype=BF16), torch.ones(8, 8)
    found = {
        "linear": F.linear(wide, wide),
        "linear of float64": F.linear(wide.double(), wide.double()),
        "rms_norm": F.rms_norm(half, (8,)),
        "exp": half.exp(),
        "softmax": half.softmax(0),
        "softmax in bfloat16": half.softmax(0, dtype=BF16),
        "sum": half.sum(1),
        "norm": torch.ops.aten.norm.ScalarOpt_dim(half, 2, [0]),
        "addcmul": half.addcmul(half, wide),
        "silu": F.silu(half),
        "cat": torch.cat([half, half]),
        "cross entropy": F.cross_entropy(half, torch.zeros(8, dtype=torch.long)),
    }
    return {name: tensor.dtype for name, tensor in found.items()}


def test_autocast_casts_by_the_lists_and_then_as_before():
    with torch.autocast("cpu", BF16):
        before = _results()
        with cuda_rules():
            found = _results()
        assert _results() == before
    half = {"linear", "softmax in bfloat16", "silu", "cat"}
    assert found == {
        name: F64 if "float64" in name else BF16 if name in half else F32 for name in found
    }
    assert before["rms_norm"] == BF16


def _attended(query: Tensor, key: Tensor, value: Tensor, **changes: Any) -> Tensor:
    """Sequences of two and one queries, on the first three and the last two of six keys."""
    from torch.nn.attention.varlen import varlen_attn

    numbers: dict[str, Any] = {
        "cu_seq_q": torch.tensor([0, 2, 3]).int(),
        "cu_seq_k": torch.tensor([0, 4, 6]).int(),
        "seqused_k": torch.tensor([3, 2]).int(),
        **changes,
    }
    found = varlen_attn(query, key, value, max_q=2, max_k=3, enable_gqa=True, **numbers)
    assert isinstance(found, Tensor)
    return found


def _inputs(dtype: torch.dtype = BF16, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (3, 4), (6, 2), (6, 2)
    return [torch.randn(*size, width, generator=generator).to(dtype) for size in sizes]


def test_the_flash_kernel_computes_each_sequence():
    query, *others = _inputs()
    with cuda_rules(), torch.autocast("cpu", BF16):
        found = _attended(query, *others)
    wide = [query.float(), *(one.float().repeat_interleave(2, dim=1) for one in others)]
    starts, ends, used = (torch.tensor(n).int() for n in ([0, 2, 3], [0, 4, 6], [3, 2]))
    expected = slow_varlen_attn(*wide, starts, ends, 2, 3, scale=8**-0.5, seqused_k=used)
    torch.testing.assert_close(found.float(), expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(
    ("inputs", "changes", "message"),
    [
        (_inputs(F32), {}, "only support fp16 and bf16"),
        ([*_inputs()[:2], _inputs(F32)[2]], {}, "query and value must have the same dtype"),
        (_inputs(width=4), {}, "multiple of 8"),
        (_inputs(width=264), {}, "at most 256"),
        ([torch.ones(3, 8, 4, dtype=BF16).mT, *_inputs()[1:]], {}, "contiguous last dimension"),
        (_inputs(), {"seqused_k": torch.tensor([3, 2])}, "must have dtype int32"),
    ],
)
def test_the_flash_kernel_refuses(inputs: list[Tensor], changes: dict[str, Any], message: str):
    with cuda_rules(), pytest.raises(RuntimeError, match=message):
        _attended(*inputs, **changes)


@pytest.mark.parametrize(
    ("capability", "dtype", "least"),
    [((7, 5), torch.float16, None), ((8, 0), torch.float16, 0), ((8, 0), F32, None)],
)
def test_a_card_without_the_flash_kernel_takes_masks(
    capability: tuple[int, int], dtype: torch.dtype, least: int | None
):
    with cuda_rules(capability):
        found = sequences_from("auto", torch.device("cuda", 0), dtype, num_heads=1)
    assert found == least


def _block_model(dtype: Any, route: Any = "auto") -> HFBackbone:
    """Of SDAR's kind: norms of queries and keys, and blocks of four."""
    torch.manual_seed(0)
    architecture = Architecture(
        decoder="qwen3", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=8, initializer_range=0.5, mask_id=3, pad_id=0,
        eos_ids=(1,), attention="block", block_size=4,
    )  # fmt: skip
    return HFBackbone(architecture=architecture, dtype=dtype, attn_implementation=route).eval()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.no_grad()
def test_windows_under_autocast_equal_those_of_the_other_route(dtype: str):
    """Rows of different lengths; rotation leaves the queries of float32 weights in float32."""
    ids, columns = torch.arange(4, 20).view(2, 8), torch.arange(8).expand(2, -1)

    def run(route: str) -> Tensor:
        model = _block_model(dtype, route)
        canvas = CachedCanvas(model, pad_mask=None, positions=columns)
        canvas.run(ids, canvas.plan([Span(0, 8, 8)] * 2))
        canvas.run(ids, canvas.plan([Span(2, 6, 8), Span(3, 5, 6)]))
        return canvas.read(columns).logits[..., 4:]

    with cuda_rules(), torch.autocast("cpu", BF16):
        found, expected = run("auto").float(), run("sdpa").float()
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", False), ("float32", True)])
def test_weights_in_half_precision_decode_without_autocast(dtype: str, expected: bool):
    seen: set[bool] = set()
    backbone = _block_model(dtype)
    backbone.model.lm_head.register_forward_pre_hook(
        lambda *_: seen.add(torch.is_autocast_enabled("cpu"))
    )
    window = BlockWindow(4, origin="sequence")
    decoder = Decoder(policy=ConfidencePolicy(), window=window, cache=BlockCache())
    with cuda_rules(), torch.autocast("cpu", BF16):
        decoded(decoder, backbone, [[4, 5, 6]], 12)
        assert torch.is_autocast_enabled("cpu")
    assert seen == {expected}


def test_scored_rows_keep_half_precision_under_autocast():
    """Then the head multiplies by tensor cores, and the stand-in of their product is exact."""
    backbone = _block_model("bfloat16").requires_grad_(True)
    ids = torch.arange(4, 12)[None]
    every = torch.ones_like(ids, dtype=torch.bool)
    plain = backbone.score_tokens(Rows(ids, ids, every))
    with cuda_rules(), torch.autocast("cpu", BF16):
        stats, rows = backbone.score_with_hidden(Rows(ids, ids, every))
        stats.ce.sum().backward()
    assert rows.dtype == BF16
    torch.testing.assert_close(stats.ce, plain.ce)
    assert backbone.model.lm_head.weight.grad.isfinite().all()
