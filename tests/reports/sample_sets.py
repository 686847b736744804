"""Small sets of decodes with results, for tests of reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_dlm.backbones.resolution import load_tokenizer
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.samples import Sample
from lit_dlm.trajectories import Trajectory
from lit_dlm.trajectories.store import merge_manifest
from tests.reports.rows import row
from tests.traces import write_shards

MASK, EOS = 2, 1


class WordTokenizer:
    """Words of a fixed list as tokens; like transformers' tokenizers as far as reports ask."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = ["<pad>", "<end>", "<mask>", *words]
        self.all_special_ids = [0, EOS, MASK]

    def __len__(self) -> int:
        return len(self.words)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self.words[token] for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.words[token]


def tiny_pieces() -> TokenPieces:
    return TokenPieces(load_tokenizer("tiny"))


def ids_of(text: str) -> list[int]:
    return list(load_tokenizer("tiny")(text)["input_ids"])


def record(
    tokens: Sequence[int],
    commit_step: Sequence[int],
    *,
    uid: str = "t/test/0@m",
    prompt: Sequence[int] = (5, 6, 7),
    num_steps: int | None = None,
    vocab_size: int = 4096,
    **fields: Any,
) -> Trajectory:
    """A record of few tokens; complete unless it holds masks."""
    found = Trajectory(
        uid=uid,
        prompt_ids=np.array(prompt),
        tokens=np.array(tokens),
        commit_step=np.array(commit_step),
        num_steps=max(commit_step, default=-1) + 1 if num_steps is None else num_steps,
        mask_id=MASK,
        vocab_size=vocab_size,
        **{"status": "step_limit" if MASK in tokens else "complete", **fields},
    )
    found.validate()
    return found


def sample(found: Trajectory, **fields: Any) -> Sample:
    example, _, method = found.uid.rpartition("@")
    facts: dict[str, Any] = {"example": example, "task": "t", "method": method, "correct": None}
    return Sample(record=found, **{**facts, **fields})


def write_set(
    folder: Path,
    records: Sequence[Trajectory],
    *,
    tokenizer: str = "tiny",
    methods: dict[str, Any] | None = None,
    records_per_block: int = 4,
) -> Path:
    run = {"tokenizer": {"path": tokenizer}, "decode": {"methods": methods or {}}}
    write_shards(folder, records, records_per_block=records_per_block, split="test", **run)
    merge_manifest(folder)
    return folder


def write_run(folder: Path, records: Sequence[Trajectory], **options: Any) -> Path:
    """A benchmark run: trajectories, and a result line for each; odd numbers are wrong."""
    write_set(folder / "trajectories", records, **options)
    results = ResultFolder(folder / "results")
    for number, one in enumerate(records):
        example, _, method = one.uid.rpartition("@")
        task = example.partition("/")[0]
        results.claim(task, method, {"decoder": method})
        named = {"set": "trajectories", "uid": one.uid, "digest": one.digest().hex()}
        wrong = {"correct": False, "verdict": "wrong", "detail": "expected 4"}
        results.append(
            [
                row(
                    example,
                    task=task,
                    method=method,
                    nfe=one.num_steps,
                    answer=f"a{number}",
                    trajectory=named,
                    **(wrong if number % 2 else {}),
                )
            ]
        )
    return folder
