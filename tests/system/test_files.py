"""Files of tensors are whole or not there."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dlm.backbones.weights import save_weights
from lit_dlm.system.files import write_folder


def write_export(tensors: dict[str, Tensor], path: Path) -> None:
    write_folder(path.parent, {"size": 1}, tensors, config="config.json", weights=path.name)


@pytest.mark.parametrize("write", [save_weights, write_export])
def test_weights_that_find_no_room_leave_those_that_were_there(
    tmp_path: Path, write: Callable[[dict[str, Tensor], Path], None]
) -> None:
    path = tmp_path / "model.safetensors"
    write({"weight": torch.arange(3.0)}, path)
    assert load_file(path)["weight"].tolist() == [0.0, 1.0, 2.0]
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors: cannot be written \(.*too large"):
            write({"weight": torch.arange(5000.0)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
