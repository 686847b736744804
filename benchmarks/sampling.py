"""Time and memory of scoring a window of a large vocabulary, against a full sort.

    python benchmarks/sampling.py [--json] [--rows 6] [--columns 32] [--vocab 152064]

The baseline scores all cells at once: it widens the logits, sorts the vocabulary for the nucleus
and adds noise to every id. Both propose the same tokens, which is checked. The logits are random,
scaled so that most nuclei of 95 % hold fewer than a hundred ids.

Extra memory is the rise of the peak resident set, each variant once in a forked child; times are
medians on one thread, interleaved. The ratios are ours over the baseline's, and ours over the bytes
of the logits in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import peak_memory
import torch
from torch import Tensor

from lit_dlm.backbones.base import BackboneSpec, Denoised
from lit_dlm.decoding import DecodeState, Sampler, prompt_canvas
from lit_dlm.decoding.engine import initial_state
from lit_dlm.ops.noise import gumbel_noise
from lit_dlm.ops.sampling import keep_top_p
from lit_dlm.ops.scores import confidence, entropy

SAMPLERS = {
    "greedy": Sampler(),
    "top_p": Sampler(top_p=0.95, score_on="filtered"),
    "top_p drawn": Sampler(top_p=0.95, score_on="filtered", temperature=0.2),
    "drawn": Sampler(temperature=1.0),
}


class _OneForward:
    """As much of a backbone as an initial state asks for."""

    spec = BackboneSpec(family="random", mask_id=0, pad_id=1, eos_ids=(2,))


def full_sort(sampler: Sampler, state: DecodeState, denoised: Denoised) -> Tensor:
    """Proposed ids and their scores, of the whole vocabulary at once."""
    raw = denoised.logits.float()
    filtered = raw if sampler.temperature in (0.0, 1.0) else raw / sampler.temperature
    if sampler.top_p is not None:
        filtered = keep_top_p(filtered, sampler.top_p)
    noisy = filtered
    if sampler.temperature > 0.0 and sampler.top_p is None:
        noisy = sampler.perturbed(state, denoised)
    elif sampler.temperature > 0.0:
        positions = state.positions.gather(1, denoised.columns)
        tokens = torch.arange(raw.shape[-1])
        noisy = filtered.double() + gumbel_noise(state.seeds, state.step, positions, tokens)
    ids = noisy.argmax(-1)
    scored = filtered if sampler.score_on == "filtered" else raw
    confidence(scored, ids)
    entropy(scored)
    return ids


def ours(sampler: Sampler, state: DecodeState, denoised: Denoised) -> Tensor:
    """The same from the sampler."""
    proposal = sampler.propose(state, denoised, frozenset({"entropy"}))
    return proposal.ids.gather(1, denoised.columns)


def _extra_peak(run: Callable[[], Tensor]) -> int:
    def extra() -> int:
        before = peak_memory.reset_peak()
        run()
        return peak_memory.peak() - before

    return peak_memory.in_child(extra)


def _seconds(run: Callable[[], Tensor]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    """Prints one line per sampler."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    for name, default in (("rows", 6), ("columns", 32), ("vocab", 152_064), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, columns = arguments.rows, arguments.columns
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, columns, arguments.vocab, generator=generator).mul_(6).bfloat16()
    logits[..., 0] = -torch.inf
    canvas = prompt_canvas(
        [[3]] * rows, response_length=columns, spec=_OneForward.spec, seeds=range(rows)
    )
    state = initial_state(_OneForward(), canvas)  # type: ignore[arg-type]
    denoised = Denoised(logits=logits, columns=torch.arange(1, 1 + columns).expand(rows, -1))
    results = {}
    for name, sampler in SAMPLERS.items():

        def run_full(sampler: Sampler = sampler) -> Tensor:
            return full_sort(sampler, state, denoised)

        def run_ours(sampler: Sampler = sampler) -> Tensor:
            return ours(sampler, state, denoised)

        # Memory first: what this process has freed would not count again in a child.
        peaks = _extra_peak(run_full), _extra_peak(run_ours)
        results[name] = _compared(run_full, run_ours, peaks, logits.nbytes, arguments.repeats)
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for name, found in results.items():
        print(
            f"{name:12s} {found['full_seconds']:6.2f} s -> {found['seconds']:5.2f} s "
            f"({found['time_ratio']:.2f}), extra memory {found['full_of_logits']:5.1f} -> "
            f"{found['of_logits']:4.2f} times the bfloat16 logits"
        )


def _compared(
    full: Callable[[], Tensor],
    new: Callable[[], Tensor],
    peaks: tuple[int, int],
    logits_bytes: int,
    repeats: int,
) -> dict[str, float]:
    if not torch.equal(full(), new()):
        raise SystemExit("the two ways propose different tokens")
    times = [(_seconds(full), _seconds(new)) for _ in range(repeats)]
    full_seconds, seconds = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "full_seconds": full_seconds,
        "seconds": seconds,
        "time_ratio": seconds / full_seconds,
        "full_of_logits": peaks[0] / logits_bytes,
        "of_logits": peaks[1] / logits_bytes,
    }


if __name__ == "__main__":
    main()
