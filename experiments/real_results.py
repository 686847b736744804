"""Results of ``real_model.py``: one row per decode, facts about the runs, tables and figure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from chain import between, standard_error, table
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lit_dlm.reports.plots import Theme, common_legend, method_styles, save_themes, tidy_axes
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.reports.summary import wilson_interval
from lit_dlm.system.files import write_atomically

Point = tuple[NDArray[Any], NDArray[Any]]
"""Forwards and verdicts of a method, both ``(runs, problems)``."""
NAME = "real_model.parquet"
SCHEMA = pa.schema(
    {
        **dict.fromkeys(("model", "task", "method"), pa.dictionary(pa.int16(), pa.string())),
        "uid": pa.string(),
        "correct": pa.bool_(),
        "forwards": pa.int16(),
        "seconds": pa.float32(),
    }
)
"""One row for each decode of a test list."""
RULES = ("confidence", "credit", "eb-sampler", "factor", "sequential", "threshold")
"""How names of methods begin that are not learned."""
PAIRS = (
    *(("sft", "block"), ("tabom", "block"), ("sft", "tabom")),
    *(("rl-trace", "block"), ("rl-random", "block"), ("rl-trace", "rl-random")),
    *(("on-policy", "block"), ("further", "block"), ("further", "on-policy")),
)
"""Models whose difference is shown."""
TESTED = "tested"
"""File that marks the folder of a model whose decodes are complete."""


def decodes(folder: Path, pattern: str) -> Iterator[tuple[Path, str, str, list[ResultRow]]]:
    """Yields the results below a folder, with their place, task and method."""
    for place in sorted(folder.glob(pattern)):
        found = ResultFolder(place / "results")
        for task, method in found.pairs():
            yield place, task, method, found.rows(task, method)


def read(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    """Returns the decodes and the facts of a results file."""
    try:
        return pq.read_table(path), json.loads(path.with_suffix(".json").read_text())
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        message = f"--results: {path}: expected results of this experiment, got {error!r}"
        raise SystemExit(message) from None


def models(path: Path, sizes: Mapping[str, int]) -> set[str]:
    """Returns the models in a results file, which must come from a run of the same sizes."""
    if not path.exists():
        return set()
    decoded, facts = read(path)
    for name, value in sizes.items():
        if (wanted := facts["sizes"].get(name)) != value:
            raise SystemExit(f"--{name}: expected {wanted}, as {path} has it, got {value}")
    return set(decoded["model"].unique().to_pylist())


def collect(out: Path, path: Path, sizes: Mapping[str, int]) -> None:
    """Writes the decodes of tested models, and beside them validations, costs and digests.

    What the file holds for models that are not in this run stays.
    """
    rows = [
        (place.name, task, method, row.uid, row.correct, row.nfe, row.seconds)
        for place, task, method, found in decodes(out, "*")
        for row in found
        if (place / TESTED).exists()
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    arrays = [pa.array(list(c), type=f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    decoded = pa.table(arrays, schema=SCHEMA)
    costs: dict[str, Counter[str]] = {}
    lines = out / "costs.jsonl"
    for line in map(json.loads, lines.read_text().splitlines() if lines.exists() else ()):
        costs.setdefault(line.pop("command"), Counter()).update(line)
    curves = [
        (
            place.parent.name,
            int(place.name),
            sum(row.correct for row in found) / len(found),
            sum(row.nfe for row in found) / len(found),
        )
        for place, _, _, found in decodes(out / "adapt", "*/*")
    ]
    kept = sorted((out / "kept").glob("*/sha256"))
    digests = {one.parent.name: one.read_text().strip() for one in kept}
    facts: dict[str, Any] = {"curves": curves, "costs": costs, "sha256": digests, "sizes": sizes}
    if path.exists():
        others, known = read(path)
        old, new = (rows["model"].cast(pa.string()) for rows in (others, decoded))
        others = others.filter(pc.invert(pc.is_in(old, new.unique())))
        decoded = pa.concat_tables([others, decoded]).unify_dictionaries()
        redone = {name for name, *_ in curves}
        facts["curves"] += [curve for curve in known["curves"] if curve[0] not in redone]
        facts |= {name: known[name] | facts[name] for name in ("costs", "sha256")}
    facts["curves"].sort()
    draft = path.with_suffix(".draft")
    pq.write_table(decoded, draft, compression="zstd")
    write_atomically(path.with_suffix(".json"), json.dumps(facts, indent=1) + "\n")
    draft.replace(path)


def report(path: Path) -> None:
    """Prints the tables and draws the figure of a results file."""
    decoded, facts = read(path)
    frame = decoded.to_pandas()
    print(tables(frame, facts))
    curves = [curve for curve in facts["curves"] if "rows" not in curve[0]]
    save_themes(path.with_suffix(".png"), partial(drawn, frame, curves))


def drawn(frame: Any, curves: Sequence[Sequence[Any]], theme: Theme) -> Figure:
    """Draws accuracy against forwards, and validations of the conversions against updates.

    There is a line for each model and family of methods; ``curves`` are those of the facts.
    """
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    axis, side = figure.subplots(1, 2, width_ratios=[3, 1])
    frame = frame[frame.method != "uncached_0.9"]
    models = frame.model.astype(str).str.replace(r"-s\d+$", "", regex=True)
    keys = [models, frame.method.astype(str).str.partition("_")[0]]
    groups = list(frame.groupby(keys))
    names = [family if model == "block" else f"{family}, {model}" for (model, family), _ in groups]
    for name, (_, part), style in zip(names, groups, method_styles(names, theme), strict=True):
        points = part.groupby("method", observed=True)[["forwards", "correct"]].mean()
        points = points.sort_values("forwards")
        axis.plot(points.forwards, 100 * points.correct, label=name, markersize=5, **style)
    axis.set(xlabel="forwards", ylabel="right, %", xscale="log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    for name in dict.fromkeys(name for name, *_ in curves):
        updates, shares = zip(*[curve[1:3] for curve in curves if curve[0] == name], strict=True)
        right = [100 * share for share in shares]
        side.plot(updates, right, color=theme.text, marker="o", markersize=4)
        side.annotate(name, (updates[-1], right[-1]), (0, 6), textcoords="offset points")
    side.set(xlabel="updates", ylabel="right of the validation, %", ylim=(-3, 100))
    side.margins(x=0.25)
    for panel in (axis, side):
        tidy_axes(panel)
    common_legend(figure, 4)
    return figure


def verdicts(part: Any) -> Point:
    """Returns forwards and verdicts of one method, ``(runs, problems)``."""
    columns = part.sort_values(["run", "uid"])[["forwards", "correct"]].to_numpy(float)
    forwards, correct = columns.reshape(part.run.nunique(), -1, 2).transpose(2, 0, 1)
    return forwards, correct


def fastest_best(points: Iterable[Point]) -> list[Point]:
    """Returns the methods to which no other is superior in accuracy and in forwards."""
    front: list[Point] = []
    for point in sorted(points, key=lambda one: float(one[0].mean())):
        if not front or point[1].mean() > front[-1][1].mean():
            front.append(point)
    return front


def over(front: Sequence[Point], one: Point) -> str:
    """Formats points over a front at equal forwards.

    What is faster than the whole front is compared with the fastest of it.
    """
    there = between(front, max(float(one[0].mean()), float(front[0][0].mean())))
    return "" if there is None else difference(one[1], there)


def difference(one: NDArray[Any], other: NDArray[Any]) -> str:
    """Formats a difference in points, paired by problem and by run, with a 95 % interval."""
    gain = one - other
    middle, error = 100 * gain.mean(), 196 * standard_error(gain)
    return f"{middle:+.1f} [{middle - error:+.1f}, {middle + error:+.1f}]"


def tables(frame: Any, facts: Mapping[str, Any]) -> str:
    """Returns Markdown of accuracies with intervals, differences, validations and costs."""
    lines: list[Sequence[str]] = [
        ["model", "method", "right, % [95 %]", "forwards", "over the rules [95 %]"]
    ]
    frame = frame.assign(run=frame.model.astype(str))
    frame["model"] = frame.run.str.replace(r"-s\d+$", "", regex=True)
    points = {
        key: verdicts(part) for key, part in frame.groupby(["model", "method"], observed=True)
    }
    rules = [key for key in points if key[0] == "block" and key[1].startswith(RULES)]
    front = fastest_best(points[key] for key in rules)
    for key, (forwards, correct) in points.items():
        share = correct.mean()
        low, high = (100 * end for end in wilson_interval(share, correct.shape[1]))
        right = f"{100 * share:.1f} [{low:.1f}, {high:.1f}]"
        more = "" if key in rules or not front else over(front, (forwards, correct))
        lines.append([*key, right, f"{forwards.mean():.1f}", more])
    pairs: list[Sequence[str]] = [["pair", "method", "difference [95 %]"]]
    for one, other in PAIRS:
        for method in ("threshold_0.7", "threshold_0.9"):
            if {(one, method), (other, method)} <= points.keys():
                interval = difference(points[one, method][1], points[other, method][1])
                pairs.append([f"{one} - {other}", method, interval])
    curves: list[Sequence[str]] = [["model", "updates", "right, %", "forwards"]]
    curves += [[name, f"{n:,}", f"{100 * r:.0f}", f"{f:.1f}"] for name, n, r, f in facts["curves"]]
    costs: list[Sequence[str]] = [["command", "thousand cells", "minutes", "cells a CPU second"]]
    for name, cost in facts["costs"].items():
        rate = cost["cells"] / max(cost["cpu_seconds"], 1e-9)
        sizes = f"{cost['cells'] / 1000:,.0f}", f"{cost['seconds'] / 60:.1f}", f"{rate:,.0f}"
        costs.append([name, *sizes])
    return "\n".join(map(table, (lines, pairs, curves, costs)))
