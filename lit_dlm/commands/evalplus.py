"""``lit-dlm evalplus``: benchmark results as samples of EvalPlus (arXiv 2305.01210)."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.system.files import write_atomically

logger = logging.getLogger(__name__)

DATASETS = {"humaneval": "HumanEval", "humaneval+": "HumanEval", "mbpp": "Mbpp", "mbpp+": "Mbpp"}
"""Tasks whose results can become samples, and how EvalPlus names their problems."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm evalplus",
        description="Writes the answers of a benchmark to HumanEval(+) and MBPP(+) as samples that "
        "'evalplus.evaluate --samples' takes: one file per task and method. Nothing is run.",
    )
    parser.add_argument("run_dir", type=Path, help="run folder of 'lit-dlm predict'")
    parser.add_argument("--out", type=Path, help="receives the files; RUN_DIR/evalplus by default")
    options = parser.parse_args(arguments)
    results = ResultFolder(options.run_dir / "results")
    pairs = [(task, method) for task, method in results.pairs() if task in DATASETS]
    if not pairs:
        raise ValueError(
            f"{options.run_dir}: expected results of {', '.join(DATASETS)}, there are none"
        )
    for task, method in pairs:
        path = (options.out or options.run_dir / "evalplus") / f"{task}-{method}.jsonl"
        rows = results.rows(task, method)
        write_atomically(path, samples(rows))
        logger.info("%s: %d samples", path, len(rows))
    return 0


def samples(rows: Iterable[ResultRow]) -> str:
    """Returns lines of a ``samples.jsonl``; without code an empty module, as EvalPlus needs one."""
    lines = []
    for row in rows:
        number = int(row.prompt_uid.rpartition("/")[2])
        line = {"task_id": f"{DATASETS[row.task]}/{number}", "solution": row.answer or ""}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)
