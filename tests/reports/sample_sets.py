"""Small sets of decodes with results, for tests of reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_dlm.backbones.tokenizer import load_tokenizer
from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.samples import Sample, SampleSet
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


def remasked(**fields: Any) -> Trajectory:
    """Place 0: written at 0, masked at 1, written at 3. Place 1 is given. Place 2 stays a mask."""
    return record(
        [8, 9, MASK],
        [3, -1, -1],
        num_steps=4,
        given=np.array([False, True, False]),
        superseded=np.array([[0, 0, 7], [1, 0, MASK]]),
        **fields,
    )


def sample(found: Trajectory, **fields: Any) -> Sample:
    example, _, method = found.uid.rpartition("@")
    facts: dict[str, Any] = {"example": example, "task": "t", "method": method, "correct": None}
    return Sample(record=found, **{**facts, **fields})


def sample_set(samples: list[Sample], **changes: Any) -> SampleSet:
    base = {"label": "s", "source": Path("s"), "shards": [], "methods": {}}
    return SampleSet(samples=samples, **{**base, "num_available": len(samples), **changes})


def write_set(
    folder: Path, records: Sequence[Trajectory], methods: dict[str, Any] | None = None
) -> Path:
    run = {"tokenizer": {"path": "tiny"}, "decode": {"methods": methods or {}}}
    write_shards(folder, records, split="test", **run)
    merge_manifest(folder)
    return folder


def write_run(folder: Path, records: Sequence[Trajectory]) -> Path:
    """A benchmark run: trajectories, and a result line for each; odd numbers are wrong."""
    write_set(folder / "trajectories", records)
    results = ResultFolder(folder / "results")
    for number, one in enumerate(records):
        example, _, method = one.uid.rpartition("@")
        task = example.partition("/")[0]
        results.claim(task, method, {"decoder": method})
        facts: dict[str, Any] = {"task": task, "method": method, "nfe": one.num_steps}
        facts["response"] = int(example.partition("#")[2] or 0)
        digest = one.digest().hex()
        facts["trajectory"] = {"set": "trajectories", "uid": one.uid, "digest": digest}
        if number % 2:
            facts |= {"correct": False, "verdict": "wrong", "detail": "expected 4"}
        results.append([row(example, answer=f"a{number}", **facts)])
    return folder
