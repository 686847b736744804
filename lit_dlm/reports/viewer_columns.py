"""What the viewer page knows about a sample, as compact JSON.

Long columns are base64 of little-endian arrays, decoded by the page when it first shows a sample:

===========  ===========  =============================================================
key          type         content
===========  ===========  =============================================================
``prompt``   token        prompt tokens
``tokens``   token        response after the last step
``commit``   u16          step of the last write, 65535 where no step wrote
``signals``  f16 each     values per response position, NaN where there is none
``seen``     token        proposal at every masked position of every step, by step
``sure``     u8           probability of that proposal in 1/254, 255 where unknown
``frames``   u8 each      drawn picture, square RGB, after no step and after each
===========  ===========  =============================================================

``token`` is u16 or u32 and indexes the page's table of tokens, which holds only what occurs.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.reports.pieces import TokenPieces
from lit_dlm.reports.regions import regions_of
from lit_dlm.reports.samples import Sample
from lit_dlm.trajectories.record import Trajectory

META_SIGNALS = ("value", "advantage", "token_rewards")
"""Entries of a record's ``meta`` that hold a number (or null) per response position, from the first
on; a shorter list leaves the others without one."""
MAX_SIDE = 64
"""Pixels on each side of a drawn picture in the page; larger ones are made smaller."""
NEVER = 0xFFFF
"""Commit step of a position that no step wrote."""


class TokenTable:
    """The tokens that occur in a set of samples, with their texts."""

    def __init__(self, pieces: TokenPieces, records: Iterable[Trajectory]) -> None:
        self.pieces = pieces
        parts: list[NDArray[Any]] = []
        for record in records:
            parts += [record.prompt_ids, record.tokens, np.array([record.mask_id], dtype=np.int32)]
            if record.superseded is not None:
                parts.append(record.superseded[:, 2])
            if "step_proposal" in record.signals:
                parts.append(record.signals["step_proposal"])
        self.ids = np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int32)
        self._dtype = "<u2" if len(self.ids) <= NEVER else "<u4"

    def encode(self, ids: NDArray[Any]) -> str:
        return _packed(np.searchsorted(self.ids, ids), self._dtype)

    def index(self, token: int) -> int:
        return int(np.searchsorted(self.ids, token))

    def as_json(self) -> dict[str, Any]:
        """The table: ids, texts, and rows of special tokens and of parts of characters."""
        ids = self.ids.tolist()
        return {
            "ids": ids,
            "texts": [self.pieces.text(token) for token in ids],
            "special": [row for row, token in enumerate(ids) if self.pieces.is_special(token)],
            "partial": [row for row, token in enumerate(ids) if self.pieces.is_partial(token)],
            "wide": self._dtype == "<u4",
        }


def sample_columns(
    sample: Sample,
    table: TokenTable,
    *,
    method: Mapping[str, Any] | None,
    number: int,
    proposals: bool,
) -> dict[str, Any]:
    """A sample as a JSON object; keys whose value says nothing are left out.

    ``number`` is that of its set in the page; with ``proposals`` it also has what was proposed at
    every step.
    """
    record = sample.record
    content: dict[str, Any] = {
        "set": number,
        "uid": record.uid,
        "example": sample.example,
        "task": sample.task,
        "method": sample.method,
        "correct": sample.correct,
        "verdict": sample.verdict,
        "detail": sample.detail,
        "answer": sample.answer,
        "status": record.status,
        "steps": record.num_steps,
        "mask": table.index(record.mask_id),
        "prompt": table.encode(record.prompt_ids),
        "tokens": table.encode(record.tokens),
        "commit": _packed(np.where(record.commit_step < 0, NEVER, record.commit_step), "<u2"),
        "joined": table.pieces.joined(record.tokens.tolist()),
        "prompt_joined": table.pieces.joined(record.prompt_ids.tolist()),
        "signals": {
            name: _packed(values, "<f2") for name, values in position_signals(record).items()
        },
        "regions": [[part.name, part.start, part.end] for part in regions_of(record, method)],
    }
    if drawn := table.pieces.drawn(record):
        from PIL import Image

        side = min(drawn[0].width, MAX_SIDE)
        content["frames"] = [
            _packed(np.array(one.resize((side, side), Image.Resampling.BOX)), "u1") for one in drawn
        ]
    if isinstance(record.meta.get("reward"), (int, float)):
        content["reward"] = record.meta["reward"]
    if record.given is not None:
        content["given"] = np.flatnonzero(record.given).tolist()
    if record.superseded is not None:
        content["early"] = [
            [step, position, table.index(token)]
            for step, position, token in record.superseded.tolist()
        ]
    if proposals and "step_proposal" in record.signals:
        content["seen"] = table.encode(record.signals["step_proposal"])
        if "step_prob" in record.signals:
            prob = record.signals["step_prob"].astype(np.float32)
            scaled = np.where(np.isnan(prob), 255, np.rint(np.clip(prob, 0, 1) * 254))
            content["sure"] = _packed(scaled, "u1")
    return {key: value for key, value in content.items() if value not in ("", None, [], {})}


def position_signals(record: Trajectory) -> dict[str, NDArray[np.float32]]:
    """What was recorded about every response position: ``(G,)`` float32, NaN without a value.

    ``confidence`` (probability of the written token), ``entropy`` (nats, before the step that
    wrote), ``margin`` (lead over the best candidate that was passed over, in the policy's own
    score), ``policy_score`` (that score), ``log_prob``, ``value`` and ``advantage`` (of training),
    and what the record's ``meta`` has of :data:`META_SIGNALS`.
    """
    found: dict[str, NDArray[np.float32]] = {}
    for name, source in (
        ("confidence", "commit_prob"),
        ("margin", "commit_margin"),
        ("policy_score", "commit_score"),
        ("log_prob", "commit_log_prob"),
        ("value", "commit_value"),
        ("advantage", "commit_advantage"),
    ):
        if source in record.signals:
            found[name] = record.signals[source].astype(np.float32)
    if "step_entropy" in record.signals:
        found["entropy"] = _at_commit(record, record.signals["step_entropy"])
    for name in META_SIGNALS:
        if name in record.meta:
            found[name] = _of_meta(record, name)
    return found


def _at_commit(record: Trajectory, values: NDArray[Any]) -> NDArray[np.float32]:
    """Of values per (step, masked position) those of the step that wrote each position."""
    step, position = record.masked_rows().T
    out = np.full(record.num_generated, np.nan, dtype=np.float32)
    last = record.commit_step[position] == step
    out[position[last]] = values[last]
    return out


def _of_meta(record: Trajectory, name: str) -> NDArray[np.float32]:
    values = record.meta[name]
    fits = isinstance(values, list) and len(values) <= record.num_generated
    if not fits or not all(value is None or isinstance(value, (int, float)) for value in values):
        got = f"a list of {len(values)}" if isinstance(values, list) else repr(values)
        raise ValueError(
            f"trajectory {record.uid!r}: meta '{name}' must be a list of up to "
            f"{record.num_generated} numbers or nulls, got {got}"
        )
    out = np.full(record.num_generated, np.nan, dtype=np.float32)
    out[: len(values)] = [math.nan if value is None else value for value in values]
    return out


def num_proposals(samples: Sequence[Sample]) -> int:
    """How many (step, position) proposals the records hold."""
    return sum(len(sample.record.signals.get("step_proposal", ())) for sample in samples)


def _packed(values: Any, dtype: str) -> str:
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()
