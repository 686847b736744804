"""Keeps all decodes of benchmarks in one file, and prints a docs page's tables from it.

file=docs/results/lockstep/lockstep.parquet
python experiments/kept_decodes.py $file runs/lockstep/results  # keeps decodes
python experiments/kept_decodes.py $file                        # prints the tables
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from chain import table

from lit_dlm.reports.results import ResultFolder

SCHEMA = pa.schema(
    {
        **dict.fromkeys(("task", "method"), pa.dictionary(pa.int16(), pa.string())),
        "uid": pa.string(),
        "correct": pa.bool_(),
        "forwards": pa.int16(),
        "lockstep": pa.float32(),  # of decoders with a layout
    }
)
"""One row for each decode."""


def main() -> None:
    """Keeps the result folders, if any are given, then prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the kept file")
    parser.add_argument("results", nargs="*", type=Path, help="folders of results to keep in it")
    options = parser.parse_args()
    if options.results:
        pq.write_table(collected(options.results), options.path, compression="zstd")
    print(markdown(pq.read_table(options.path)))


def collected(folders: Sequence[Path]) -> pa.Table:
    """Returns the rows of result folders."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for results in map(ResultFolder, folders):
        for task, method in results.pairs():
            for row in results.rows(task, method):
                values = (task, method, row.uid, row.correct, row.nfe, row.lockstep)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
    return pa.table(columns, schema=SCHEMA)


def markdown(decodes: pa.Table) -> str:
    """Returns tables of accuracies in per cent, with forwards in brackets, by family of methods.

    Families swept over the same values share a table; methods outside a family are listed with
    standard errors and mean lockstep scores.
    """
    points: dict[tuple[str, str], dict[str, str]] = {}
    single: list[Sequence[str]] = [["task", "method", "right", "forwards", "lockstep score"]]
    for (task, method), rows in decodes.to_pandas().groupby(["task", "method"], observed=True):
        rate, forwards = rows.correct.mean(), rows.forwards.mean()
        name, _, value = method.rpartition("_")
        if not value.isdigit():
            error = (rate * (1 - rate) / len(rows)) ** 0.5
            shown = f"{100 * rate:.1f} ± {100 * error:.1f}"
            score = "" if rows.lockstep.isna().all() else f"{rows.lockstep.mean():.2f}"
            single.append([task, method, shown, f"{forwards:.1f}", score])
        else:
            value = f"0.{value[1:]}" if value.startswith("0") else value
            points.setdefault((task, name), {})[value] = f"{100 * rate:.1f} ({forwards:.1f})"
    tables: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for (task, name), cells in points.items():
        cells = dict(sorted(cells.items(), key=lambda cell: float(cell[0])))
        lines = tables.setdefault(tuple(cells), [["task", "method", *cells]])
        lines.append([task, name, *cells.values()])
    return "\n".join(map(table, [*tables.values(), *([single] if len(single) > 1 else [])]))


if __name__ == "__main__":
    main()
