"""D2F on the embedded model: tokens a forward of its pipeline, against blocks with a cache.

For each seed, ``exp/d2f_tiny`` trains a student of ``tiny``. It decodes a pipeline of blocks of 8
with the exact cache (``pipeline``), and the same blocks one after the other (``blocks``). The model
that it comes from decodes these blocks with full attention and a dual or prefix cache. All commit
at a threshold, and rows end with their text.

    python experiments/d2f.py --out runs/d2f  # makes what is missing
    python experiments/d2f.py                 # prints the table of the kept results

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
    """Makes what is missing, then prints the table."""
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
    """Returns a table of per cent right and tokens a forward."""
    lines: list[Sequence[str]] = [["task", "model, window", *(str(one) for one in THRESHOLDS)]]
    frame = decodes.to_pandas()
    for (task, arm), rows in frame.groupby(["task", "arm"], observed=True):
        cells = [shown(rows[np.isclose(rows.threshold, one)]) for one in THRESHOLDS]
        lines.append([task, arm, *cells])
    return table(lines)


def shown(rows: pd.DataFrame) -> str:
    """Returns accuracy with its error over seeds and problems, and tokens a forward behind @."""
    right = rows.pivot(index="seed", columns="uid", values="correct").to_numpy(float)
    return f"{points(right, sign='')} @ {rows.tokens.sum() / rows.forwards.sum():.2f}"


if __name__ == "__main__":
    main()
