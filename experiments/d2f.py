"""D2F on the embedded model: tokens a forward of its pipeline, against blocks with a cache.

For each seed, ``exp/d2f_tiny`` trains a student of ``tiny``. It decodes a pipeline of blocks of 8
with the exact cache (``pipeline``), and the same blocks one after the other (``blocks``). The model
that it comes from decodes these blocks with full attention and a dual or prefix cache. All commit
at a threshold, and rows end with their text.

    python experiments/d2f.py --out runs/d2f  # makes what is missing
    python experiments/d2f.py                 # prints the tables of the kept results

Parts that are on disk are not made again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from chain import BARE, call, parser, points, problems, seed_flags, table

from lit_dlm.reports.results import ResultFolder

KEPT = Path("docs/results/d2f/d2f.parquet")
SIZE = 8  # of blocks
THRESHOLDS = (0.6, 0.7, 0.8, 0.9, 0.95)
COUNT = 200  # problems of each task
UPDATES = 2000
SCHEMA = pa.schema(
    {
        **dict.fromkeys(("arm", "task"), pa.dictionary(pa.int8(), pa.string())),
        "threshold": pa.float32(),
        "seed": pa.int8(),  # of training
        "uid": pa.string(),
        "correct": pa.bool_(),
        **dict.fromkeys(("forwards", "tokens"), pa.int16()),  # before the end of the text
    }
)
"""One row for each decode."""


def main() -> None:
    """Makes what is missing, then prints the tables."""
    options = parser(__doc__, 0, 1, 2).parse_args()
    if options.out:
        runs = [("teacher", 0, evaluate(options.out / "teacher", TEACHER))]
        for seed in options.train_seeds:
            folder = options.out / f"s{seed}"
            train(folder, seed)
            runs.append(("student", seed, evaluate(folder / "decodes", STUDENT, folder)))
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(collected(runs), KEPT, compression="zstd", compression_level=19)
    print(markdown(pq.read_table(KEPT)))


def train(folder: Path, seed: int) -> None:
    """Trains a student; its adapter is in the folder ``adapter``."""
    flags = ("--trainer.max_steps", UPDATES, "--run_dir", folder, *seed_flags(seed), *BARE)
    call(folder / "trained", "fit", "--config", "exp/d2f_tiny", *flags)


def decoder(window: str, cache: str) -> dict[str, Any]:
    """Returns a decoder that commits at a threshold in blocks, whatever its window is."""
    return {
        "policy": {"class_path": "ThresholdPolicy", "init_args": {"threshold": 0.9}},
        "quota": "NoQuota",
        "window": {"class_path": window, "init_args": {"block_length": SIZE}},
        "cache": cache,
        "settings": {"eos_rule": "fill"},
    }


TEACHER = {
    "dual": decoder("BlockWindow", "DualCache"),
    "prefix": decoder("BlockWindow", "PrefixCache"),
}
PIPELINE = "student, pipeline"
STUDENT = {
    "blocks": decoder("BlockWindow", "BlockCache"),
    "pipeline": decoder("PipelineWindow", "BlockCache"),
}


def evaluate(folder: Path, decoders: dict[str, Any], student: Path | None = None) -> Path:
    """Decodes test problems at all thresholds; returns the folder of the results."""
    sweep = {
        name: {"decoder": one, "option": "policy.threshold", "values": THRESHOLDS}
        for name, one in decoders.items()
    }
    names = [f"{name}_{value}".replace(".", "") for name in sweep for value in THRESHOLDS]
    model: Sequence[object] = ()
    if student is not None:
        fields = {"attention": "block", "block_size": SIZE, "block_origin": "response"}
        model = (
            "--model.backbone.init_args.spec_overrides",
            json.dumps({**fields, "whole_prompt": True}),
            *("--model.backbone.init_args.adapter", student / "adapter"),
        )
    tasks = json.loads(problems("WordProblems", "test", COUNT))
    tasks += json.loads(problems("PythonFunctions", "test", COUNT, allow_code_execution=True))
    call(
        folder / "done",
        *("predict", "--config", "exp/evaluate_tiny", "--run_dir", folder, *model),
        *("--model.decoders", "null", "--model.sweep", json.dumps(sweep)),
        *("--data.methods", json.dumps(names), "--data.tasks", json.dumps(tasks)),
    )
    return folder / "results"


def collected(runs: Sequence[tuple[str, int, Path]]) -> pa.Table:
    """Returns the decodes of some runs, each with its model, its seed and its results."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for model, seed, folder in runs:
        results = ResultFolder(folder)
        for task, method in results.pairs():
            window, _, digits = method.partition("_")
            for row in results.rows(task, method):
                cell = (f"{model}, {window}", task, float(f"0.{digits[1:]}"), seed)
                values = (*cell, row.uid, row.correct, row.nfe, row.num_tokens)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
    return pa.table(columns, schema=SCHEMA)


