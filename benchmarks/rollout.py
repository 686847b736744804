"""Rollouts of uneven length: idle slots, and rows in different phases of their blocks.

A block model of CPU size decodes responses whose lengths are lognormal with a mean of 700 tokens
and a cap of 2,000, both divided by ``--scale``; the sampler ends each response at its length. Three
figures are measured in one process:

- ``occupancy``: share of the batch's slots that are busy when rows are replaced as they end
  (``occupancy_without``: batch after batch);
- ``refill_speedup``: tokens per second with replacement over batch after batch. Where a step costs
  as much for few rows as for many, as on a GPU, it is the ratio of the two occupancies;
- ``out_of_phase_speedup``: tokens per second, after the prompts, of 64 rows of about 1,400 keys in
  different phases of their blocks, over an imitation of an older scheme: two forwards per step,
  each over a copy of the cache of its rows, with keys repeated for every query head under a boolean
  mask. Model, choice of tokens and loop are the current ones in both. The model for this figure is
  wider than for the others, so that it has two key heads: a single one is repeated without a copy.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --json
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import measurement
import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones import Architecture, HFBackbone
from lit_dlm.backbones.base import Denoised, Span
from lit_dlm.backbones.cache import WindowCache
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    Decoder,
    DecodeResult,
    DecodeSettings,
    DecodeState,
    DynamicPolicy,
    EvenQuota,
    Observer,
    Proposal,
    Sampler,
    StepRecord,
    decode,
    prompt_canvas,
)
from lit_dlm.decoding.api import DecodePrompt, Occupancy, WorkQueue, decode_stream
from lit_dlm.decoding.caches import CacheSession, Forwards

MASK, PAD, EOS, OTHER = 2, 0, 1, 5
MEAN, CAP, SIGMA = 700, 2000, 1.0


def clock() -> float:
    """Returns CPU seconds of this process with one thread, wall time with several."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class EndingSampler(Sampler):
    """Proposes an end of text once a response has its seed's length, and none before."""

    def __init__(self, lengths: Tensor) -> None:
        super().__init__()
        self.lengths = lengths

    def propose(self, state: DecodeState, denoised: Denoised, requires: frozenset[str]) -> Proposal:
        proposal = super().propose(state, denoised, requires)
        columns = torch.arange(state.ids.shape[1]) - state.start
        ids = torch.where(proposal.ids == EOS, OTHER, proposal.ids)
        ended = columns >= self.lengths[state.seeds][:, None]
        return replace(proposal, ids=torch.where(ended, EOS, ids))


class TwoForwards(Decoder):
    """The older scheme: rows that enter a block and the others run one after the other."""

    def forwards(self, *args: Any) -> Forwards:
        session = super().forwards(*args)
        session.__class__ = _TwoForwardSession
        return session


class _TwoForwardSession(CacheSession):
    def prepare(self, state: DecodeState, first_mask: Sequence[int]) -> None:
        if self._rows[0].begin is None:
            super().prepare(state, first_mask)  # the prompts, which are not timed
            return
        parts: tuple[dict[int, Span], dict[int, Span]] = ({}, {})
        for number, (row, column) in enumerate(zip(self._rows, first_mask, strict=True)):
            begin, end = self._window.bounds(
                column, start=state.start, length=state.ids.shape[1], first=row.first
            )
            assert row.begin is not None
            parts[begin != row.begin][number] = Span(row.begin, end, end)
            row.begin = begin
        self._plans = [
            self._canvas.plan(
                list(part.values()),
                rows=list(part) if len(part) < len(first_mask) else None,
                block_causal=bool(entered),
            )
            for entered, part in enumerate(parts)
            if part
        ]

    def denoise(self, state: DecodeState, columns: Tensor) -> tuple[Denoised, Tensor | None]:
        for plan in self._plans:
            self._canvas.run(state.ids, plan)
        return self._canvas.read(columns), None


