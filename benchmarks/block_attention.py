"""Attention of training rows by blocks (FlexAttention) against SDPA with a mask matrix.

    python benchmarks/block_attention.py [--json] [--length 2048] [--heads 8] [--kv_heads 2]
    python benchmarks/block_attention.py --count

Times one layer's attention over ``[prompt | clean | noisy]`` rows of a block model, including the
mask: forward and backward on a GPU, the forward alone on a CPU, where FlexAttention has no
backward. Both are compiled or fused kernels. Ratios are ours over SDPA's in one process, medians of
interleaved runs; memory is the allocator's peak on a GPU, the bytes of the mask on a CPU.

``--count`` times nothing. It reports what the rows of one response of SDAR-8B cost, by the number
of states in a row (``copies`` of :class:`~lit_dlm.rl.batch.SampleBuilder`): tokens, attention FLOPs
of a layer's forward under the matrix and over tiles, and bytes of the matrix (with the additive one
that SDPA makes from it) and of the tiles' tables. A response in blocks of 4 has four states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import measurement
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from lit_dlm.training.layout import TILE, Slots

PROMPT, RESPONSES = 128, (64, 128, 256, 512, 1024, 2000)
STATES, HEADS, WIDTH = 4, 32, 128


def row_counts(copies: int, *, response: int = 512) -> dict[str, float]:
    """Returns what the rows of a response cost in all, with ``copies`` states in a row."""
    layout = Slots.trace(PROMPT, PROMPT + response, 4, origin="sequence")
    costs: dict[str, float] = dict.fromkeys(ROW_COUNTS, 0.0)
    for first in range(0, STATES, copies):
        rows = layout.packed(min(copies, STATES - first))
        N = len(rows.source)
        mask: Any = rows.in_whole_tiles().block_mask()
        tables = [part for part in mask.as_tuple() if isinstance(part, torch.Tensor)]
        tiles = int(mask.kv_num_blocks.sum()) + int(mask.full_kv_num_blocks.sum())
        costs["row_tokens"] += N
        costs["matrix_teraflops"] += 4 * HEADS * WIDTH * N**2 / 1e12
        costs["tile_teraflops"] += 4 * HEADS * WIDTH * tiles * TILE**2 / 1e12
        costs["matrix_megabytes"] += (1 + 2) * N**2 / 1e6
        costs["tile_megabytes"] += sum(table.nbytes for table in tables) / 1e6
    return costs


ROW_COUNTS = (
    "row_tokens", "matrix_teraflops", "tile_teraflops", "matrix_megabytes", "tile_megabytes",
)  # fmt: skip


def main() -> None:
    """Times attention, or counts its costs."""
    options = measurement.options(
        __doc__,
        length=(2048, "response cells; rows have twice"),
        prompt=(256, "prompt tokens"),
        block_size=(4, "cells of a block"),
        rows=(1, "rows of a batch"),
        heads=(8, "query heads"),
        kv_heads=(2, "key heads"),
        width=(64, "width of a head"),
        repetitions=(3, "timed runs of each"),
        count=(False, "no times"),
    )
    if options.count:
        for response in RESPONSES:
            for copies in range(1, STATES + 1):
                values = row_counts(copies, response=response).items()
                print(response, copies, *(f"{name} {value:.5g}" for name, value in values))
        return
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    layout = Slots.trace(
        options.prompt, options.prompt + options.length, options.block_size, device=device
    )
    N = len(layout.source)
    shapes = [
        (options.rows, heads, N, options.width) for heads in (options.heads, options.kv_heads)
    ]
    query, key, value = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=on_gpu)
        for shape in (shapes[0], shapes[1], shapes[1])
    )
    compiled = torch.compile(flex_attention)

    def by_matrix() -> torch.Tensor:
        mask = layout.visibility()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    def by_blocks() -> torch.Tensor:
        mask = layout.block_mask()
        return compiled(query, key, value, block_mask=mask, enable_gqa=True)

    outputs: dict[str, torch.Tensor] = {}
    peaks: dict[str, int] = {}

    def run(name: str, attend: Callable[[], torch.Tensor]) -> None:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        output = attend()
        if on_gpu:
            output.sum().backward()
            peaks[name] = torch.cuda.max_memory_allocated() - before
        outputs[name] = output.detach()

    runs = {
        "matrix": partial(run, "matrix", by_matrix),
        "blocks": partial(run, "blocks", by_blocks),
    }
    measurement.in_turns(runs, 1)  # compiles
    seconds = measurement.in_turns(runs, options.repetitions)
    if not on_gpu:
        blocks = layout.block_mask().as_tuple()
        tables = [part for part in blocks if isinstance(part, torch.Tensor)]
        peaks = {"matrix": layout.visibility().nbytes, "blocks": sum(one.nbytes for one in tables)}
    found = {
        "device": device,
        "tokens": N,
        "seconds_matrix": seconds["matrix"],
        "time_ratio": seconds["blocks"] / seconds["matrix"],
        "memory_ratio": peaks["blocks"] / peaks["matrix"],
        "largest_difference": float((outputs["matrix"] - outputs["blocks"]).abs().max()),
    }
    measurement.tell(found, as_json=options.json)


if __name__ == "__main__":
    main()
