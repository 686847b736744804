"""Folders of exported networks: a JSON file of settings beside a file of weights, with digests.

The weights' header holds a digest of both, so a folder that was damaged, or whose files belong to
two exports, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_dlm.ops.files import is_finite, tensors_digest, write_atomically, write_tensors

_DIGEST = "sha256"


def write_folder(
    folder: Path,
    record: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    config: str,
    weights: str,
) -> None:
    """Writes both files, each as a whole."""
    _require_finite(folder / weights, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2) + "\n"
    write_tensors(tensors, folder / weights, {_DIGEST: tensors_digest(tensors, text)})
    write_atomically(folder / config, text)


def read_folder(
    folder: Path, *, config: str, weights: str, what: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads both files and checks them."""
    for name in (config, weights):
        if not (folder / name).is_file():
            raise ValueError(f"{what} folder {folder}: {name} is missing")
    try:
        text = (folder / config).read_text(encoding="utf-8")
        record = json.loads(text)
        with safe_open(folder / weights, framework="pt") as file:
            digest = (file.metadata() or {}).get(_DIGEST)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except (ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{what} folder {folder}: not an export ({error})") from None
    if tensors_digest(tensors, text) != digest:
        raise ValueError(
            f"{what} folder {folder}: damaged, or {config} and {weights} are of two exports: the "
            "digest differs; expected the files as training wrote them"
        )
    _require_finite(folder / weights, tensors)
    return record, tensors


@contextmanager
def fitting(place: Path) -> Iterator[None]:
    """Names the file where what was read does not fit the classes it is for."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{place}: other settings than this version writes ({type(error).__name__}: {reason})"
        ) from error


def _require_finite(place: Path, tensors: Mapping[str, Tensor]) -> None:
    for key, value in tensors.items():
        if not is_finite(value):
            raise ValueError(f"{place}: {key} has numbers that are not finite")
