"""Widening the blocks of a block model from 4 to 8 with TraceRL, on the embedded model.

The embedded model is first made a block model (``base``): all weights are fine-tuned on reference
answers, with attention in blocks of 4. The other arms add twelve RL steps of ``exp/tracerl_tiny``
with an adapter, on the same prompts. ``four`` rolls out and trains in blocks of 4, ``eight`` in
blocks of 8. ``widened`` follows arXiv 2509.06949: training rows have blocks of 8 throughout, while
rollouts and attention change from blocks of 4 to 8 half way. Every arm decodes one held-out list
in blocks of 4 and of 8.

    python experiments/block_widening.py --out runs/block_widening  # makes what is missing
    python experiments/block_widening.py  # prints the table of the published results

Parts that are on disk are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from chain import (
    BARE,
    Decodes,
    call,
    keep_decodes,
    parser,
    points,
    problems,
    read_decodes,
    seed_flags,
    table,
)

SIZES = (4, 8)
STEPS = 12  # of RL
ARMS = ("base", "four", "eight", "widened")
THRESHOLD = 0.8


def main() -> None:
    """Makes what is missing, then prints the table."""
    options = parser(__doc__, 0, 1, 2).parse_args()
    kept = (options.out or Path("docs/results/rl")) / "block_widening.parquet"
    if options.out:
        convert(options)
        runs = []
        for seed, arm in itertools.product(options.train_seeds, ARMS):
            folder = options.out / f"{arm}-s{seed}"
            if arm != "base":
                reinforce(options, arm, seed, folder)
            adapter = None if arm == "base" else folder / "policy" / "last"
            for size in SIZES:
                evaluate(options, folder / f"blocks-{size}", size, adapter)
                runs.append((f"{arm}, blocks of {size}", seed, folder / f"blocks-{size}/results"))
        keep_decodes(kept, runs)
    print(markdown(read_decodes(kept)))


def convert(options: argparse.Namespace) -> None:
    """Fine-tunes all weights on reference answers, with attention in blocks of 4."""
    masking = {"class_path": "SemiAutoregressive", "init_args": {"weight": "1/length"}}
    tasks = json.loads(problems("WordProblems", "train", 20_000))
    source = {"class_path": "TaskReferences", "init_args": {"tasks": tasks}}
    blocks = {"attention": "block", "block_size": 4, "block_origin": "sequence"}
    call(
        options.out / "converted",
        *("fit", "--config", "exp/sft_gt_tiny", "--run_dir", options.out / "convert"),
        *("--model.backbone.init_args.lora", "null"),
        *("--model.backbone.init_args.trainable", "true"),
        *("--model.backbone.init_args.spec_overrides", json.dumps(blocks)),
        *("--model.masking", json.dumps(masking), "--model.num_padding", 4),
        *("--model.export_dir", options.out / "model", "--data.sources", json.dumps([source])),
        *("--data.batch_size", 64, "--trainer.max_steps", 1500, *BARE),
    )


def model(options: argparse.Namespace, size: int) -> list[Any]:
    """Returns the flags of the block model with attention in blocks of ``size``."""
    path = ["--model.backbone.init_args.path", options.out / "model"]
    return [*path, "--model.backbone.init_args.spec_overrides", json.dumps({"block_size": size})]


def decoder(size: int, **components: Any) -> dict[str, Any]:
    """Returns a decoder that commits at a threshold in blocks of ``size``, with an exact cache."""
    return {
        "policy": {"class_path": "ThresholdPolicy", "init_args": {"threshold": THRESHOLD}},
        "quota": "NoQuota",
        "window": {
            "class_path": "BlockWindow",
            "init_args": {"block_length": size, "origin": "sequence"},
        },
        "cache": {"class_path": "BlockCache"},
        "settings": {"eos_rule": "fill"},
        **components,
    }


def reinforce(options: argparse.Namespace, arm: str, seed: int, folder: Path) -> None:
    """Runs TraceRL with an adapter; for ``widened``, the first half rolls out in blocks of 4."""
    widths = {"four": (4,), "eight": (8,), "widened": SIZES}[arm]
    checkpoint: list[Any] = ["--ckpt_path", "last"]
    for number, width in enumerate(widths):
        run = folder if number == len(widths) - 1 else folder / "first"
        steps = STEPS * (number + 1) // len(widths)
        decoders = {
            "rollout": decoder(width, sampler={"temperature": 1.0, "score_on": "raw"}),
            "evaluation": decoder(width),
        }
        call(
            run / "done",
            *("fit", "--config", "exp/tracerl_tiny", *model(options, width)),
            *(*seed_flags(seed), "--run_dir", run, *checkpoint),
            *("--model.decoders", json.dumps(decoders), "--model.block_size", widths[-1]),
            *("--trainer.max_epochs", steps, "--trainer.check_val_every_n_epoch", steps),
            *("--data.tasks", problems("WordProblems", "train", 400, seed=seed)),
        )
        checkpoint = ["--ckpt_path", run / "checkpoints" / "last.ckpt"]


def evaluate(options: argparse.Namespace, folder: Path, size: int, adapter: Path | None) -> None:
    """Decodes the held-out list in blocks of ``size``."""
    call(
        folder / "done",
        *("predict", "--config", "exp/evaluate_tiny", *model(options, size)),
        *("--run_dir", folder, "--model.decoders", json.dumps({"threshold": decoder(size)})),
        *("--data.methods", "[threshold]"),
        *([] if adapter is None else ["--model.backbone.init_args.adapter", adapter]),
        *("--data.tasks", problems("WordProblems", "test", 1000, seed=9)),
    )


def markdown(decodes: Decodes) -> str:
    """Returns accuracy in per cent, forwards and gain over ``base``, by arm and block size."""
    lines = [
        ["trained", *itertools.chain(*((f"blocks of {n}", "forwards", "gain") for n in SIZES))]
    ]
    by_arm = {arm: point for (arm, *_), point in decodes.items()}
    for arm in ARMS:
        line = [arm]
        for size in SIZES:
            forwards, right = by_arm[f"{arm}, blocks of {size}"]
            before = by_arm[f"base, blocks of {size}"][1]
            gain = "" if arm == "base" else points(right - before)
            line += [points(right, ""), f"{forwards.mean():.1f}", gain]
        lines.append(line)
    return table(lines)


if __name__ == "__main__":
    main()
