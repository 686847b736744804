"""Speed of decoding by cache scheme and policy, on a model of random weights.

All cells of the table come from one process and one model; repetitions are interleaved and the
median counts. On the CPU the unit is seconds of the process's own CPU time, so that other work on
the machine disturbs little. ``--device cuda`` also says what share of the memory bandwidth and of
the compute limit the forwards reach.

``--ragged N`` makes prompts up to N tokens shorter, so that the rows of a block model come into
their blocks at different steps; the time of decoding each row alone is then the baseline.

``--peer`` also times Fast-dLLM's way with the same schemes (``fast_dllm.py``), on transformers' own
model with the same weights, and compares the tokens.

    python benchmarks/decode.py --peer --json
    python benchmarks/decode.py --block-size 4 --batch 16 --ragged 16 --schemes block
    python benchmarks/decode.py --preset dream-7b --device cuda --dtype bfloat16 --batch 1 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import fast_dllm
import torch
from torch import Tensor

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    Canvas,
    ConfidencePolicy,
    Decoder,
    DualCache,
    DynamicPolicy,
    EntropyBoundedPolicy,
    EntropyPolicy,
    EvenQuota,
    MarginPolicy,
    NoCache,
    NoQuota,
    PrefixCache,
    RandomPolicy,
    SequentialPolicy,
    ThresholdPolicy,
    prompt_canvas,
)

PRESETS: dict[str, dict[str, object]] = {
    "bench": {"hidden": 512, "layers": 8, "heads": 8, "intermediate": 1536, "vocab": 32000},
    "dream-7b": {
        "hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "intermediate": 18944,
        "vocab": 152064, "shift": 1,
    },
    "llada-8b": {
        "decoder": "llama", "hidden": 4096, "layers": 32, "heads": 32, "intermediate": 12288,
        "vocab": 126464,
    },
    "sdar-8b": {
        "decoder": "qwen3", "hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8,
        "intermediate": 12288, "vocab": 151936, "block_size": 4,
    },
}  # fmt: skip
"""Published shapes; every size can be overridden by its own option."""

PEAKS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12)}
"""Memory bandwidth in bytes/s and dense bfloat16 FLOP/s by the name of the device (data sheets)."""

SCHEMES: dict[str, Callable[[argparse.Namespace], object]] = {
    "none": lambda _: NoCache(),
    "prefix": lambda _: PrefixCache(),
    "horizon": lambda args: PrefixCache(horizon=args.horizon),
    "dual": lambda _: DualCache(),
    "block": lambda _: BlockCache(),
}
POLICIES: dict[str, Callable[[argparse.Namespace], dict[str, object]]] = {
    "confidence": lambda args: {"policy": ConfidencePolicy(), "quota": _even(args)},
    "entropy": lambda args: {"policy": EntropyPolicy(), "quota": _even(args)},
    "margin": lambda args: {"policy": MarginPolicy(), "quota": _even(args)},
    "random": lambda args: {"policy": RandomPolicy(), "quota": _even(args)},
    "sequential": lambda args: {"policy": SequentialPolicy(), "quota": _even(args)},
    "threshold": lambda args: {"policy": ThresholdPolicy(args.threshold), "quota": NoQuota()},
    "dynamic": lambda args: {"policy": DynamicPolicy(args.threshold), "quota": _even(args)},
    "entropy-bounded": lambda _: {"policy": EntropyBoundedPolicy(), "quota": NoQuota()},
}


def _even(args: argparse.Namespace) -> EvenQuota:
    return EvenQuota(args.steps)


@dataclass
class Meter:
    """Wraps the backbone's forwards with a clock and counts their work."""

    clock: Callable[[], float]
    seconds: float = 0.0
    forwards: int = 0
    columns: int = 0
    """Columns that went through the layers, summed over rows and forwards."""
    head_rows: int = 0
    depth: int = field(default=0, repr=False)

    def wrap(self, backbone: HFBackbone) -> None:
        """Replaces the methods that the loop calls by timed ones."""
        for name in ("denoise", "encode_window", "head"):
            setattr(backbone, name, self._timed(name, getattr(backbone, name)))

    def _timed(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(tensor: Tensor, **kwargs: object) -> object:
            if name == "head":
                self.head_rows += tensor[..., 0].numel()
            else:
                self.forwards += 1
                self.columns += tensor.numel()
            if self.depth:  # the head inside a full forward
                return method(tensor, **kwargs)
            self.depth += 1
            begin = self.clock()
            try:
                return method(tensor, **kwargs)
            finally:
                self.seconds += self.clock() - begin
                self.depth -= 1

        return call


@dataclass(frozen=True)
class Measurement:
    """One scheme and policy at one batch size; medians over the repetitions."""

    scheme: str
    policy: str
    batch: int
    seconds: float
    tokens_per_second: float
    forwards: int
    forwards_per_second: float
    steps: int
    """Of the row with the most of them: forwards are as many where rows share each one."""
    alone_seconds: float | None
    """Of decoding each row alone, once, for the same tokens; with ``--ragged`` only."""
    equal_percent: float | None
    """Tokens that are the same as those of the row alone."""
    peer_seconds: float | None
    """Of Fast-dLLM's way; with ``--peer`` only."""
    peer_equal_percent: float | None
    loop_overhead_percent: float
    peak_memory_gib: float | None
    bandwidth_percent: float | None = None
    compute_percent: float | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints a table, or one JSON object."""
    args = _parse(arguments)
    torch.set_num_threads(args.threads)
    backbone = _backbone(args)
    measurements = [
        measurement for batch in args.batch for measurement in measure(backbone, args, batch=batch)
    ]
    report = _report(measurements, args)
    if args.json:
        print(json.dumps(report))
        return
    print(f"{'scheme':<9}{'policy':<17}{'batch':>5}{'tok/s':>10}{'fwd/s':>9}{'fwd':>6}", end="")
    print(f"{'fwd/step':>10}{'x alone':>9}{'x peer':>8}", end="")
    print(f"{'overhead %':>12}{'peak GiB':>10}{'bandwidth %':>13}{'compute %':>11}")
    for m in measurements:
        print(f"{m.scheme:<9}{m.policy:<17}{m.batch:>5}{m.tokens_per_second:>10.2f}", end="")
        print(f"{m.forwards_per_second:>9.2f}{m.forwards:>6}", end="")
        ratio = "-" if m.alone_seconds is None else f"{m.alone_seconds / m.seconds:.2f}"
        peer = "-" if m.peer_seconds is None else f"{m.peer_seconds / m.seconds:.2f}"
        print(f"{m.forwards / m.steps:>10.2f}{ratio:>9}{peer:>8}", end="")
        print(f"{m.loop_overhead_percent:>12.2f}", end="")
        for value, width in (
            (m.peak_memory_gib, 10), (m.bandwidth_percent, 13), (m.compute_percent, 11)
        ):  # fmt: skip
            print(f"{'-' if value is None else f'{value:.2f}':>{width}}", end="")
        print()


def measure(backbone: HFBackbone, args: argparse.Namespace, *, batch: int) -> list[Measurement]:
    """Times every scheme and policy at one batch size."""
    cuda = backbone.device.type == "cuda"
    clock = _cuda_clock if cuda else time.process_time
    generator = torch.Generator().manual_seed(args.seed)
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
    cells = [(scheme, policy) for scheme in args.schemes for policy in args.policies]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {cell: [] for cell in cells}
    kept: dict[tuple[str, str], tuple[Meter, int, float | None]] = {}
    alone: dict[tuple[str, str], tuple[float, float]] = {}
    peers: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
    equal: dict[tuple[str, str], float] = {}
    peer = fast_dllm.plain_model(backbone) if args.peer else None
    for repetition in range(args.repetitions + args.warmup):
        for scheme, policy in cells:
            decoder = Decoder(
                window=BlockWindow(args.block, origin=backbone.spec.block_origin)
                if scheme == "block"
                else BlockWindow(args.block),
                cache=SCHEMES[scheme](args),  # type: ignore[arg-type]
                **POLICIES[policy](args),  # type: ignore[arg-type]
            )
            meter = Meter(clock)
            meter.wrap(backbone)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            begin = clock()
            result = decoder(backbone, canvas)
            total = clock() - begin
            for name in ("denoise", "encode_window", "head"):
                delattr(backbone, name)
            if repetition >= args.warmup:
                times[scheme, policy].append((total, meter.seconds))
            elif args.ragged:
                begin = clock()
                rows = [
                    decoder(backbone, canvas_of(range(row, row + 1))).ids for row in range(batch)
                ]
                seconds = clock() - begin
                same = (
                    torch.cat([ids[:, -args.gen :] for ids in rows]) == result.ids[:, -args.gen :]
                )
                alone[scheme, policy] = seconds, 100.0 * float(same.double().mean())
            if peer is not None:
                begin = clock()
                ids = fast_dllm.generate(
                    peer,
                    canvas.ids,
                    start=canvas.start,
                    block=args.block,
                    steps=args.steps,
                    mask_id=backbone.spec.mask_id,
                    scheme=scheme,
                )
                if repetition >= args.warmup:
                    peers[scheme, policy].append(clock() - begin)
                same = (ids == result.ids)[:, -args.gen :]
                equal[scheme, policy] = 100.0 * float(same.double().mean())
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
            kept[scheme, policy] = meter, int(result.num_steps.max()), peak
    return [
        _measurement(
            backbone,
            args,
            cell,
            batch,
            times[cell],
            *kept[cell],
            alone.get(cell),
            (statistics.median(peers[cell]), equal[cell]) if peers[cell] else None,
        )
        for cell in cells
    ]


def _measurement(
    backbone: HFBackbone,
    args: argparse.Namespace,
    cell: tuple[str, str],
    batch: int,
    times: list[tuple[float, float]],
    meter: Meter,
    steps: int,
    peak: float | None,
    alone: tuple[float, float] | None,
    peer: tuple[float, float] | None,
) -> Measurement:
    total = statistics.median(total for total, _ in times)
    # Of the same repetition, so that both times saw the same machine.
    overhead = statistics.median(100.0 * (total - inside) / total for total, inside in times)
    inside = statistics.median(inside for _, inside in times)
    bandwidth, compute = _peaks(backbone, args)
    weights, flops = _work(backbone, args, meter)
    return Measurement(
        scheme=cell[0],
        policy=cell[1],
        batch=batch,
        seconds=total,
        tokens_per_second=batch * args.gen / total,
        forwards=meter.forwards,
        forwards_per_second=meter.forwards / total,
        steps=steps,
        alone_seconds=alone[0] if alone else None,
        equal_percent=alone[1] if alone else None,
        peer_seconds=peer[0] if peer else None,
        peer_equal_percent=peer[1] if peer else None,
        loop_overhead_percent=overhead,
        peak_memory_gib=peak,
        bandwidth_percent=100.0 * weights / inside / bandwidth if bandwidth else None,
        compute_percent=100.0 * flops / inside / compute if compute else None,
    )


def _work(backbone: HFBackbone, args: argparse.Namespace, meter: Meter) -> tuple[float, float]:
    """Bytes and operations that the forwards cannot avoid.

    Bytes: the weights of layers and head once per forward (keys and values come on top, and are
    small beside them at these lengths). Operations: two per weight and column, and the attention
    over the whole canvas.
    """
    model = backbone.model
    layers = sum(p.numel() for p in model.model.layers.parameters())
    head = model.lm_head.weight
    size = head.element_size()
    shape = backbone.architecture
    attention = 4 * (args.prompt + args.gen) * shape.num_heads * shape.head_width * shape.num_layers
    flops = meter.columns * (2.0 * layers + attention) + 2.0 * meter.head_rows * head.numel()
    return meter.forwards * float(layers + head.numel()) * size, flops


def _peaks(backbone: HFBackbone, args: argparse.Namespace) -> tuple[float | None, float | None]:
    known: tuple[float | None, float | None] = (None, None)
    if backbone.device.type == "cuda":
        name = torch.cuda.get_device_name()
        known = next((peaks for key, peaks in PEAKS.items() if key in name), known)
    bandwidth = args.peak_bandwidth * 1e9 if args.peak_bandwidth else known[0]
    return bandwidth, args.peak_compute * 1e12 if args.peak_compute else known[1]


def _report(measurements: list[Measurement], args: argparse.Namespace) -> dict[str, object]:
    """One object; the speed-ups are those of the first policy at the first batch size."""
    first = {
        m.scheme: m
        for m in measurements
        if m.policy == args.policies[0] and m.batch == args.batch[0]
    }
    report: dict[str, object] = {}
    for scheme in ("prefix", "dual"):
        if "none" in first and scheme in first:
            report[f"{scheme}_speedup"] = (
                first[scheme].tokens_per_second / first["none"].tokens_per_second
            )
    for scheme, m in first.items():
        if m.peer_seconds is not None:
            report[f"{scheme}_over_fast_dllm"] = m.peer_seconds / m.seconds
            report[f"{scheme}_equal_percent"] = m.peer_equal_percent
    report["loop_overhead_percent"] = max(m.loop_overhead_percent for m in measurements)
    report["tokens_per_second"] = max(m.tokens_per_second for m in first.values())
    report["tokens_per_second_by_scheme"] = {n: m.tokens_per_second for n, m in first.items()}
    report["measurements"] = [asdict(m) for m in measurements]
    report["settings"] = {k: v for k, v in vars(args).items() if k != "json"}
    return report


def _backbone(args: argparse.Namespace) -> HFBackbone:
    torch.manual_seed(args.seed)
    architecture = Architecture(
        decoder=args.decoder,
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        family="random",
        mask_id=3,
        pad_id=0,
        eos_ids=(1,),
        shift=args.shift,
        attention="block" if args.block_size else "full",
        block_size=args.block_size,
    )
    with torch.device(args.device):
        backbone = HFBackbone(architecture=architecture, dtype=args.dtype)
    return backbone.to(args.device).eval()


def _cuda_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shape = parser.add_argument_group("model")
    shape.add_argument("--preset", choices=list(PRESETS), default="bench", help="published sizes")
    for name in ("hidden", "layers", "heads", "kv-heads", "intermediate", "vocab"):
        shape.add_argument(f"--{name}", type=int)
    shape.add_argument("--shift", type=int, choices=(0, 1))
    shape.add_argument("--block-size", type=int, help="makes the model block-causal")
    shape.add_argument("--decoder", choices=("qwen2", "llama", "qwen3"))
    shape.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    shape.add_argument("--device", default="cpu")
    decode = parser.add_argument_group("decoding")
    decode.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    decode.add_argument("--ragged", type=int, default=0, help="prompts are up to so much shorter")
    decode.add_argument("--gen", type=int, default=128, help="cells to fill")
    decode.add_argument("--block", type=int, help="block length; 32, or the model's block size")
    decode.add_argument("--steps", type=int, default=64, help="steps for the whole response")
    decode.add_argument("--batch", type=int, nargs="+", default=[1])
    decode.add_argument("--threshold", type=float, default=0.9)
    decode.add_argument("--horizon", type=int, default=32)
    decode.add_argument("--schemes", nargs="+", choices=list(SCHEMES))
    decode.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["confidence"])
    run = parser.add_argument_group("measurement")
    run.add_argument("--repetitions", type=int, default=3)
    run.add_argument("--warmup", type=int, default=1)
    run.add_argument("--peer", action="store_true", help="also time Fast-dLLM's way")
    run.add_argument("--threads", type=int, default=1)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--peak-bandwidth", type=float, help="GB/s of the device, for the shares")
    run.add_argument("--peak-compute", type=float, help="TFLOP/s of the device, for the shares")
    run.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    for name, value in {"decoder": "qwen2", "shift": 0, **PRESETS[args.preset]}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.block is None:
        args.block = args.block_size or 32
    if args.peer and (
        args.block_size
        or args.shift
        or args.ragged
        or args.policies != ["confidence"]
        or not set(args.schemes or []) <= {"none", "prefix", "dual"}
    ):
        parser.error("--peer: only full attention without a shift, equal prompts, confidence")
    if args.schemes is None:
        args.schemes = ["none", "block"] if args.block_size else ["none", "prefix", "dual"]
    return args


if __name__ == "__main__":
    main()
