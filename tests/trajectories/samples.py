"""Random records for tests, made from histories so that the truth is known at every step."""

import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories import Trajectory
from lit_dlm.trajectories.features import StepFeatures
from lit_dlm.trajectories.record import derive
from lit_dlm.trajectories.store import RunRecord, TrajectoryShardReader, TrajectoryShardWriter

MASK, VOCAB = 9, 50


def random_history(
    rng: np.random.Generator,
    *,
    num_generated: int = 12,
    num_steps: int = 7,
    remask: float = 0.0,
    given: float = 0.0,
    fill: float = 1.0,
) -> NDArray[np.int32]:
    """``(T + 1, G)``: a decode written out step by step, with re-masking and edits."""
    G, T = num_generated, num_steps
    history = np.full((T + 1, G), MASK, dtype=np.int32)
    fixed = rng.random(G) < given
    history[:, fixed] = _token(rng, int(fixed.sum()))
    commit = rng.integers(0, max(T, 1), G)
    never = rng.random(G) > fill
    for t in range(T):
        history[t + 1] = history[t]
        writes = (commit == t) & ~fixed & ~never
        history[t + 1, writes] = _token(rng, int(writes.sum()))
        change = (rng.random(G) < remask) & ~fixed
        history[t + 1, change] = np.where(
            rng.random(int(change.sum())) < 0.5, MASK, _token(rng, int(change.sum()))
        )
    return history


def small_record(tokens: Sequence[int], commit_step: Sequence[int], **changes: Any) -> Trajectory:
    values = {
        "uid": "a",
        "prompt_ids": [3],
        "num_steps": max(commit_step, default=-1) + 1,
        "mask_id": MASK,
        "vocab_size": VOCAB,
    }
    return Trajectory(tokens=tokens, commit_step=commit_step, **{**values, **changes})


def from_history(history: Any, *, prompt_ids: Any, **fields: Any) -> Trajectory:
    """The record of the ``(T + 1, G)`` canvases of a decode; tokens of row 0 count as given."""
    rows = np.ascontiguousarray(history, dtype=np.int32)
    facts = derive(rows[0], rows[1:], fields.get("mask_id", MASK))
    record = small_record(prompt_ids=prompt_ids, **{**facts, **fields})
    record.validate()
    return record


def random_record(
    rng: np.random.Generator,
    uid: str = "task/split/0",
    *,
    num_prompt: int = 5,
    signals: bool = False,
    features: bool = False,
    **shape: Any,
) -> Trajectory:
    """A valid record of a :func:`random_history`."""
    history = random_history(rng, **shape)
    T, G = len(history) - 1, history.shape[1]
    record = from_history(
        history,
        uid=uid,
        prompt_ids=_token(rng, num_prompt),
        seed=int(rng.integers(2**63)),
        status="complete" if (history[-1] != MASK).all() else "step_limit",
        meta={"source": "test", "nested": [1, 2.5, None, "ü"]},
        features=random_features(rng, G, T) if features else None,
    )
    if signals:
        record.signals.update(random_signals(rng, record))
    return record


def random_signals(rng: np.random.Generator, record: Trajectory) -> dict[str, NDArray]:
    G, rows = record.num_generated, len(record.masked_rows())
    return {
        "commit_prob": rng.random(G).astype(np.float16),
        "commit_margin": np.full(G, np.inf, dtype=np.float16),
        "commit_score": rng.normal(size=G).astype(np.float16),
        "commit_log_prob": rng.normal(size=G).astype(np.float32),
        "step_prob": rng.random(rows).astype(np.float16),
        "step_entropy": rng.random(rows).astype(np.float16),
        "step_proposal": _token(rng, rows),
    }


def random_features(
    rng: np.random.Generator, num_generated: int, num_steps: int, *, scheme: str = "int8"
) -> StepFeatures:
    kept = np.arange(0, num_steps, 2)
    return StepFeatures.quantize(
        rng.normal(size=(len(kept), num_generated, 7)).astype(np.float32),
        kept_steps=kept,
        proposals=rng.integers(0, VOCAB, (len(kept), num_generated)),
        groups=(4, 2, 1),
        scheme=scheme,  # type: ignore[arg-type]
        projector_digest="digest",
    )


def assert_same(a: Trajectory, b: Trajectory) -> None:
    """Every field is equal, bit by bit."""
    left, right = _fields(a), _fields(b)
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, np.ndarray):
            assert value.dtype == right[name].dtype, name
            np.testing.assert_array_equal(value, right[name], err_msg=name)
        else:
            assert value == right[name], name


def _fields(record: Trajectory) -> dict[str, Any]:
    fields = {**vars(record), **record.signals}
    del fields["signals"]
    kept = vars(fields.pop("features") or SimpleNamespace())
    return fields | {f"features.{name}": value for name, value in kept.items()}


def assert_all_same(records: Iterable[Trajectory], found: Iterable[Trajectory]) -> None:
    for before, after in zip(records, found, strict=True):
        assert_same(before, after)


def _token(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Tokens other than the mask."""
    tokens = rng.integers(0, VOCAB - 1, count)
    return np.where(tokens >= MASK, tokens + 1, tokens).astype(np.int32)


def run_record(**changes: Any) -> RunRecord:
    values = {
        "model": {"id": "tiny", "layers": 2},
        "tokenizer": {"id": "bytes"},
        "decode": {"temperature": 0.0, "policy": {"name": "entropy"}},
        "randomness": {"seed": 1},
        "data": {"tasks": ["a"]},
        "software": {},  # asking git and the packages takes time
        "hardware": {},
    }
    return RunRecord(**{**values, **changes})


def records_of(count: int, *, start: int = 0, **options) -> list[Trajectory]:
    return [
        random_record(np.random.default_rng(i), f"task/split/{i:04d}", **options)
        for i in range(start, start + count)
    ]


def shard_writer(folder: Path, **options) -> TrajectoryShardWriter:
    defaults = {"name": "demo", "split": "train", "rank": 0, "run": run_record()}
    return TrajectoryShardWriter(folder, **{**defaults, "records_per_block": 4, **options})


def forked(action: Callable[[], object]) -> int:
    """The id of a process that runs something and ends without tidying up."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def in_child(action: Callable[[], object]) -> None:
    assert os.waitpid(forked(action), 0)[1] == 0


def put_all(shards: Any, records: Iterable[Trajectory]) -> None:
    for record in records:
        shards.put(record)


def write_shards(folder: Path, records: Iterable[Trajectory], **options: Any) -> None:
    with shard_writer(folder, **options) as shards:
        put_all(shards, records)


def read_all(folder: Path) -> list[Trajectory]:
    return list(TrajectoryShardReader(folder))


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


class Letters:
    """A tokenizer of one letter per id."""

    def __init__(self, chat_template: str | None = "yy{}z") -> None:
        self.chat_template = chat_template

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def apply_chat_template(self, turns: list[dict], **options: Any) -> Any:
        text = f"yy{turns[0]['content']}z"
        return text if options.get("tokenize") is False else self.encode(text)
