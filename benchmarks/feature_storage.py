"""Bytes per trace with features, in the shape of Dream-7B, through the real writer.

    python benchmarks/feature_storage.py [--json] [--traces 4]

Traces of 128 and 256 response cells, half and half, commit one token per step (blocks of 16, in
random order inside) after prompts of 149 tokens. The hidden states are synthetic: three snapshots
of width 3584 whose spectrum falls like 1/k and which resemble each other, as neighbouring depths of
a real model do. They go through a projector of 256 and 32 features, the quantiser and the shard
writer. The baseline is the TraceLock release: one torch file per kept step, 30 % of the steps, all
rows in fp16, written in the same process. Sizes are means over traces; times, interleaved, medians.
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import measurement
import numpy as np
import torch

from lit_dlm.backbones.projection import (
    FeatureSettings,
    Projector,
    ProjectorConfig,
    acceptance_features,
    feature_groups,
)
from lit_dlm.trajectories.capture import KeptSteps
from lit_dlm.trajectories.features import StepFeatures
from lit_dlm.trajectories.members import only_masked
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import RunRecord, TrajectoryShardWriter

WIDTH, PROMPT, VOCAB, MASK = 3584, 149, 152064, 151666
TIERS = {
    "default": ("masked", "int8", 0.1),
    "generation int8 0.1": ("generation", "int8", 0.1),
    "all int8 0.1": ("all", "int8", 0.1),
    "masked int8 0.3": ("masked", "int8", 0.3),
    "masked fp16 0.1": ("masked", "fp16", 0.1),
    "all fp16 0.3": ("all", "fp16", 0.3),
}
"""Layout, scheme and share of kept steps."""


def trace(number: int, length: int, rng: np.random.Generator) -> Trajectory:
    """Returns a trace of one token per step: blocks of 16 from left to right, at random inside."""
    order = np.concatenate([first + rng.permutation(16) for first in range(0, length, 16)])
    commit_step = np.empty(length, dtype=np.int32)
    commit_step[order] = np.arange(length)
    return Trajectory(
        uid=f"synthetic/train/{number:05d}@entropy",
        prompt_ids=rng.integers(0, 150_000, PROMPT).astype(np.int32),
        tokens=rng.integers(0, 150_000, length).astype(np.int32),
        commit_step=commit_step,
        num_steps=length,
        mask_id=MASK,
        vocab_size=VOCAB,
        seed=number,
    )


def synthetic_features(
    record: Trajectory, projector: Projector, settings: FeatureSettings, basis: torch.Tensor
) -> tuple[np.ndarray, list[int]]:
    """Returns ``(S, P + G, F)`` features at 30 % of the steps, and these steps."""
    generator = torch.Generator().manual_seed(record.seed)
    steps = KeptSteps(record.seed, ratio=0.3).steps(record.num_steps)
    rows = PROMPT + record.num_generated
    kept = []
    for _ in steps:
        codes = torch.randn(rows, 3, basis.shape[0], generator=generator)
        # Depths share most of their information.
        codes = codes * 0.3 + torch.randn(rows, 1, basis.shape[0], generator=generator)
        prob = torch.rand(rows, generator=generator).sqrt()
        features = acceptance_features(
            projector,
            codes @ basis,
            prob,
            settings=settings,
            entropy=-prob.log().clamp_min(-10),
            margin=prob,
        )
        kept.append(features.numpy())
    return np.stack(kept), steps


def stored(
    record: Trajectory, features: np.ndarray, steps: list[int], tier: tuple[str, str, float],
    groups: tuple[int, ...],
) -> Trajectory:  # fmt: skip
    """Returns the record with the features of one tier."""
    layout, scheme, ratio = tier
    chosen = KeptSteps(record.seed, ratio=ratio).steps(record.num_steps)
    # The nearest of the steps with features: which steps are kept does not change their size.
    places = sorted({int(np.abs(np.array(steps) - step).argmin()) for step in chosen})
    first = 0 if layout == "all" else PROMPT
    part = StepFeatures.quantize(
        features[places, first:],
        kept_steps=np.array(steps)[places],
        proposals=np.zeros((len(places), features.shape[1] - first), dtype=np.int32),
        groups=groups,
        scheme=scheme,  # type: ignore[arg-type]
        layout="all" if layout == "all" else "generation",
        projector_digest="0" * 64,
    )
    rng = np.random.default_rng(record.seed)
    part = replace(part, proposals=rng.integers(0, 150_000, part.proposals.shape, dtype=np.int32))
    return replace(record, features=only_masked(record, part) if layout == "masked" else part)


def release_bytes(record: Trajectory, features: np.ndarray, steps: list[int]) -> int:
    """Returns the size of the release's files for one trace: a torch archive per kept step."""
    size = 0
    for step_features in features:
        rows = torch.zeros(len(step_features), dtype=torch.int32)
        file = io.BytesIO()
        torch.save(
            {
                "x": torch.from_numpy(step_features[:, :832]).half(),
                "confidence": torch.zeros(len(rows), dtype=torch.float16),
                "step_token_ids": rows,
                "label": rows.clone(),
                "state": rows.clone(),
                "meta": {"steps": record.num_steps, "algorithm": "entropy", "path": "x" * 200},
            },
            file,
        )
        size += file.tell()
    return size


def main() -> None:
    """Prints the figures."""
    options = measurement.options(__doc__, traces=(4, "traces, half of each length"))
    settings = FeatureSettings()
    config = ProjectorConfig(hidden_size=WIDTH)
    projector = Projector(config)
    generator = torch.Generator().manual_seed(0)
    for weight in (projector.hidden_weight, projector.delta_weight):
        torch.nn.init.orthogonal_(weight, generator=generator)
    groups = feature_groups(config, settings)
    spectrum = 1.0 / torch.arange(1, 513)
    basis = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(0)) * spectrum[:, None]
    rng = np.random.default_rng(0)
    sizes: dict[str, list[int]] = {name: [] for name in TIERS}
    seconds: dict[str, list[float]] = {name: [] for name in (*TIERS, "release")}
    release: list[int] = []
    run = RunRecord(model={}, tokenizer={}, decode={}, randomness={}, data={})
    for number in range(options.traces):
        record = trace(number, (128, 256)[number % 2], rng)
        features, steps = synthetic_features(record, projector, settings, basis)
        begin = time.perf_counter()
        release.append(release_bytes(record, features, steps))
        seconds["release"].append(time.perf_counter() - begin)
        for name, tier in TIERS.items():
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                with TrajectoryShardWriter(
                    folder, name="synthetic", split="train", rank=0, run=run
                ) as writer:
                    writer.put(stored(record, features, steps, tier, groups))
                sizes[name].append(sum(path.stat().st_size for path in Path(folder).glob("*.tar")))
            seconds[name].append(time.perf_counter() - begin)
    ours = {name: statistics.mean(values) / 1e6 for name, values in sizes.items()}
    theirs = statistics.mean(release) / 1e6
    figures: dict[str, float] = {"release: MB a trace, written here": theirs}
    for name, value in ours.items():
        figures[f"{name}: MB a trace"] = value
        figures[f"{name}: GB of 7,000 traces"] = 7 * value
        figures[f"{name}: times smaller than the release"] = theirs / value
        figures[f"{name}: seconds a trace"] = statistics.median(seconds[name])
    measurement.tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
