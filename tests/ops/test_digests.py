"""Files of tensors are whole or not there."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_dlm.backbones.weights import read_weights, save_weights
from lit_dlm.heads.folder import read_folder, write_folder


def write_plain(path: Path, tensors: dict[str, Tensor]) -> None:
    save_weights(tensors, path)
    assert all(value.equal(tensors[key]) for key, value in read_weights(path))


def write_export(path: Path, tensors: dict[str, Tensor]) -> None:
    names = {"config": "config.json", "weights": path.name}
    write_folder(path.parent, {"size": 1}, tensors, **names)
    _, found = read_folder(path.parent, what="policy", **names)
    assert all(value.equal(tensors[key]) for key, value in found.items())


@pytest.mark.parametrize("write", [write_plain, write_export])
def test_weights_that_find_no_room_leave_those_that_were_there(
    tmp_path: Path, write: Callable[[Path, dict[str, Tensor]], None]
) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"weight": torch.arange(3.0)})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors: cannot be written \(.*too large"):
            write(path, {"weight": torch.arange(5000.0)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
