"""Size and speed of stored trajectories against a per-step store and against plain numpy.

    python benchmarks/trajectories.py [--json] [--repeats 5] [--records 4096]

The records are the committed fixtures of the format (GSM8K texts, G = T = 256 and G = 128, T = 64)
and decodes of the embedded model. Baselines: (a) ``per_step_store.py``, which keeps each step as
separate zstd frames; (b) plain numpy, the same arrays as int32 in one uncompressed ``.npz``.
Everything runs in one process on one thread, repetitions interleaved. Times are medians: CPU time
where one action is compared with another, wall time where records per second are counted.

What the ratios mean (each is baseline (a) over ours, per record):

- ``size_ratio``: bytes of (a)'s files over bytes of our block of 64 at zstd level 9 (G = T = 256).
  (a) also holds a timestamp per step.
- ``replay_ratio``: from files in the page cache to all 64 final states. Each side reads its 64
  records as it stores them: (a) 64 files, ours one block, with checksums, rules and content digests
  checked. ``replay_ratio_lone`` compares one file of (a) with one block that holds one record, and
  ``replay_ratio_picked`` with reading a whole block of 64 for one record.
- ``capture_us_per_step``: time inside the observer's own calls (start, steps, end) over the steps,
  on the embedded model with a batch of 16; ``capture_overhead_percent`` is that over the time of a
  step without capture. Apart from these calls, the loop does the same work with and without
  observers, so this is what capture adds. ``capture_on_off_percent`` compares whole decodes in
  pairs; it varies by several per cent on a busy machine. Making records from the buffer
  (``records_us``) is not part of the decode.
- ``logits_bytes_int8``, ``logits_bytes_fp16``: stored bytes per logit of a masked position, with
  checksums and zstd, of such decodes with ``level: logits`` at every step. ``logits_on_off_int8``
  is the CPU time of decoding and making records over that without logits.
- ``read_records_per_second``: records from the training loader of ``TrajectoryDataModule`` in one
  process, one state per record, shuffled, collated to tensors, blocks of 64 (G = T = 256). On a
  busy machine, prefer ``read_records_per_cpu_second``.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import measurement
import numpy as np
import per_step_store
from tracelock_decode import canvases

from lit_dlm.backbones import HFBackbone
from lit_dlm.decoding import Decoder, EntropyPolicy, decode
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.trajectories import Trajectory
from lit_dlm.trajectories.capture import FeatureCapture, Level, TrajectoryCapture
from lit_dlm.trajectories.features import FeatureScheme
from lit_dlm.trajectories.format import decode_block
from lit_dlm.trajectories.members import encode_members
from lit_dlm.trajectories.store import RunRecord, TrajectoryShardWriter

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "golden" / "trajectories"

SCHEMES: tuple[FeatureScheme, ...] = ("int8", "fp16")

Figures = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs everything and prints the figures."""
    options = measurement.options(
        __doc__,
        arguments,
        repeats=(5, "repetitions of every measurement"),
        records=(4096, "records to write and read"),
        length=(64, "response cells when capturing"),
        batch=(16, "rows of a decode when capturing"),
        folder=("", "where temporary files go"),
    )
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=options.folder or None) as name:
        folder = Path(name)
        blocks = {
            size: decode_block((FIXTURES / f"gsm8k_{size}.records.arrow.zst").read_bytes())
            for size in ("256_256", "128_64")
        }
        figures: Figures = {}
        for size, records in blocks.items():
            figures |= sizes(size, records)
            figures |= speeds(size, records, folder / size, options.repeats)
        for key in ("size_ratio", "replay_ratio", "replay_ratio_lone", "replay_ratio_picked"):
            figures[key] = figures[f"{key}_256_256"]
        captured, overhead = capture(options)
        figures |= overhead | sizes("embedded", captured) | logits(options)
        many = copies(blocks["256_256"], options.records)
        figures |= writing(many, folder / "shards", options.repeats)
        figures |= reading(folder / "shards" / "0", options.repeats)
    figures["threads"] = options.threads
    measurement.tell(figures, as_json=options.json)


# -- bytes ---------------------------------------------------------------------------------------


def sizes(name: str, records: Sequence[Trajectory]) -> Figures:
    """Measures bytes per record of ours, of (a) and of (b)."""
    ours = len(encode_members(records)[0]) / len(records)
    baseline = statistics.mean(len(per_step_store.encode(record)) for record in records)
    return {
        f"bytes_{name}": ours,
        f"bytes_lone_{name}": statistics.mean(len(encode_members([r])[0]) for r in records),
        f"bytes_per_step_store_{name}": baseline,
        f"bytes_numpy_{name}": sum(map(_numpy_bytes, records)) / len(records),
        f"size_ratio_{name}": baseline / ours,
    }


def _numpy_bytes(record: Trajectory) -> int:
    return record.prompt_ids.nbytes + record.tokens.nbytes + record.commit_step.nbytes


# -- encode, decode, replay ----------------------------------------------------------------------


