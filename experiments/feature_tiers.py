"""What smaller features cost the policy: rollout-proxy F0.5 by storage tier, on the embedded model.

    python experiments/feature_tiers.py --out runs/feature_tiers.json  # measures anew
    python experiments/feature_tiers.py  # prints the table of the published figures

Training problems are decoded once, one token per step, and every step's features are kept in fp16
for prompt and response. Each tier stores a part of them (layout, scheme, share of the steps) with
the real writer, and policies are trained on it with equal steps, batches and seeds. All are scored
at all steps of the same validation traces, in fp16, on the rows that their layout includes. Costs
are in points of F0.5 against the first tier.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chain import table
from lightning.pytorch import Trainer

from lit_dlm.backbones import load_tokenizer
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.projection import (
    FeatureSettings,
    PCAFitter,
    Projector,
    ProjectorConfig,
    acceptance_features,
    feature_groups,
)
from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.decoding import Decoder, EntropyPolicy, decode, prompt_canvas
from lit_dlm.system.files import write_atomically
from lit_dlm.toy import WordProblems
from lit_dlm.tracelock.module import MONITOR, TraceLockModule
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.scorer import ScorerSettings
from lit_dlm.tracelock.states import state_snapshots, trace_states
from lit_dlm.trajectories.capture import FeatureCapture, KeptSteps, TrajectoryCapture
from lit_dlm.trajectories.features import StepFeatures
from lit_dlm.trajectories.members import only_masked
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import RunRecord, TrajectoryShardWriter

TIERS: dict[str, tuple[str, str, float]] = {
    "all fp16 0.3": ("all", "fp16", 0.3),
    "all int8 0.3": ("all", "int8", 0.3),
    "masked fp16 0.3": ("masked", "fp16", 0.3),
    "all fp16 0.1": ("all", "fp16", 0.1),
    "masked int8 0.1": ("masked", "int8", 0.1),
}
"""Layout, scheme and share of kept steps."""
SEEDS, PROBLEMS, STEPS = 3, 400, 400


def decoded(backbone: HFBackbone) -> tuple[list[Trajectory], Projector]:
    """Traces with the features of every step, and their projector."""
    tokenizer = load_tokenizer("tiny")
    examples = WordProblems("train", num_examples=PROBLEMS).examples()
    traces: list[Trajectory] = []
    projector: Projector | None = None
    for first in range(0, PROBLEMS, 100):
        batch = examples[first : first + 100]
        prompts: Any = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": example.text}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for example in batch
        ]
        canvas = prompt_canvas(
            prompts, response_length=32, spec=backbone.spec, seeds=range(first, first + len(batch))
        )
        if projector is None:
            capture = TrajectoryCapture(vocab_size=backbone.vocab_size)
            decode(backbone, Decoder(policy=EntropyPolicy()), canvas, [capture])
            config = ProjectorConfig(
                hidden_size=backbone.hidden_size, hidden_rank=48, delta_rank=16
            )
            states = trace_states(capture.trajectories([e.uid for e in batch]))
            fitter = PCAFitter(config)
            for group in states:
                fitter.update(state_snapshots(backbone, group, with_prompt=True))
            projector = fitter.finish()
        settings = FeatureSettings()
        features = FeatureCapture(
            function=partial(acceptance_features, projector, settings=settings),
            hidden_layers=(-3, -2, -1),
            groups=feature_groups(projector.config, settings),
            projector_digest=projector.digest(),
            scheme="fp16",
            layout="all",
        )
        capture = TrajectoryCapture(
            vocab_size=backbone.vocab_size, level="features", features=features
        )
        decode(backbone, Decoder(policy=EntropyPolicy()), canvas, [capture])
        traces += capture.trajectories([f"{example.uid}@entropy" for example in batch])
    assert projector is not None
    return traces, projector


def stored(trace: Trajectory, layout: str, scheme: str, ratio: float) -> Trajectory:
    """The trace with the part of its features that a tier keeps."""
    whole = trace.features
    assert whole is not None
    steps = KeptSteps(trace.seed, ratio=ratio).steps(trace.num_steps)
    first = 0 if layout == "all" else trace.num_prompt
    part = StepFeatures.quantize(
        whole.dequantized()[steps, first:],
        kept_steps=np.array(steps),
        proposals=whole.proposals[steps, first:],
        groups=whole.groups,
        scheme=scheme,  # type: ignore[arg-type]
        layout="all" if layout == "all" else "generation",
        projector_digest=whole.projector_digest,
    )
    return replace(trace, features=only_masked(trace, part) if layout == "masked" else part)


def write(folder: Path, traces: list[Trajectory]) -> Path:
    """Writes these traces as shards."""
    run = RunRecord(model={}, tokenizer={}, decode={}, randomness={}, data={})
    with TrajectoryShardWriter(folder, name="tier", split="train", rank=0, run=run) as writer:
        for trace in traces:
            writer.put(trace)
    return folder


def score(
    backbone: HFBackbone,
    projector: Projector,
    folders: tuple[Path, Path],
    layout: str,
    *,
    seed: int,
) -> float:
    """Trains a policy on one tier and returns its F0.5 on the common validation states."""
    torch.manual_seed(seed)
    module = TraceLockModule(
        backbone,
        tokenizer="tiny",
        projector=projector,
        head=AcceptanceConfig(width=64, num_layers=2, num_heads=4, ffn_width=128, dropout=0.0),
        settings=ScorerSettings(layout=layout),  # type: ignore[arg-type]
        min_crop_ratio=1.0,
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=0.01),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=2e-3, total_steps=STEPS, pct_start=0.1
        ),
        seed=seed,
    )
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
        "use_distributed_sampler": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            max_steps=STEPS, limit_val_batches=0, gradient_clip_val=1.0, default_root_dir=root,
            **quiet,
        )  # fmt: skip
        trainer.fit(module, datamodule=TrajectoryDataModule(folders[0], val_fraction=0.2))
        common = TrajectoryDataModule(folders[1], val_fraction=0.2, max_val_examples=2048)
        (scores,) = Trainer(default_root_dir=root, **quiet).validate(
            module, datamodule=common, verbose=False
        )
    return float(scores[MONITOR])


def main() -> None:
    """Measures the figures if ``--out`` is given, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="file of figures to make; none only reports")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if options.out is not None:
        figures = measure()
        write_atomically(options.out, json.dumps(figures, indent=1) + "\n")
    kept = options.out or Path("docs/results/elsewhere/feature_tiers.json")
    print(markdown(json.loads(kept.read_text())))


