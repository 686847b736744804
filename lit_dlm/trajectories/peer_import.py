"""Imports ``.dtrace`` files of DiffTrace, which are pickles.

A pickle can name any function of any module, so loading one runs whatever its author wished. The
unpickler here knows two plain data classes and a handful of builtin types and refuses every other
name; it is used only where somebody asked for it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from lit_dlm.trajectories.record import Trajectory, from_history

_MODULE = "difftrace.core.compressor"
_BUILTINS = {"dict", "list", "tuple", "set", "frozenset", "bytes", "bytearray", "str", "int"}
_BUILTINS |= {"float", "bool", "complex"}
_MAX_ARRAY_BYTES = 2**26


class _Fields:
    """Stands for one of the two data classes: attributes and nothing else."""


class _CompressedTrajectory(_Fields):
    """``request_id``, ``metadata``, ``steps``."""


class _CompressedStep(_Fields):
    """``step_index``, ``positions_data``, ``tokens_data``."""


_CLASSES = {
    "CompressedTrajectory": _CompressedTrajectory,
    "CompressedStep": _CompressedStep,
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == _MODULE and name in _CLASSES:
            return _CLASSES[name]
        if module == "builtins" and name in _BUILTINS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the file names {module}.{name}, which is not allowed")


def read_dtrace(path: Path, *, mask_id: int, vocab_size: int) -> Iterator[Trajectory]:
    """Reads one ``.dtrace`` file.

    Args:
        path: the file.
        mask_id: id of the mask token, which the file does not name.
        vocab_size: bound of the token ids.

    Yields:
        Its one record. Random states, masks and timestamps are left out: masks follow from the
        record.

    Raises:
        ValueError: naming the file: it is no such file, names something that is not allowed, or
            its steps do not make a decode.
    """
    try:
        stored = _RestrictedUnpickler(io.BytesIO(path.read_bytes())).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ImportError,
        IndexError,
        KeyError,
        MemoryError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"{path}: not a readable .dtrace file: {error}") from error
    if not isinstance(stored, _CompressedTrajectory):
        raise ValueError(f"{path}: expected one trajectory, got {type(stored).__name__}")
    fields = vars(stored)
    metadata, steps = fields.get("metadata"), fields.get("steps")
    if not isinstance(metadata, dict) or not isinstance(steps, list):
        raise ValueError(f"{path}: expected metadata and steps")
    prompt = _ids(path, "prompt_tokens", metadata.get("prompt_tokens"))
    length = metadata.get("sequence_length")
    if not isinstance(length, int) or not len(prompt) < length <= 2**17:
        raise ValueError(f"{path}: expected a sequence longer than its prompt, got {length!r}")
    history = np.full((len(steps) + 1, length - len(prompt)), mask_id, dtype=np.int32)
    for number, step in enumerate(steps):
        if not isinstance(step, _CompressedStep):
            raise ValueError(f"{path}: step {number} is a {type(step).__name__}")
        positions = _array(path, vars(step).get("positions_data")) - len(prompt)
        tokens = _array(path, vars(step).get("tokens_data"))
        outside = (positions < 0) | (positions >= history.shape[1])
        if len(positions) != len(tokens) or outside.any():
            raise ValueError(f"{path}: step {number} writes outside the response")
        history[number + 1] = history[number]
        history[number + 1, positions] = tokens
    is_full = bool((history[-1] != mask_id).all())
    yield from_history(
        history,
        uid=str(fields.get("request_id") or path.stem),
        prompt_ids=prompt,
        mask_id=mask_id,
        vocab_size=vocab_size,
        status="complete" if is_full else "step_limit",
        meta={"source": "difftrace", "model": str(metadata.get("model_name", ""))},
    )


def _ids(path: Path, name: str, data: Any) -> NDArray[np.int32]:
    if not isinstance(data, bytes) or len(data) % 4:
        raise ValueError(f"{path}: {name} must be 32-bit integers")
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


def _array(path: Path, data: Any) -> NDArray[np.int32]:
    """A compressed array of 32-bit integers; empty where there is none."""
    if not isinstance(data, bytes):
        raise ValueError(f"{path}: a step has no array of bytes")
    if not data:
        return np.empty(0, dtype=np.int32)
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size != zstandard.CONTENTSIZE_UNKNOWN and size > _MAX_ARRAY_BYTES:
            raise ValueError(f"{path}: an array of {size} bytes is not a step's")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=_MAX_ARRAY_BYTES)
    except zstandard.ZstdError as error:
        raise ValueError(f"{path}: a compressed array is damaged: {error}") from error
    return _ids(path, "an array", raw)