def speeds(size: str, records: list[Trajectory], folder: Path, repeats: int) -> Figures:
    """Measures microseconds per record, interleaved, and their ratios."""
    folder.mkdir()
    n = len(records)
    block, lone, arrays = (
        folder / "block.arrow.zst",
        folder / "lone.arrow.zst",
        folder / "numpy.npz",
    )
    block.write_bytes(encode_members(records)[0])
    lone.write_bytes(encode_members(records[:1])[0])
    np.savez(arrays, **_stacked(records))
    files = []
    for i, record in enumerate(records):
        files.append(folder / f"{i}.steps")
        files[-1].write_bytes(per_step_store.encode(record))

    def per_step_final(paths: Sequence[Path]) -> list[Any]:
        return [per_step_store.final_state(*per_step_store.load(path)[1:]) for path in paths]

    def per_step_all() -> list[Any]:
        return [per_step_store.all_states(*per_step_store.load(path)[1:]) for path in files]

    def ours_final(path: Path) -> list[Any]:
        return [r.state_at(r.num_steps) for r in decode_block(path.read_bytes())]

    def numpy_final() -> list[Any]:
        with np.load(arrays) as loaded:
            tokens, commit_step = loaded["tokens"], loaded["commit_step"]
        last = records[0].num_steps
        return list(np.where(commit_step >= last, records[0].mask_id, tokens))

    data = block.read_bytes()
    actions: dict[str, Callable[[], object]] = {
        "encode": lambda: encode_members(records)[0],
        "encode_level_3": lambda: encode_members(records, level=3)[0],
        "encode_lone": lambda: encode_members(records[:1])[0],
        "decode": lambda: decode_block(data),
        "decode_unchecked_digests": lambda: decode_block(data, strict=False),
        "replay": lambda: ours_final(block),
        "replay_lone": lambda: ours_final(lone),
        "all_states": lambda: [r.all_states() for r in decode_block(block.read_bytes())],
        "encode_per_step_store": lambda: [per_step_store.encode(r) for r in records[:8]],
        "replay_per_step_store": lambda: per_step_final(files),
        "replay_lone_per_step_store": lambda: per_step_final(files[:1]),
        "all_states_per_step_store": per_step_all,
        "replay_numpy": numpy_final,
    }
    measurement.in_turns(actions, 1)  # warms up
    seconds = measurement.in_turns(actions, repeats, time.thread_time)
    counts = {"encode_lone": 1, "replay_lone": 1, "encode_per_step_store": 8}
    counts["replay_lone_per_step_store"] = 1
    figures = {
        f"{key}_us_{size}": value * 1e6 / counts.get(key, n) for key, value in seconds.items()
    }
    whole = seconds["replay"]
    alone = seconds["replay_lone_per_step_store"]
    figures |= {
        f"replay_ratio_{size}": seconds["replay_per_step_store"] / whole,
        f"replay_ratio_lone_{size}": alone / seconds["replay_lone"],
        f"replay_ratio_picked_{size}": alone / whole,
        f"all_states_ratio_{size}": seconds["all_states_per_step_store"] / seconds["all_states"],
    }
    for ours, theirs in zip(ours_final(block), per_step_final(files), strict=True):
        if not np.array_equal(ours, theirs):
            raise RuntimeError("the two stores disagree about a final state")
    return figures


def _stacked(records: Sequence[Trajectory]) -> dict[str, Any]:
    return {
        "prompts": np.concatenate([r.prompt_ids for r in records]),
        "tokens": np.stack([r.tokens for r in records]),
        "commit_step": np.stack([r.commit_step for r in records]),
    }


# -- capture -------------------------------------------------------------------------------------


class TimedCapture(TrajectoryCapture):
    """Capture with a clock around its calls."""

    seconds = 0.0

    def on_start(self, *arguments: Any) -> None:
        self._timed(super().on_start, *arguments)

    def on_step(self, *arguments: Any) -> None:
        self._timed(super().on_step, *arguments)

    def on_end(self, *arguments: Any) -> None:
        self._timed(super().on_end, *arguments)

    def _timed(self, call: Callable[..., None], *arguments: Any) -> None:
        begin = time.perf_counter()
        call(*arguments)
        self.seconds += time.perf_counter() - begin


