"""Reading safetensors shards under a key map."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lit_dlm.backbones.location import weight_files
from lit_dlm.backbones.weights import load_weights, save_weights
from tests.processes import mapping_of


def targets() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(2), "b": torch.zeros(3)}


def test_shards_of_an_index_are_all_read_and_no_pickles(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\(pickled weights are not read\)"):
        weight_files(tmp_path)
    save_file({"x.a": torch.ones(2), "freq": torch.ones(4)}, tmp_path / "model-1.safetensors")
    save_file({"x.b": torch.full((3,), 2.0, dtype=torch.float16)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"x.b": "model-2.safetensors", "x.a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = targets()
    load_weights(weight_files(tmp_path), loaded, rename={"x.a": "a", "x.b": "b"}.get)
    assert {key: (value.dtype, value.tolist()) for key, value in loaded.items()} == {
        "a": (torch.float32, [1.0] * 2),
        "b": (torch.float32, [2.0] * 3),
    }


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.ones(2)}, r"1 keys are absent, such as \['b'\]"),
        ({**targets(), "c": torch.ones(1)}, r"1 unexpected.*'c'"),
        ({**targets(), "b": torch.ones(4)}, r"b has shape \(4,\), expected \(3,\)"),
        ({**targets(), "b": torch.tensor([0.0, torch.nan, 1.0])}, "b has .* not finite"),
        ({**targets(), "b": torch.tensor([0.0, 1.0, -torch.inf])}, "b has .* not finite"),
    ],
)
def test_keys_shapes_and_numbers_must_fit(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        load_weights([path], targets(), rename=str)


def test_a_truncated_file_and_a_flipped_weight_of_an_export_are_named(tmp_path: Path):
    """The last bytes of the file are weights."""
    path = tmp_path / "model.safetensors"
    save_weights(targets(), path)
    data = path.read_bytes()
    flipped = data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]
    for damaged, message in (
        (data[:-4], "not a readable safetensors file"),
        (flipped, "the weights are damaged"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"model\.safetensors: {message}"):
            load_weights([path], targets(), rename=str)


def test_weights_of_the_files_dtype_are_the_files_memory(tmp_path: Path):
    """64 MB: reading takes no memory of the process's own, writing does and changes no file."""
    path = tmp_path / "model.safetensors"
    save_weights({"a": torch.arange(2.0**24), "b": torch.ones(3)}, path)
    for _ in range(2):
        found = {"a": torch.empty(2**24), "b": torch.empty(3, dtype=torch.float16)}
        load_weights([path], found, rename=str)
        assert float(found["a"].sum(dtype=torch.float64)) == 2**23 * (2.0**24 - 1)
        assert mapping_of(found["a"]) == (path, 0)
        assert found["b"].tolist() == [1.0] * 3
        found["a"].zero_()
        assert mapping_of(found["a"]) == (path, pytest.approx(2**26, rel=0.01))
