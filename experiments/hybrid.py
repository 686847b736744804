"""Hybrid fine-tuning on the embedded model: what a loss of next tokens adds to that of masked ones.

For each seed, all weights of ``tiny`` learn reference answers in blocks of 8 over a causal context:
by masked tokens alone (``masked``), or with ``HybridModule`` by the next tokens of the clean copy,
too (``hybrid``). Both decode test problems at thresholds, in blocks with the exact cache, and say
how probable next tokens of the references are to them. ``docs/results/hybrid`` has the plan, which
was written before the runs.

    python experiments/hybrid.py --out runs/hybrid  # makes what is missing
    python experiments/hybrid.py                    # prints the tables of the kept results
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import lightning
import numpy as np
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
from policy_bench import gain
from torch.optim import AdamW

from lit_dlm.backbones import HFBackbone
from lit_dlm.datamodules import SupervisedDataModule
from lit_dlm.datamodules.supervised_sources import TaskReferences
from lit_dlm.finetuning.hybrid import HybridModule
from lit_dlm.system.files import write_atomically
from lit_dlm.tasks import Task
from lit_dlm.toy import PythonFunctions, WordProblems
from lit_dlm.training.masking import RandomMasking

SIZE = 8  # of blocks
ARMS = ("masked", "hybrid")
THRESHOLDS = (0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
UPDATES = 2000
COUNT = 300  # test problems of each task
EXAMPLES = {"WordProblems": 6000, "PythonFunctions": 4000}
SPEC = {
    "attention": "block",
    "block_size": SIZE,
    "block_origin": "response",
    "causal_context": True,
}


def main() -> None:
    """Makes what is missing, then prints the tables."""
    options = parser(__doc__, 0, 1, 2).parse_args()
    kept = (options.out or Path("docs/results/hybrid")) / "hybrid.parquet"
    losses = kept.with_suffix(".json")
    if options.out:
        runs, found = [], {}
        for arm, seed in itertools.product(ARMS, options.train_seeds):
            folder = options.out / f"{arm}-s{seed}"
            train(folder, arm, seed)
            runs.append((arm, seed, evaluate(folder)))
            found[f"{arm}-s{seed}"] = next_token_loss(folder / "model")
        keep_decodes(kept, runs)
        write_atomically(losses, json.dumps(found, indent=1) + "\n")
    print(markdown(read_decodes(kept), json.loads(losses.read_text())))


def train(folder: Path, arm: str, seed: int) -> None:
    """Trains all weights; the model is in the folder ``model``."""
    tasks = [json.loads(problems(name, "train", n))[0] for name, n in EXAMPLES.items()]
    source = {"class_path": "TaskReferences", "init_args": {"tasks": tasks}}
    masking = {"class_path": "RandomMasking", "init_args": {"min_t": 0.001, "weight": "none/t"}}
    module = ("--model", "HybridModule") if arm == "hybrid" else ()
    call(
        folder / "trained",
        *("fit", "--config", "exp/sft_gt_tiny", *module, "--run_dir", folder, *seed_flags(seed)),
        *("--model.masking", json.dumps(masking), "--model.num_padding", SIZE),
        *("--model.backbone.init_args.lora", "null"),
        *("--model.backbone.init_args.trainable", "true"),
        *("--model.backbone.init_args.spec_overrides", json.dumps(SPEC)),
        *("--model.export_dir", folder / "model", "--data.sources", json.dumps([source])),
        *("--trainer.max_steps", UPDATES, *BARE),
    )


def evaluate(folder: Path) -> Path:
    """Decodes test problems at all thresholds; returns the folder of the results."""
    decoder = {
        "policy": {"class_path": "ThresholdPolicy", "init_args": {"threshold": 0.9}},
        "quota": "NoQuota",
        "window": {"class_path": "BlockWindow", "init_args": {"block_length": SIZE}},
        "cache": "BlockCache",
        "settings": {"eos_rule": "fill"},
    }
    sweep = {"at": {"decoder": decoder, "option": "policy.threshold", "values": THRESHOLDS}}
    tasks = json.loads(problems("WordProblems", "test", COUNT))
    tasks += json.loads(problems("PythonFunctions", "test", COUNT, allow_code_execution=True))
    call(
        folder / "decodes" / "done",
        *("predict", "--config", "exp/evaluate_tiny", "--run_dir", folder / "decodes"),
        *("--model.backbone.init_args.path", folder / "model"),
        *("--model.decoders", "null", "--model.sweep", json.dumps(sweep)),
        *("--data.methods", "null", "--data.tasks", json.dumps(tasks)),
    )
    return folder / "decodes" / "results"


def next_token_loss(model: Path) -> float:
    """Returns the mean cross-entropy in nats of next tokens in references of test problems."""
    module = HybridModule(
        HFBackbone(str(model), trainable=True),
        tokenizer=str(model),
        optimizer=AdamW,
        masking=RandomMasking(min_t=0.001, weight="none/t"),
    )
    tasks: list[Task] = [
        WordProblems("test", num_examples=COUNT),
        PythonFunctions("test", num_examples=COUNT),
    ]
    data = SupervisedDataModule(
        [TaskReferences(tasks)], response_length=32, batch_size=50, val_fraction=0.5
    )
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    return float(trainer.validate(module, data, verbose=False)[0]["val/loss_next"])


def markdown(decodes: Decodes, losses: dict[str, float]) -> str:
    """Returns the table of decodes and that of next tokens."""
    lines = [["task", "trained by", *map(str, THRESHOLDS)]]
    for task in dict.fromkeys(task for _, task, _ in decodes):
        found = {
            arm: [decodes[arm, task, method] for a, t, method in decodes if (a, t) == (arm, task)]
            for arm in ARMS
        }
        for arm, cells in found.items():
            shown = [f"{points(right, sign='')} @ {cost.mean():.1f}" for cost, right in cells]
            lines.append([task, arm, *shown])
        pairs = zip(found["hybrid"], found["masked"], strict=True)
        lines.append(
            [task, "difference [95 %]", *(gain(one - two) for (_, one), (_, two) in pairs)]
        )
    nexts = [["trained by", "next tokens, nats"]]
    for arm in ARMS:
        each = [loss for name, loss in losses.items() if name.startswith(arm)]
        nexts.append([arm, f"{np.mean(each):.3f} ({', '.join(f'{one:.3f}' for one in each)})"])
    return f"{table(lines)}\n{table(nexts)}"


if __name__ == "__main__":
    main()
