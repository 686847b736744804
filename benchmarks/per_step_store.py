"""The baseline: a store that keeps arrays of their own for every step of a decode.

It holds what a per-step recorder holds: for each step the absolute positions that were written
(int32), their token ids (int32), the whole mask (one byte per canvas position, XORed with the mask
before) and a timestamp (int64), each array as one zstd frame of level 3. Prompt and final ids come
first. There is one file per decode, without pickle; every frame follows its u32 length.

It only holds decodes that overwrite nothing, which is all that the benchmark needs.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from lit_dlm.trajectories import Trajectory

_HEAD = struct.Struct("<8s5I")
_LENGTH = struct.Struct("<I")
_MAGIC = b"perstep\0"
_COMPRESSOR = zstandard.ZstdCompressor(level=3)
_DECOMPRESSOR = zstandard.ZstdDecompressor()
_STEP_NS = 21_000_000


def encode(record: Trajectory) -> bytes:
    """Returns the contents of the file of one decode."""
    P, G, T = record.num_prompt, record.num_generated, record.num_steps
    parts = [
        _HEAD.pack(_MAGIC, P, G, T, record.mask_id, record.vocab_size),
        _frame(record.prompt_ids),
        _frame(record.tokens),
    ]
    mask = np.zeros(P + G, dtype=np.uint8)
    mask[P:] = 1
    before = np.zeros_like(mask)
    for step in range(T):
        written = np.flatnonzero(record.commit_step == step)
        mask[P + written] = 0
        stamp = np.array([1_750_000_000_000_000_000 + step * _STEP_NS])
        parts += [
            _frame((P + written).astype(np.int32)),
            _frame(record.tokens[written]),
            _frame(mask ^ before),
            _frame(stamp),
        ]
        before = mask.copy()
    return b"".join(parts)


def load(path: Path) -> tuple[NDArray[np.int32], NDArray[np.int32], list[tuple[NDArray, NDArray]]]:
    """Returns prompt ids, final ids, and positions and tokens of every step; unpacks all frames."""
    data = path.read_bytes()
    magic, P, _, T, _, _ = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"{path}: not a per-step file")
    at = _HEAD.size
    frames = []
    for _ in range(2 + 4 * T):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + size
        frames.append(_DECOMPRESSOR.decompress(data[at - size : at]))
    arrays = [np.frombuffer(frame, dtype=np.int32) for frame in frames[:2]]
    steps = []
    mask = np.zeros(0, dtype=np.uint8)
    for step in range(T):
        positions, tokens, difference, stamp = frames[2 + 4 * step : 6 + 4 * step]
        change = np.frombuffer(difference, dtype=np.uint8)
        mask = change if step == 0 else mask ^ change
        np.frombuffer(stamp, dtype=np.int64)
        steps.append(
            (
                np.frombuffer(positions, dtype=np.int32) - P,
                np.frombuffer(tokens, dtype=np.int32),
            )
        )
    return arrays[0], arrays[1], steps


def final_state(
    final: NDArray[np.int32], steps: list[tuple[NDArray, NDArray]]
) -> NDArray[np.int32]:
    """Returns ``(G,)`` int32: the deltas applied one after the other to an empty canvas."""
    state = np.full(len(final), -1, dtype=np.int32)
    for positions, tokens in steps:
        state[positions] = tokens
    return state


def all_states(final: NDArray[np.int32], steps: list[tuple[NDArray, NDArray]]) -> NDArray[np.int32]:
    """Returns ``(T + 1, G)`` int32: the canvas before each step and the final one; -1 is empty."""
    states = np.full((len(steps) + 1, len(final)), -1, dtype=np.int32)
    for step, (positions, tokens) in enumerate(steps):
        states[step + 1] = states[step]
        states[step + 1, positions] = tokens
    return states


def _frame(array: NDArray) -> bytes:
    packed = _COMPRESSOR.compress(array.tobytes())
    return _LENGTH.pack(len(packed)) + packed