class RepeatingBackbone(HFBackbone):
    """The older attention: keys are repeated for every query head, under a boolean mask."""

    _is_before = False

    def encode(
        self, *inputs: Any, cache: WindowCache | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        self._is_before = cache is not None and cache.plan.packing is None
        return super().encode(*inputs, cache=cache, **options)

    def _mask(self, visible: Any, *, is_window: bool) -> Any:
        if self._is_before and is_window:
            return visible
        return super()._mask(visible, is_window=is_window)


class Clock(Observer):
    """Measures the seconds of all steps but the first, which runs the prompts."""

    requires: frozenset[str] = frozenset()

    def on_start(self, state: DecodeState) -> None:
        self.begin = math.inf

    def on_step(self, record: StepRecord) -> None:
        self.begin = min(self.begin, clock())

    def on_end(self, result: DecodeResult) -> None:
        self.seconds = clock() - self.begin
        self.ids = result.ids


def lengths_of(count: int, *, scale: float, seed: int) -> Tensor:
    """Returns ``(count,)`` int64 lengths of responses."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    return torch.from_numpy((drawn.clip(1, CAP) / scale).round().clip(1).astype(np.int64))


def block_backbone(options: argparse.Namespace, *, before: bool = False) -> HFBackbone:
    """Returns a random block model; like SDAR's, it has fewer key heads than query heads."""
    torch.manual_seed(options.seed)
    return (RepeatingBackbone if before else HFBackbone)(
        attn_implementation="sdpa" if before else "auto",
        architecture=Architecture(
            decoder="qwen3",
            attention="block",
            block_size=options.block,
            vocab_size=options.vocab,
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_layers=options.layers,
            num_heads=options.hidden // 32,
            num_kv_heads=max(options.hidden // 128, 1),
            initializer_range=0.1,
            mask_id=MASK,
            pad_id=PAD,
            eos_ids=(EOS,),
        ),
    ).eval()


def decoder_of(options: argparse.Namespace, lengths: Tensor, cache: BlockCache) -> Decoder:
    """Returns a decoder that commits some tokens per step, more where the model is sure."""
    return Decoder(
        policy=DynamicPolicy(options.threshold),
        quota=EvenQuota(steps_per_block=options.block),
        window=BlockWindow(options.block, origin="sequence"),
        sampler=EndingSampler(lengths),
        cache=cache,
        settings=DecodeSettings(eos_rule="stop"),
    )


def refill(options: argparse.Namespace) -> dict[str, float]:
    """Measures occupancy and speed with rows replaced as they end, and batch after batch."""
    lengths = lengths_of(options.responses, scale=options.scale, seed=options.seed)
    backbone = block_backbone(options)
    decoder = decoder_of(options, lengths, BlockCache())
    response = round(CAP / options.scale) + 1
    prompts = prompts_of(options, options.responses)
    counted = {"with": Occupancy(), "without": Occupancy()}

    def queued() -> None:
        for _ in decode_stream(
            backbone,
            decoder,
            WorkQueue(len(prompts)),
            lambda number: DecodePrompt(str(number), prompts[number], number),
            response_length=response,
            batch_size=options.rows,
            observers=[counted["with"]],
        ):
            pass

    def batches() -> None:
        for first in range(0, len(prompts), options.rows):
            canvas = prompt_canvas(
                prompts[first : first + options.rows],
                response_length=response,
                spec=backbone.spec,
                seeds=range(first, min(first + options.rows, len(prompts))),
                device=backbone.device,
            )
            decode(backbone, decoder, canvas, [counted["without"]])

    runs = {"with": queued, "without": batches}
    seconds = measurement.in_turns(runs, options.repetitions, clock)
    tokens = int(lengths.sum())
    return {
        "occupancy": counted["with"].share,
        "occupancy_without": counted["without"].share,
        "tokens_per_second": tokens / seconds["with"],
        "refill_speedup": seconds["without"] / seconds["with"],
    }


def out_of_phase(options: argparse.Namespace) -> dict[str, float]:
    """Measures 64 rows with long prompts, in different phases of their blocks; none ends early."""
    phase = {name: getattr(options, f"phase_{name}") for name in ("hidden", "layers", "prompt")}
    options = argparse.Namespace(**{**vars(options), **phase})
    prompts = prompts_of(options, 64, shortest=0.9)
    response = options.phase_response
    never = torch.full((64,), response + 1)
    clocks = {"one": Clock(), "two": Clock()}

    def run(name: str, backbone: HFBackbone) -> Callable[[], float]:
        decoder = decoder_of(options, never, BlockCache())
        if name == "two":
            decoder = TwoForwards(**decoder.parts)

        def measured() -> float:
            canvas = prompt_canvas(
                prompts,
                response_length=response,
                spec=backbone.spec,
                seeds=range(64),
                device=backbone.device,
            )
            decode(backbone, decoder, canvas, [clocks[name]])
            return clocks[name].seconds

        return measured

    runs = {
        "one": run("one", block_backbone(options)),
        "two": run("two", block_backbone(options, before=True)),
    }
    taken = [{name: run() for name, run in runs.items()} for _ in range(options.phase_repetitions)]
    seconds = {name: statistics.median(one[name] for one in taken) for name in runs}
    if not torch.equal(clocks["one"].ids, clocks["two"].ids):
        raise SystemExit("one forward and two gave different tokens")
    return {
        "out_of_phase_tokens_per_second": 64 * response / seconds["one"],
        "out_of_phase_speedup": seconds["two"] / seconds["one"],
    }


def prompts_of(
    options: argparse.Namespace, count: int, *, shortest: float = 0.5
) -> list[list[int]]:
    """Returns random prompts of up to ``--prompt`` tokens, long ones first."""
    generator = np.random.default_rng(options.seed)
    least = round(options.prompt * shortest)
    sizes = sorted(generator.integers(least, options.prompt + 1, count))[::-1]
    return [generator.integers(3, options.vocab, size).tolist() for size in sizes]


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    options = measurement.options(
        __doc__,
        arguments,
        hidden=128,
        layers=4,
        vocab=1024,
        block=4,
        threshold=0.2,
        prompt=(32, "most tokens of a prompt"),
        responses=256,
        rows=(32, "rows decoded together"),
        scale=(20.0, "divides the lengths"),
        phase_hidden=(256, "of the model of 64 rows"),
        phase_layers=2,
        phase_prompt=(1400, "of the 64 rows"),
        phase_response=(16, "cells of the 64 rows"),
        phase_repetitions=1,
        repetitions=3,
        seed=0,
    )
    measurement.tell({**refill(options), **out_of_phase(options)}, as_json=options.json)


if __name__ == "__main__":
    main()