def capture(options: argparse.Namespace) -> tuple[list[Trajectory], Figures]:
    """Returns decodes of the embedded model, and what capturing them costs."""
    backbone, decoder = HFBackbone(path="tiny").eval(), Decoder(policy=EntropyPolicy())
    examples = WordProblems("test", num_examples=4 * options.batch).examples()
    batches = canvases(backbone, examples, batch=options.batch, length=options.length)
    records: list[Trajectory] = []
    plain, inside, making, pairs = [], [], [], []
    decode(backbone, decoder, batches[0])
    for round_number in range(max(options.repeats, 2)):
        canvas = batches[round_number % len(batches)]
        observer = TimedCapture(vocab_size=backbone.vocab_size)
        seconds = {}
        # Whichever comes first meets a colder cache: take turns.
        for on in (False, True) if round_number % 2 else (True, False):
            begin = time.thread_time()
            result = decode(backbone, decoder, canvas, [observer] if on else [])
            seconds[on] = time.thread_time() - begin
        steps = int(result.num_steps.max())
        begin = time.perf_counter()
        uids = [f"word/{round_number}/{row}" for row in range(options.batch)]
        made = observer.trajectories(uids)
        making.append((time.perf_counter() - begin) / len(made))
        if round_number < len(batches):
            records += made
        plain.append(seconds[False])
        pairs.append(seconds[True] / seconds[False] - 1)
        inside.append(observer.seconds / steps)
    per_step = statistics.median(plain) / steps
    return records, {
        "capture_overhead_percent": 100 * statistics.median(inside) / per_step,
        "capture_on_off_percent": 100 * statistics.median(pairs),
        "capture_us_per_step": 1e6 * statistics.median(inside),
        "decode_us_per_step": 1e6 * per_step,
        "records_us": 1e6 * statistics.median(making),
    }


def logits(options: argparse.Namespace) -> Figures:
    """Returns what keeping the logits of masked positions takes."""
    backbone, decoder = HFBackbone(path="tiny").eval(), Decoder(policy=EntropyPolicy())
    examples = WordProblems("test", num_examples=options.batch).examples()
    (canvas,) = canvases(backbone, examples, batch=options.batch, length=options.length)
    kept: dict[str, FeatureCapture | None] = {"": None}
    kept |= {
        scheme: FeatureCapture(
            function=None,
            hidden_layers=(),
            groups=(backbone.vocab_size,),
            projector_digest="",
            scheme=scheme,
            layout="logits",
            scores=frozenset(),
        )
        for scheme in SCHEMES
    }
    uids = [f"word/{row}" for row in range(options.batch)]
    seconds: dict[str, list[float]] = {scheme: [] for scheme in kept}
    figures: Figures = {}
    for _ in range(options.repeats):
        for scheme, features in kept.items():
            level: Level = "logits" if features else "tokens"
            observer = TrajectoryCapture(
                vocab_size=backbone.vocab_size, level=level, features=features
            )
            begin = time.thread_time()
            decode(backbone, decoder, canvas, [observer])
            records = observer.trajectories(uids)
            seconds[scheme].append(time.thread_time() - begin)
            if features:
                masked = sum(int((record.commit_step + 1).sum()) for record in records)
                _, member = encode_members(records)
                assert member is not None
                figures[f"logits_bytes_{scheme}"] = len(member) / masked / backbone.vocab_size
    ratios = [one / plain for plain, one in zip(seconds[""], seconds["int8"], strict=True)]
    return figures | {"logits_on_off_int8": statistics.median(ratios)}


# -- shards --------------------------------------------------------------------------------------


def copies(records: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Returns ``count`` records, each with a uid and a prompt of its own."""
    return [
        replace(records[i % len(records)], uid=f"{records[i % len(records)].uid}.{i:06d}")
        for i in range(count)
    ]


def writing(records: list[Trajectory], folder: Path, repeats: int) -> Figures:
    """Measures records per second through the public writer, closed and on disk."""
    run = RunRecord(model={}, tokenizer={}, decode={}, randomness={}, data={})
    rates, puts = [], []
    for number in range(max(1, min(repeats, 3))):
        begin = time.perf_counter()
        with TrajectoryShardWriter(
            folder / str(number), name="bench", split="train", rank=0, run=run
        ) as writer:
            writer.put(*records)
            puts.append((time.perf_counter() - begin) / len(records))
        rates.append(len(records) / (time.perf_counter() - begin))
    return {
        "write_records_per_second": statistics.median(rates),
        "put_us": 1e6 * statistics.median(puts),
    }


def reading(folder: Path, repeats: int) -> Figures:
    """Measures records per second through the training loader of the data module."""
    from lit_dlm.datamodules import TrajectoryDataModule  # Lightning takes seconds to import.

    def loader() -> TrajectoryDataModule:
        module = TrajectoryDataModule(
            folder,
            source="tokens",
            step_ratio=1 / 256,  # one state of each record
            batch_size=64,
            val_fraction=0.05,
            max_val_examples=1,
        )
        module.setup("fit")
        return module

    def seconds_of_a_pass(module: TrajectoryDataModule) -> tuple[int, float, float]:
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        count = sum(len(batch.ids) for batch in module.train_dataloader())
        return count, time.perf_counter() - begin, time.thread_time() - begin_cpu

    begin = time.perf_counter()
    loader()
    setup = time.perf_counter() - begin
    rates, cpu_rates = [], []
    for number in range(repeats + 1):
        # A fresh module has read no record: the pass decodes every block once.
        count, seconds, cpu_seconds = seconds_of_a_pass(loader())
        if number:
            rates.append(count / seconds)
            cpu_rates.append(count / cpu_seconds)
    return {
        "read_records_per_second": statistics.median(rates),
        "read_records_per_cpu_second": statistics.median(cpu_rates),
        "setup_seconds": setup,
    }


if __name__ == "__main__":
    main()