def measure() -> dict[str, Any]:
    """Returns, by tier, the F0.5 of every seed and the kilobytes per trace."""
    backbone = HFBackbone(path="tiny").eval()
    traces, projector = decoded(backbone)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        common = {
            layout: write(Path(root) / f"common-{layout}", [
                stored(trace, layout, "fp16", 1.0) for trace in traces
            ])
            for layout in ("all", "masked")
        }  # fmt: skip
        for name, (layout, scheme, ratio) in TIERS.items():
            folder = write(
                Path(root) / name.replace(" ", "-"),
                [stored(trace, layout, scheme, ratio) for trace in traces],
            )
            size = sum(path.stat().st_size for path in folder.glob("*.tar"))
            scores = [
                score(backbone, projector, (folder, common[layout]), layout, seed=seed)
                for seed in range(SEEDS)
            ]
            figures[name] = {"kb_per_trace": round(size / len(traces) / 1e3, 1), "f0.5": scores}
            print(name, figures[name], flush=True)
    return figures


def markdown(figures: dict[str, Any]) -> str:
    """Returns a table of sizes, scores and costs by tier; F0.5 is mean ± spread over seeds."""
    base = statistics.mean(next(iter(figures.values()))["f0.5"])
    lines = [["rows, format and share of the steps", "KB/trace", "F0.5", "cost, points"]]
    for name, found in figures.items():
        mean, spread = statistics.mean(found["f0.5"]), statistics.stdev(found["f0.5"])
        size = f"{found['kb_per_trace']:.1f}"
        lines.append([name, size, f"{mean:.3f} ± {spread:.3f}", f"{100 * (base - mean):+.1f}"])
    return table(lines)


if __name__ == "__main__":
    main()
