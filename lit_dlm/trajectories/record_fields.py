"""The per-record columns that are not long arrays: uid, seed, status, meta, digests."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.column_io import split_texts
from lit_dlm.trajectories.columns import MAX_LENGTH, STATUSES, Columns
from lit_dlm.trajectories.container import Column
from lit_dlm.trajectories.errors import InvariantError, TrajectoryFormatError
from lit_dlm.trajectories.record import DIGEST_TAG, Trajectory


def uid_bytes(records: Sequence[Trajectory]) -> list[bytes]:
    """UTF-8 of every uid.

    Raises:
        InvariantError: If one is empty, too long, not text, or appears twice.
    """
    texts = []
    for record in records:
        try:
            data = record.uid.encode()
        except UnicodeEncodeError as error:
            raise InvariantError(f"uid {record.uid[:40]!r}: not valid text: {error}") from error
        if not 1 <= len(data) <= MAX_LENGTH:
            raise InvariantError(
                f"uid {record.uid[:40]!r}: expected 1 to {MAX_LENGTH} bytes, got {len(data)}"
            )
        texts.append(data)
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1).decode()
        raise InvariantError(f"trajectory {twice!r}: a uid appears twice", record=twice)
    return texts


def status_codes(records: Sequence[Trajectory]) -> NDArray[np.uint8]:
    """``(n,)`` uint8 codes of the statuses."""
    for record in records:
        if record.status not in STATUSES:
            raise InvariantError(
                f"trajectory {record.uid!r}: status must be one of {STATUSES}, "
                f"got {record.status!r}",
                record=record.uid,
            )
    return np.array([STATUSES.index(record.status) for record in records], dtype=np.uint8)


def seeds(records: Sequence[Trajectory]) -> NDArray[np.uint64]:
    """``(n,)`` uint64."""
    for record in records:
        if not 0 <= record.seed < 2**64:
            raise InvariantError(
                f"trajectory {record.uid!r}: seed must be in 0..2**64-1, got {record.seed}",
                record=record.uid,
            )
    return np.array([record.seed for record in records], dtype=np.uint64)


def meta_bytes(record: Trajectory) -> bytes:
    """The meta of a record as JSON with sorted keys; nothing for an empty one."""
    if not record.meta:
        return b""
    try:
        return json.dumps(
            record.meta, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except (TypeError, ValueError) as error:
        raise InvariantError(
            f"trajectory {record.uid!r}: meta is not JSON: {error}", record=record.uid
        ) from error


def read_metas(column: Column | None, n: int) -> list[dict[str, Any]]:
    """The inverse of :func:`meta_bytes` for the column ``META``; empty ones without it."""
    if column is None:
        return [{} for _ in range(n)]
    texts = split_texts("<I", column, n)
    try:
        metas = [json.loads(text) if text else {} for text in texts]
    except (ValueError, RecursionError) as error:
        raise TrajectoryFormatError(f"block: column 'META' is not JSON: {error}") from error
    if not all(isinstance(meta, dict) for meta in metas):
        raise TrajectoryFormatError("block: column 'META' must hold JSON objects")
    return metas


def content_digests(flat: Columns) -> list[bytes]:
    """Content digests of all records, as :meth:`Trajectory.digest` computes them."""
    prompts, tokens, commits, events = (
        memoryview(part.astype("<i4", copy=False).tobytes())
        for part in (flat.prompts, flat.tokens, flat.commit_step, flat.events)
    )
    pack, sha256 = struct.Struct(f"<{len(DIGEST_TAG)}s5I").pack, hashlib.sha256
    digests, p, g, e = [], 0, 0, 0
    mask_id = flat.mask_id
    lengths = zip(
        flat.num_prompt.tolist(),
        flat.num_generated.tolist(),
        flat.num_steps.tolist(),
        flat.num_events.tolist(),
        strict=True,
    )
    for P, G, T, K in lengths:
        p_end, g_end, e_end = p + 4 * P, g + 4 * G, e + 12 * K
        body = b"".join(
            (
                pack(DIGEST_TAG, P, G, T, mask_id, K),
                prompts[p:p_end],
                tokens[g:g_end],
                commits[g:g_end],
                events[e:e_end],
            )
        )
        digests.append(sha256(body).digest()[:16])
        p, g, e = p_end, g_end, e_end
    return digests
