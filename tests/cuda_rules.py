"""CUDA's autocast and the rules of its kernels, on a CPU.

The autocasts of the two devices cast differently: CUDA's runs a norm in float32 and the CPU's does
not, so that a mistake in dtypes passes every test on a CPU. Under :func:`cuda_rules`

- autocast casts by CUDA's lists, which are read from torch's own header;
- the flash kernel for sequences of different lengths and the products of half precision into
  float32, which a CPU lacks, refuse what the real ones refuse and compute the rest slowly;
- models take the routes that they take on a GPU.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from lit_dlm.backbones import attention, cache, hf
from lit_dlm.tensors import fused_head

HALF = (torch.bfloat16, torch.float16)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def autocast_lists() -> dict[str, list[str]]:
    """Operations with their overloads by policy, such as ``FP32`` or ``PROMOTE``."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text().replace("\\\n", " ")
    lists = {}
    for policy, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)(.*)", text):
        quoted = re.findall(r'"(\w+\.\w+)"', body)  # with another signature, by their whole names
        plain = re.findall(r"_\((\w+)(?:, *(\w+))?\)", body)
        lists[policy] = quoted or [".".join(filter(None, parts)) for parts in plain]
    return lists


@contextmanager
def cuda_rules(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """A CPU computes by the rules of a GPU for as long as the context is open.

    Args:
        capability: compute capability of that GPU.
    """

    def on_gpu(route: str, _device: torch.device, *args: Any, **kwargs: Any) -> int | None:
        return attention.sequences_from(route, torch.device("cuda", 0), *args, **kwargs)

    kernels = Library("aten", "IMPL")
    attention._has_flash.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
        patch.setattr(hf, "sequences_from", on_gpu)
        patch.setattr(hf, "_WIDE", sys.maxsize)
        patch.setattr(cache, "_FEW_BLOCKS", sys.maxsize)
        patch.setattr(attention, "one_by_one", attention.together)
        patch.setattr(fused_head, "_has_tensor_cores", lambda _tensor: True)
        try:
            _register(kernels)
            yield
        finally:
            kernels._destroy()
            attention._has_flash.cache_clear()


def _register(kernels: Library) -> None:
    with warnings.catch_warnings():  # that a kernel of the CPU's autocast is replaced
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
            if name.startswith("aten::"):
                kernels.impl(name, fallthrough_kernel, "AutocastCPU", allow_override=True)
        for policy, names in autocast_lists().items():
            for name in names:
                kernels.impl(name, _casting(policy, name), "AutocastCPU", allow_override=True)
    kernels.impl("binary_cross_entropy", _banned, "AutocastCPU", allow_override=True)
    kernels.impl("_flash_attention_forward", _flash, "CPU")
    kernels.impl("mm.dtype_out", _mm, "CPU")
    kernels.impl("addmm.dtype_out", _addmm, "CPU")


def _casting(policy: str, name: str) -> Callable[..., Any]:
    """An operation behind the casts of its policy (``CastPolicy`` in the header)."""
    base, _, overload = name.partition(".")
    if policy == "DIFFERENT_REDISPATCH_SIGNATURE":
        overload = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}[overload]
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    place = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]

    def run(*args: Any, **kwargs: Any) -> Any:
        half = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if policy in ("FP32_SET_OPT_DTYPE", "DIFFERENT_REDISPATCH_SIGNATURE"):
                if "keepdim" in place[len(args) :]:  # without a default in the other signature
                    kwargs = {"keepdim": False, **kwargs}
                is_given = "dtype" in place[: len(args)] or kwargs.get("dtype") is not None
                if _is_eligible(args[0]) and not is_given:
                    kwargs["dtype"] = torch.float32
                return op(*args, **kwargs)
            known = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_eligible(leaf)}
            is_wide = policy == "PROMOTE" and torch.float32 in known
            to = torch.float32 if is_wide or policy == "FP32" else half

            def cast(tensor: Tensor) -> Tensor:
                return tensor.to(to) if _is_eligible(tensor) else tensor

            return op(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))

    return run


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _banned(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("binary_cross_entropy: unsafe to autocast")


def _require(is_met: bool, rule: str) -> None:
    if not is_met:
        raise RuntimeError(rule)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    *_args: Any,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, ...]:
    """The rules are those of ``mha_varlen_fwd`` in torch's ``flash_api.cpp``."""
    (T, H, d), is_grouped = query.shape, query.shape[1] > key.shape[1]
    numbers = [query_starts, key_starts, *([] if seqused_k is None else [seqused_k])]
    is_new = torch.cuda.get_device_capability() >= (8, 0)
    _require(is_new, "FlashAttention only supports Ampere GPUs or newer.")
    _require(query.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
    _require(key.dtype == query.dtype, "query and key must have the same dtype")
    _require(value.dtype == query.dtype, "query and value must have the same dtype")
    for tensor in numbers:
        _require(tensor.dtype == torch.int32, "cu_seqlens and seqused_k must have dtype int32")
        _require(tensor.is_contiguous(), "cu_seqlens and seqused_k must be contiguous")
    for tensor in (query, key, value):
        _require(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    _require(d <= 256, "FlashAttention forward only supports head dimension at most 256")
    _require(d % 8 == 0, "head_size must be a multiple of 8")
    is_folded = is_grouped and most_queries == 1  # query heads take the place of queries
    _require(not is_folded or len(query_starts) - 1 == T, "shape is invalid for input of size")
    counts = key_starts.diff() if seqused_k is None else seqused_k
    bounds = query_starts.tolist(), query_starts[1:].tolist(), key_starts.tolist(), counts.tolist()
    assert (bounds[1][-1], int(key_starts[-1])) == (T, len(key))
    output = torch.full_like(query, torch.nan)
    with torch.autocast("cpu", enabled=False):
        for begin, end, first, count in zip(*bounds, strict=False):
            assert 0 <= end - begin <= most_queries
            assert 0 < count <= most_keys
            seen = query[begin:end], key[first : first + count], value[first : first + count]
            heads = [tensor.float().transpose(0, 1) for tensor in seen]
            attended = F.scaled_dot_product_attention(*heads, scale=scale, enable_gqa=True)
            output[begin:end] = attended.transpose(0, 1)
    log_sums, state = torch.empty(H, T), torch.zeros(2, dtype=torch.uint64)  # read by nobody
    return output, log_sums, state, state[0], query.new_empty(0)


def _mm(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    _require(left.dtype == right.dtype, "expected mat1 and mat2 to have the same dtype")
    is_known = left.dtype in HALF and out_dtype == torch.float32
    _require(is_known, "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    _require(out.dtype == out_dtype, "out must have the dtype of out_dtype")
    return torch.mm(left.float(), right.float(), out=out)


def _addmm(
    total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor, **scale: Any
) -> Tensor:
    _require(total.dtype == out_dtype, "self dtype must match either out_dtype or mat1 dtype")
    product = _mm(left, right, out_dtype, out=out.new_empty(len(left), right.shape[1]))
    return out.copy_(total * scale.get("beta", 1) + product * scale.get("alpha", 1))
