"""Random records for tests, made from histories so that the truth is known at every step."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories import StepFeatures, Trajectory
from lit_dlm.trajectories.record import derive
from lit_dlm.trajectories.store import RunRecord, TrajectoryShardWriter

MASK, VOCAB = 9, 50


def random_history(
    rng: np.random.Generator,
    *,
    num_generated: int,
    num_steps: int,
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


def from_history(history: Any, *, prompt_ids: Any, mask_id: int, **fields: Any) -> Trajectory:
    """The record of the ``(T + 1, G)`` canvases of a decode; tokens of row 0 count as given."""
    rows = np.ascontiguousarray(history, dtype=np.int32)
    num_steps = len(rows) - 1
    tokens, commit_step, superseded = derive(rows[0], rows[1:])
    record = Trajectory(
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        tokens=tokens,
        commit_step=commit_step,
        num_steps=num_steps,
        mask_id=mask_id,
        given=rows[0] != mask_id,
        superseded=superseded,
        **fields,
    )
    record.validate()
    return record


def random_record(
    rng: np.random.Generator,
    uid: str = "task/split/0",
    *,
    num_prompt: int = 5,
    num_generated: int = 12,
    num_steps: int = 7,
    remask: float = 0.0,
    given: float = 0.0,
    fill: float = 1.0,
    signals: bool = False,
    features: bool = False,
) -> Trajectory:
    """A valid record."""
    history = random_history(
        rng,
        num_generated=num_generated,
        num_steps=num_steps,
        remask=remask,
        given=given,
        fill=fill,
    )
    status = "complete" if (history[-1] != MASK).all() else "step_limit"
    record = from_history(
        history,
        uid=uid,
        prompt_ids=_token(rng, num_prompt),
        mask_id=MASK,
        vocab_size=VOCAB,
        seed=int(rng.integers(2**63)),
        status=status,
        meta={"source": "test", "nested": [1, 2.5, None, "ü"]},
        features=random_features(rng, num_generated, num_steps) if features else None,
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
    assert (a.uid, a.num_steps, a.mask_id, a.vocab_size) == (
        b.uid,
        b.num_steps,
        b.mask_id,
        b.vocab_size,
    )
    assert (a.seed, a.status, a.meta) == (b.seed, b.status, b.meta)
    for name in ("prompt_ids", "tokens", "commit_step", "given", "superseded"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype, name
            np.testing.assert_array_equal(left, right, err_msg=name)
    assert a.signals.keys() == b.signals.keys()
    for name in a.signals:
        assert a.signals[name].dtype == b.signals[name].dtype
        np.testing.assert_array_equal(a.signals[name], b.signals[name], err_msg=name)
    assert (a.features is None) == (b.features is None)
    if a.features is not None and b.features is not None:
        for name in ("kept_steps", "features", "scales", "proposals"):
            np.testing.assert_array_equal(getattr(a.features, name), getattr(b.features, name))
        for name in ("groups", "layout", "projector_digest", "scheme"):
            assert getattr(a.features, name) == getattr(b.features, name)


def _token(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Tokens other than the mask."""
    tokens = rng.integers(0, VOCAB - 1, count)
    return np.where(tokens >= MASK, tokens + 1, tokens).astype(np.int32)


def run_record(**changes) -> RunRecord:
    values = {
        "model": {"id": "tiny", "layers": 2},
        "tokenizer": {"id": "bytes"},
        "decode": {"temperature": 0.0, "policy": {"name": "entropy"}},
        "randomness": {"seed": 1},
        "data": {"tasks": ["a"]},
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


def in_child(action: Callable[[], object]) -> None:
    """Runs something in a forked process, which ends without tidying up."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def write_shards(folder: Path, records: Iterable[Trajectory], **options) -> None:
    with shard_writer(folder, **options) as shards:
        for record in records:
            shards.put(record)