def markdown(decodes: pa.Table) -> str:
    """Returns both tables."""
    return f"{equal_table(decodes)}\n{every_table(decodes)}"


def every_table(decodes: pa.Table) -> str:
    """Returns a table of per cent right and tokens a forward."""
    lines: list[Sequence[str]] = [["task", "model, window", *(str(one) for one in THRESHOLDS)]]
    frame = decodes.to_pandas()
    for (task, arm), rows in frame.groupby(["task", "arm"], observed=True):
        cells = [shown(rows[np.isclose(rows.threshold, one)]) for one in THRESHOLDS]
        lines.append([task, arm, *cells])
    return table(lines)


def equal_table(decodes: pa.Table) -> str:
    """Tokens a forward of the pipeline at threshold 0.9, over those of others as accurate as it.

    Intervals are of 2,000 draws of problems and of seeds.
    """
    frame, generator = decodes.to_pandas(), np.random.default_rng(0)
    lines: list[Sequence[str]] = [
        ["task", "pipeline", "against", "tokens a forward", "ratio [95 %]"]
    ]
    for task, rows in frame.groupby("task", observed=True):
        arms = {
            str(arm): [
                part.pivot(index="seed", columns="uid", values=column).to_numpy(float)
                for _, part in of_arm.groupby("threshold")
                for column in ("correct", "tokens", "forwards")
            ]
            for arm, of_arm in rows.groupby("arm", observed=True)
        }
        size = rows.uid.nunique()
        level, found = as_accurate(arms, np.arange(3), np.arange(size))
        drawn = [
            as_accurate(arms, generator.integers(3, size=3), generator.integers(size, size=size))[1]
            for _ in range(2000)
        ]
        own = found.pop(PIPELINE)
        for arm, tokens in found.items():
            low, high = np.quantile([one[PIPELINE] / one[arm] for one in drawn], (0.025, 0.975))
            ratio = f"{own / tokens:.2f} [{low:.2f}, {high:.2f}]"
            lines.append([task, f"{100 * level:.1f} @ {own:.2f}", arm, f"{tokens:.2f}", ratio])
    return table(lines)


def as_accurate(
    arms: dict[str, list[Any]], seeds: Any, problems: Any
) -> tuple[float, dict[str, float]]:
    """Returns the pipeline's accuracy at threshold 0.9, and tokens a forward of all at it.

    Others are interpolated between their thresholds; one that is never as accurate has those of its
    most accurate threshold.
    """
    curves = {}
    for arm, arrays in arms.items():
        means = [one[seeds % len(one)][:, problems].mean() for one in arrays]
        curves[arm] = np.maximum.accumulate(means[::3]), np.divide(means[1::3], means[2::3])
    at = THRESHOLDS.index(0.9)
    level = float(curves[PIPELINE][0][at])
    found = {arm: float(np.interp(level, *curve)) for arm, curve in curves.items()}
    return level, {**found, PIPELINE: float(curves[PIPELINE][1][at])}


def shown(rows: pd.DataFrame) -> str:
    """Returns accuracy with its error over seeds and problems, and tokens a forward behind @."""
    right = rows.pivot(index="seed", columns="uid", values="correct").to_numpy(float)
    return f"{points(right, sign='')} @ {rows.tokens.sum() / rows.forwards.sum():.2f}"


if __name__ == "__main__":
    main()
