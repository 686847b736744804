"""Memory and time of the chunked head against the ordinary one.

    python benchmarks/fused_head.py [--json] [--tokens 512] [--vocab 152064] [--width 512]

Forward and backward of a weighted sum of per-token cross-entropies and entropies, once with a
frozen head (as under LoRA) and once with a trainable one. The baseline is ``log_softmax`` of all
logits with autograd. For the cross-entropy alone, torch's own chunked ``linear_cross_entropy`` is a
peer.

Extra peak memory is what a forward and backward need on top of inputs and weight, including
gradients. On CUDA the allocator reports it. On a CPU each variant runs once in a forked child, and
the rise of the child's peak resident set (``VmHWM``, reset first) counts. Times are taken in one
process, interleaved, on one thread; ratios are medians of ours over medians of the baseline's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import measurement
import torch
from torch import Tensor
from torch.nn.functional import linear_cross_entropy
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

from lit_dlm.tensors.fused_head import token_stats

GIB = 2.0**30

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From hidden rows, head weight and targets to a scalar loss."""


def naive_both(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy and entropy from all logits."""
    log_probs = (rows @ weight.T).float().log_softmax(-1)
    ce = -log_probs.gather(1, targets[:, None]).squeeze(1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return _weighted(ce, entropy)


def chunked_both(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same from the chunked head."""
    stats = token_stats(rows, weight, targets)
    return _weighted(stats.ce, stats.entropy)


def naive_ce(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy alone from all logits."""
    ce = torch.nn.functional.cross_entropy((rows @ weight.T).float(), targets, reduction="none")
    return _weighted(ce, None)


def chunked_ce(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy alone from the chunked head."""
    return _weighted(token_stats(rows, weight, targets).ce, None)


def torch_ce(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy alone from torch's chunked function."""
    options = LinearCrossEntropyOptions(batch_chunk_size=64)
    return _weighted(
        linear_cross_entropy(rows, weight, targets, reduction="none", options=options), None
    )


VARIANTS: dict[str, Head] = {
    "naive": naive_both,
    "chunked": chunked_both,
    "naive_ce": naive_ce,
    "chunked_ce": chunked_ce,
    "torch_ce": torch_ce,
}


def _weighted(ce: Tensor, entropy: Tensor | None) -> Tensor:
    """Weights every token differently, so that nothing can be summed early."""
    share = torch.linspace(0.5, 1.5, len(ce), device=ce.device) / len(ce)
    loss = (ce * share).sum()
    return loss if entropy is None else loss + 0.3 * (entropy * share.flip(0)).sum()


def work(head: Head, rows: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Runs one forward and backward; leaves gradients on the tensors that require them."""
    rows.grad = weight.grad = None
    loss = head(rows, weight, targets)
    loss.backward()
    return float(loss.detach())


def extra_peak(run: Callable[[], float], device: torch.device) -> float:
    """Returns the extra peak in GiB: of the allocator, or on a CPU of a forked child."""

    def extra() -> int:
        before = measurement.reset_peak()
        run()
        return measurement.peak() - before

    return (extra() if device.type == "cuda" else measurement.in_child(extra)) / GIB


def measure(arguments: argparse.Namespace, *, trainable: bool) -> dict[str, dict[str, float]]:
    """Returns memory, median time and loss of all variants with one kind of head."""
    device = torch.device(arguments.device)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.vocab, arguments.width)
    dtype = getattr(torch, arguments.dtype)
    weight = (torch.randn(shape, generator=generator) / arguments.width**0.5).to(device, dtype)
    rows = torch.randn(arguments.tokens, arguments.width, generator=generator).to(device, dtype)
    targets = torch.randint(arguments.vocab, (arguments.tokens,), generator=generator).to(device)
    rows.requires_grad_()
    weight.requires_grad_(trainable)
    runs = {name: partial(work, head, rows, weight, targets) for name, head in VARIANTS.items()}
    # Before this process runs any: freed memory that a child inherits would not count again.
    peaks = {name: extra_peak(run, device) for name, run in runs.items()}
    losses = {name: run() for name, run in runs.items()}
    seconds = measurement.in_turns(runs, arguments.repetitions)
    return {
        name: {"extra_peak_gib": peaks[name], "seconds": seconds[name], "loss": losses[name]}
        for name in runs
    }


def summary(rows: dict[str, dict[str, float]], prefix: str = "") -> dict[str, float]:
    """Compares ours with the baselines; ratios below 1 are in our favour."""

    def ratio(ours: str, theirs: str, key: str) -> float:
        return rows[ours][key] / rows[theirs][key]

    found = {
        "extra_peak_gib": rows["chunked"]["extra_peak_gib"],
        "memory_ratio": ratio("chunked", "naive", "extra_peak_gib"),
        "time_ratio": ratio("chunked", "naive", "seconds"),
        "ce_extra_peak_gib": rows["chunked_ce"]["extra_peak_gib"],
        "ce_memory_ratio": ratio("chunked_ce", "naive_ce", "extra_peak_gib"),
        "ce_time_ratio": ratio("chunked_ce", "naive_ce", "seconds"),
        "ce_memory_ratio_torch": ratio("chunked_ce", "torch_ce", "extra_peak_gib"),
        "ce_time_ratio_torch": ratio("chunked_ce", "torch_ce", "seconds"),
    }
    return {prefix + name: value for name, value in found.items()}


def main() -> None:
    """Measures and prints."""
    arguments = measurement.options(
        __doc__,
        tokens=(512, "target rows"),
        vocab=(152064, "ids of the vocabulary"),
        width=(512, "width of a hidden row"),
        dtype="float32",
        device="cpu",
        repetitions=(3, "timed runs of each variant"),
    )
    found = {
        "": measure(arguments, trainable=False),
        "trainable_": measure(arguments, trainable=True),
    }
    report: dict[str, float] = {}
    for prefix, rows in found.items():
        report |= summary(rows, prefix)
        report |= {f"{prefix}{name}_seconds": row["seconds"] for name, row in rows.items()}
        report |= {f"{prefix}{name}_gib": row["extra_peak_gib"] for name, row in rows.items()}
    measurement.tell(report, as_json=arguments.json)


if __name__ == "__main__":
    main()
