"""A second opinion on answers from a language model behind an HTTP endpoint.

It is stored separately, for comparison with published numbers that were judged: every table reports
the accuracy by exact match.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dlm.reports.results import ResultFolder, ResultRow, drop_torn_line
from lit_dlm.rewards.chat import ChatEndpoint
from lit_dlm.system.files import write_json
from lit_dlm.system.options import at_least, one_of
from lit_dlm.tasks import PromptExample

logger = logging.getLogger(__name__)

_MAX_TOKENS = 64  # of a reply
_INSTRUCTION = (
    "You compare a candidate's final answer with a reference solution. Judge the final "
    "result only, not the way there, and do not solve the problem yourself. Reply with one JSON "
    'object and nothing else: {"verdict": "correct"} or {"verdict": "incorrect"}.'
)


class HttpJudge(Callback):
    """Asks a judge about every result of some tasks, once the run's results are complete.

    Verdicts are appended to ``{run_dir}/judge/{task}/{method}.jsonl`` and reused by a run with the
    same completions; ``{run_dir}/judge/summary.json`` holds the share that is judged correct. A
    reply that is not a verdict counts as a failure and not in the denominator, as in the TraceLock
    release. List the callback after ``DecodeWriter``.

    Args:
        run_dir: folder of the run, which holds ``results``.
        tasks: names of the tasks to judge; their references need a ``solution`` or ``answer``.
        endpoint: options of :class:`~lit_dlm.rewards.chat.ChatEndpoint`.
    """

    writes_files = True

    def __init__(self, run_dir: str, *, tasks: list[str], **endpoint: Any) -> None:
        super().__init__()
        at_least(1, tasks=len(tasks))
        self.run_dir = Path(run_dir)
        self.endpoint = ChatEndpoint(**endpoint)
        self.tasks = tasks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        known = [task.name for task in trainer.datamodule.tasks]  # type: ignore[attr-defined]
        for name in self.tasks:
            one_of(*known, tasks=name)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not trainer.is_global_zero:
            return
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        results = ResultFolder(self.run_dir / "results")
        summary = []
        for task, method in results.pairs():
            if task not in self.tasks:
                continue
            examples = {example.uid: example for example in datamodule.task(task).examples()}
            path = self.run_dir / "judge" / task / f"{method}.jsonl"
            verdicts = self._judged(path, results.rows(task, method), examples)
            judged = [verdict for verdict in verdicts.values() if verdict is not None]
            counts = {"judged": len(judged), "failures": len(verdicts) - len(judged)}
            accuracy = sum(judged) / len(judged) if judged else None
            summary.append({"task": task, "method": method, **counts, "accuracy": accuracy})
        write_json(self.run_dir / "judge" / "summary.json", summary)
        logger.info("judge: %s", self.run_dir / "judge" / "summary.json")

    def _judged(
        self, path: Path, rows: list[ResultRow], examples: dict[str, PromptExample]
    ) -> dict[str, bool | None]:
        """Returns the verdict on every row by uid, from the file or from the judge."""
        stored: dict[str, dict[str, Any]] = {}
        # A killed run may have left half a line, to which the next verdict would be appended.
        drop_torn_line(path)
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            stored = {line["uid"]: line for line in map(json.loads, lines)}
        path.parent.mkdir(parents=True, exist_ok=True)
        verdicts: dict[str, bool | None] = {}
        with path.open("a", encoding="utf-8") as file:
            for row in rows:
                if row.prompt_uid not in examples:
                    continue
                digest = hashlib.sha256(json.dumps(row.completion).encode()).hexdigest()
                result = stored.get(row.uid, {})
                # Judged again if the completion is another, as after a run with other settings.
                if result.get("completion_sha256") != digest:
                    verdict = self.verdict(examples[row.prompt_uid], row.completion)
                    result = {"uid": row.uid, "correct": verdict, "completion_sha256": digest}
                    file.write(json.dumps(result) + "\n")
                    # Each verdict costs a request: none is lost with the process.
                    file.flush()
                verdicts[row.uid] = result["correct"]
        return verdicts

    def verdict(self, example: PromptExample, completion: str) -> bool | None:
        """Whether a completion is judged correct; ``None`` if the reply is not a verdict."""
        reference = example.reference.get("solution") or example.reference.get("answer", "")
        question = (
            f"Question:\n{example.question}\n\nReference solution:\n{reference}\n\n"
            f"Candidate:\n{completion}"
        )
        settings = {"temperature": 0.0, "max_tokens": _MAX_TOKENS}
        return parse_verdict(self.endpoint.ask(_INSTRUCTION, question, **settings))


def parse_verdict(text: str) -> bool | None:
    """Reads ``{"verdict": "correct"}`` or ``"incorrect"``; anything else is ``None``."""
    try:
        return {"correct": True, "incorrect": False}.get(json.loads(text.strip())["verdict"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
