"""Speed of decoding by cache scheme, on a model of random weights, in order of confidence.

All cells of the table come from one process and one model; repetitions are interleaved and medians
reported. On the CPU, times are the process's own CPU seconds, which other work on the machine
disturbs little. ``--device cuda`` also reports the share of memory bandwidth and of peak compute
that the forwards reach.

``--ragged N`` makes prompts up to N tokens shorter, so that the rows of a block model enter their
blocks at different steps; the baseline is then the time to decode each row alone.

``--peer`` also times decoding as Fast-dLLM does it with the same schemes (``fast_dllm.py``), on
transformers' own model with the same weights, and compares the tokens.

    python benchmarks/decode.py --peer --json
    python benchmarks/decode.py --block_size 4 --batch 16 --ragged 16 --schemes block
    python benchmarks/decode.py --preset dream-7b --device cuda --dtype bfloat16 --batch 1 16
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import fast_dllm
import measurement
import torch
from torch import Tensor

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    CacheScheme,
    Canvas,
    ConfidencePolicy,
    Decoder,
    DualCache,
    EvenQuota,
    NoCache,
    PrefixCache,
    decode,
    prompt_canvas,
)

PRESETS: dict[str, dict[str, object]] = {
    "bench": {"hidden": 512, "layers": 8, "heads": 8, "intermediate": 1536, "vocab": 32000},
    "dream-7b": {
        "hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "intermediate": 18944,
        "vocab": 152064, "shift": 1,
    },
}  # fmt: skip
"""Published shapes; every size can be overridden by its own option."""

PEAKS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12)}
"""Memory bandwidth in bytes/s and dense bfloat16 FLOP/s by the name of the device (data sheets)."""

SCHEMES: dict[str, CacheScheme] = {
    "none": NoCache(),
    "prefix": PrefixCache(),
    "dual": DualCache(),
    "block": BlockCache(),
}


@dataclass
class Meter:
    """Wraps the backbone's forwards with a clock and counts their work."""

    seconds: float = 0.0
    forwards: int = 0
    columns: int = 0
    """Columns that went through the layers, summed over rows and forwards."""
    head_rows: int = 0
    depth: int = field(default=0, repr=False)

    def wrap(self, backbone: HFBackbone) -> None:
        """Replaces the methods that the loop calls with timed ones."""
        for name in ("denoise", "encode", "head"):
            setattr(backbone, name, self._timed(name, getattr(backbone, name)))

    def _timed(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(tensor: Tensor, *others: object, **kwargs: object) -> object:
            if name == "head":
                self.head_rows += tensor[..., 0].numel()
            elif name == "encode":
                self.forwards += 1
                self.columns += tensor.numel()
            if self.depth:  # parts of a full forward
                return method(tensor, *others, **kwargs)
            self.depth += 1
            begin = measurement.clock()
            try:
                return method(tensor, *others, **kwargs)
            finally:
                self.seconds += measurement.clock() - begin
                self.depth -= 1

        return call


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints a table, or one JSON object."""
    args = _parse(arguments)
    backbone = _backbone(args)
    rows = [row for batch in args.batch for row in measure(backbone, args, batch=batch)]
    if args.json:
        print(json.dumps(_report(rows, args)))
        return
    for row in rows:
        shown = {f"{row['scheme']}, {row['batch']}: {name}": value for name, value in row.items()}
        measurement.tell({name: v for name, v in shown.items() if v is not None}, as_json=False)


def measure(backbone: HFBackbone, args: argparse.Namespace, *, batch: int) -> list[dict[str, Any]]:
    """Times every scheme at one batch size."""
    cuda = backbone.device.type == "cuda"
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, backbone.vocab_size, (batch, args.prompt), generator=generator)
    shorter = torch.randint(0, args.ragged + 1, (batch,), generator=generator).tolist()

    def canvas_of(rows: range) -> Canvas:
        return prompt_canvas(
            [prompts[row][shorter[row] :] for row in rows],
            response_length=args.gen,
            spec=backbone.spec,
            seeds=rows,
            device=backbone.device,
        )

    canvas = canvas_of(range(batch))
    times: dict[str, list[tuple[float, float]]] = {scheme: [] for scheme in args.schemes}
    kept: dict[str, tuple[Meter, int, float | None]] = {}
    alone: dict[str, tuple[float, float]] = {}
    peers: dict[str, list[float]] = {scheme: [] for scheme in args.schemes}
    equal: dict[str, float] = {}
    peer = fast_dllm.plain_model(backbone) if args.peer else None
    for repetition in range(args.repetitions + 1):  # the first one warms up
        for scheme in args.schemes:
            decoder = Decoder(
                policy=ConfidencePolicy(),
                quota=EvenQuota(args.steps),
                window=BlockWindow(args.block, origin=backbone.spec.block_origin)
                if args.block_size
                else BlockWindow(args.block),
                cache=SCHEMES[scheme],
            )
            meter = Meter()
            meter.wrap(backbone)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            begin = measurement.clock()
            result = decode(backbone, decoder, canvas)
            total = measurement.clock() - begin
            for name in ("denoise", "encode", "head"):
                delattr(backbone, name)
            if repetition:
                times[scheme].append((total, meter.seconds))
            elif args.ragged:
                begin = measurement.clock()
                rows = [
                    decode(backbone, decoder, canvas_of(range(row, row + 1))).ids
                    for row in range(batch)
                ]
                seconds = measurement.clock() - begin
                same = (
                    torch.cat([ids[:, -args.gen :] for ids in rows]) == result.ids[:, -args.gen :]
                )
                alone[scheme] = seconds, 100.0 * float(same.double().mean())
            if peer is not None:
                begin = measurement.clock()
                ids = fast_dllm.generate(
                    peer,
                    canvas.ids,
                    start=canvas.start,
                    block=args.block,
                    steps=args.steps,
                    mask_id=backbone.spec.mask_id,
                    scheme=scheme,
                )
                if repetition:
                    peers[scheme].append(measurement.clock() - begin)
                same = (ids == result.ids)[:, -args.gen :]
                equal[scheme] = 100.0 * float(same.double().mean())
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
            kept[scheme] = meter, int(result.num_steps.max()), peak
    return [
        {
            "scheme": name,
            "batch": batch,
            **_figures(backbone, args, batch, times[name], *kept[name]),
            # Time of decoding each row alone over ours, for the same tokens.
            "x_alone": alone[name][0] / _middle(times[name]) if name in alone else None,
            "alone_equal_percent": alone[name][1] if name in alone else None,
            "x_peer": statistics.median(peers[name]) / _middle(times[name]) if peer else None,
            "peer_equal_percent": equal.get(name),
        }
        for name in args.schemes
    ]


def _middle(times: list[tuple[float, float]]) -> float:
    return statistics.median(total for total, _ in times)


def _figures(
    backbone: HFBackbone,
    args: argparse.Namespace,
    batch: int,
    times: list[tuple[float, float]],
    meter: Meter,
    steps: int,
    peak: float | None,
) -> dict[str, float | None]:
    """Returns median speeds, counts, and the share of the device's limits that forwards reach."""
    total = _middle(times)
    inside = statistics.median(inside for _, inside in times)
    name = torch.cuda.get_device_name() if backbone.device.type == "cuda" else ""
    known = next((peaks for key, peaks in PEAKS.items() if key in name), None)
    weights, flops = _work(backbone, args, meter)
    return {
        "tokens_per_second": batch * args.gen / total,
        "forwards_per_second": meter.forwards / total,
        "forwards": meter.forwards,
        # Over the steps of the longest row: 1 where rows share each forward.
        "forwards_per_step": meter.forwards / steps,
        # Both times are from the same repetition, on an equally busy machine.
        "overhead_percent": statistics.median(100.0 * (all_ - part) / all_ for all_, part in times),
        "peak_gib": peak,
        "bandwidth_percent": 100.0 * weights / inside / known[0] if known else None,
        "compute_percent": 100.0 * flops / inside / known[1] if known else None,
    }


def _work(backbone: HFBackbone, args: argparse.Namespace, meter: Meter) -> tuple[float, float]:
    """Returns the bytes and operations that the forwards cannot avoid.

    Bytes: the weights of layers and head once per forward (keys and values, which are small in
    comparison at these lengths, are left out). Operations: two per weight and column, and the
    attention over the whole canvas.
    """
    model = backbone.model
    layers = sum(p.numel() for p in model.model.layers.parameters())
    head = model.lm_head.weight
    size = head.element_size()
    shape = backbone.architecture
    attention = 4 * (args.prompt + args.gen) * shape.num_heads * shape.head_width * shape.num_layers
    flops = meter.columns * (2.0 * layers + attention) + 2.0 * meter.head_rows * head.numel()
    return meter.forwards * float(layers + head.numel()) * size, flops


def _report(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, object]:
    """Returns one object; speed-ups are those at the first batch size."""
    first = {row["scheme"]: row for row in rows if row["batch"] == args.batch[0]}
    speed = {scheme: row["tokens_per_second"] for scheme, row in first.items()}
    report: dict[str, object] = {}
    for scheme, row in first.items():
        if "none" in speed and scheme != "none":
            report[f"{scheme}_speedup"] = speed[scheme] / speed["none"]
        if row["x_peer"] is not None:
            report[f"{scheme}_over_fast_dllm"] = row["x_peer"]
            report[f"{scheme}_equal_percent"] = row["peer_equal_percent"]
    report["overhead_percent"] = max(row["overhead_percent"] for row in rows)
    report["tokens_per_second_by_scheme"] = speed
    return {**report, "measurements": rows, "settings": vars(args)}


def _backbone(args: argparse.Namespace) -> HFBackbone:
    torch.manual_seed(0)
    architecture = Architecture(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads or None,
        family="random",
        mask_id=3,
        pad_id=0,
        eos_ids=(1,),
        shift=args.shift,
        attention="block" if args.block_size else "full",
        block_size=args.block_size or None,
    )
    with torch.device(args.device):
        backbone = HFBackbone(architecture=architecture, dtype=args.dtype)
    return backbone.to(args.device).eval()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    args = measurement.options(
        __doc__,
        arguments,
        preset=("bench", f"sizes: {', '.join(PRESETS)}; each may be given"),
        **dict.fromkeys(("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab"), 0),
        block_size=(0, "makes the model block-causal"),
        dtype="float32",
        device="cpu",
        prompt=(128, "prompt tokens"),
        ragged=(0, "prompts are up to so much shorter"),
        gen=(128, "cells to fill"),
        block=(0, "block length; 32, or the model's block size"),
        steps=(64, "steps for the whole response"),
        batch=[1],
        schemes=([""], f"of {', '.join(SCHEMES)}"),
        repetitions=3,
        peer=(False, "also time Fast-dLLM's way"),
    )
    for name, value in {"shift": 0, **PRESETS[args.preset]}.items():
        setattr(args, name, getattr(args, name, None) or value)
    args.block = args.block or args.block_size or 32
    if args.schemes == [""]:
        args.schemes = ["none", "block"] if args.block_size else ["none", "prefix", "dual"]
    has_peer = set(args.schemes) <= {"none", "prefix", "dual"}
    if args.peer and (args.block_size or args.shift or args.ragged or not has_peer):
        raise SystemExit("--peer: only full attention without a shift, and equal prompts")
    return args


if __name__ == "__main__":
    main()
