"""Offline reinforcement learning: rollouts that another engine has written to files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_dlm.finetuning.trainable import TrainableModule
from lit_dlm.rl.engine import Problem, RolloutEngine, RolloutPrompt
from lit_dlm.system.json_lines import json_object, numbered_lines
from lit_dlm.system.options import refuse
from lit_dlm.trajectories.record import Trajectory, expect
from lit_dlm.trajectories.rows import ImportSettings, checked_row, ids_of, located, required

_BY_BLOCK = ("dllm_replay_step_maps", "step_maps")  # SGLang counts steps anew in each block
_FIELDS = {
    "response_ids": ("dllm_replay_token_ids", "response_ids", "output_ids", "token_ids", "tokens"),
    "step_map": (_BY_BLOCK[0], "step_map", _BY_BLOCK[1], "first_unmask_times", "steps"),
}
"""dLLM-RL's name of a field, and what SGLang, JetEngine, LMDeploy and our server call it; the first
one that a row has is taken."""


class RolloutFiles(RolloutEngine):
    """Takes responses from files with a JSON object in each line: what an engine answered.

    A row says which prompt it answers, by ``uid`` (of the problem), ``prompt_ids`` or ``prompt``
    (the text with its template). The fields are those of dLLM-RL's data (``response_ids`` or
    ``response``, ``step_map``; arXiv:2509.06949), JetEngine (``token_ids``,
    ``first_unmask_times``), LMDeploy (``token_ids``, ``step_map``), SGLang (``output_ids`` and, in
    ``meta_info``, ``step_maps``, or the ``dllm_replay_*`` of whole blocks), or a choice of
    ``lit-dlm serve`` (``trajectory``). Prompts without an answer are not drawn; each RL step takes
    the first ``responses_per_prompt`` of the others.

    Args:
        paths: the files.
    """

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self._found: dict[str, list[Trajectory]] = {}  # by the problem's uid

    def answerable(
        self, problems: Sequence[Problem], module: TrainableModule, *, size: int, length: int
    ) -> list[Problem]:
        """Reads the files."""
        known: dict[Any, Problem] = {tuple(one[1]): one for one in problems}
        known |= {one[0].uid: one for one in problems}
        backbone, settings = module.backbone, ImportSettings(tokenizer=module.tokenizer)
        self._found.clear()
        lines = ((path, *line) for path in self.paths for line in numbered_lines(Path(path)))
        for path, number, line in lines:
            with located(f"{path}:{number}"):
                row = checked_row(_plain(json.loads(line)), settings)
                named = row.get("uid") or tuple(ids_of(row, "prompt_ids", "user").tolist())
                wanted = "that of a prompt of data.tasks with at most max_prompt_length tokens"
                expect(named in known, f"uid, prompt_ids or prompt: expected {wanted}, got {named}")
                example, ids = known[named]
                steps = required(row, "step_map").tolist()
                block = backbone.spec.block_size
                if block and any(one in row for one in _BY_BLOCK):
                    steps = counted_on(steps, block, len(ids) % block)
                tokens = ids_of(row, "response_ids", "assistant").tolist()
                facts: dict[str, Any] = {"uid": example.uid, "meta": {}, "response_length": length}
                asked = RolloutPrompt(example=example, prompt_ids=ids, **facts)
                record = asked.record(backbone, tokens, steps, row.get("log_probs"))
            self._found.setdefault(example.uid, []).append(record)
        counts = {uid: len(found) for uid, found in self._found.items()}
        if (least := min(counts.values(), default=0)) < size:
            wanted = f"at most {least}, as {', '.join(self.paths)} have for a prompt"
            refuse("data.responses_per_prompt", wanted, size)
        return [one for one in problems if one[0].uid in counts]

    def records(
        self, prompts: Sequence[RolloutPrompt], module: TrainableModule
    ) -> list[Trajectory]:
        return [
            replace(self._found[one.example.uid][one.meta["response"]], uid=one.uid)
            for one in prompts
        ]


def _plain(stored: Any) -> dict[str, Any]:
    """Returns a row with the fields ``response_ids`` and ``step_map``, whatever engine wrote it."""
    row = json_object("row", stored)
    for name in ("meta_info", "trajectory"):
        row = {**row, **json_object(name, row.get(name) or {})}
    for name, others in _FIELDS.items():
        row[name] = next((row[one] for one in others if row.get(one) is not None), None)
    if isinstance(row["step_map"], list):
        row["step_map"] = [-1 if one is None else one for one in row["step_map"]]
    return row


def counted_on(steps: Sequence[int], size: int, held: int) -> list[int]:
    """Returns steps that begin anew, from 1, in each block of ``size`` as steps of the whole."""
    # The prompt has the first ``held`` cells of the first block.
    found: list[int] = []
    for begin in range(-held, len(steps), size):
        before = max(found, default=0)
        found += [before + step for step in steps[max(begin, 0) : begin + size]]
    return found
