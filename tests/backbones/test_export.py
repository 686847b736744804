"""Writing checkpoints, and reading them again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lit_dlm.backbones import HFBackbone, load_backbone, resolve, weights
from lit_dlm.backbones.export import export_model
from lit_dlm.backbones.location import weight_files
from lit_dlm.backbones.visibility import aligned
from tests.backbones.conftest import tiny_architecture
from tests.backbones.folders import IDS, VARIANTS, assert_logits, write
from tests.backbones.reference import HF, random_tensors
from tests.twins import file_shapes

pytestmark = pytest.mark.slow  # writes and reads whole models


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in weight_files(folder) for key, value in load_file(file).items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_logits_of_the_slow_decoder_and_both_layouts_round_trip(
    tmp_path: Path, name: str
):
    """original -> ours -> original, and original -> original: the same keys, values and sizes."""
    config = VARIANTS[name]
    tensors = random_tensors(config)
    first = load_backbone(write(tmp_path / "released", config, tensors))
    assert first.spec.shift == (config["model_type"] == "Dream")
    assert_logits(first, config, tensors)
    export_model(first, tmp_path / "hf")
    second = load_backbone(tmp_path / "hf")
    assert second.architecture.digest() == first.architecture.digest()
    assert torch.equal(second(IDS), first(IDS))
    # Without any of our code, attention still bidirectional.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(IDS).logits
    expected = aligned(theirs, first.spec.shift) * first.spec.logit_scale
    torch.testing.assert_close(first(IDS), expected)
    shapes = {key: value.shape for key, value in tensors.items()}
    assert file_shapes(resolve(config)) == shapes
    for backbone, folder in ((first, tmp_path / "again"), (second, tmp_path / "back")):
        export_model(backbone, folder, layout="original")
        written = tensors_of(folder)
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[key], tensors[key]) for key in tensors)
        reread = load_backbone(folder)
        assert reread.architecture.digest() == first.architecture.digest()
        assert_logits(reread, config, tensors)
    kept = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config.items() <= {**dict.fromkeys(config), **kept}.items()


@pytest.mark.parametrize("name", ["tied", "everything", "dream", "sdar_tied", "llada_v"])
def test_shards_with_an_index_hold_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """9 kB shards of a model of about 80 kB; a second export into the folder replaces them all."""
    config = VARIANTS[name]
    backbone = load_backbone(write(tmp_path / "one", config, random_tensors(config)))
    folder = tmp_path / "many"
    monkeypatch.setattr(weights, "SHARD_BYTES", 9000)
    export_model(backbone, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 5
    for shard in shards:
        held = load_file(folder / shard)
        assert {key for key, place in index["weight_map"].items() if place == shard} == set(held)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= 9000
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in tensors_of(folder).values())
    for size, written in ((10**6, {"model.safetensors"}), (9000, shards)):
        monkeypatch.setattr(weights, "SHARD_BYTES", size)
        export_model(backbone, folder)
        assert {path.name for path in folder.glob("*.safetensors")} == written
        assert (folder / "model.safetensors.index.json").exists() == (written == shards)
        assert torch.equal(load_backbone(folder)(IDS), backbone(IDS))


def test_an_export_that_was_cut_short_is_no_mixture_of_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = VARIANTS["everything"]
    backbone = load_backbone(write(tmp_path / "one", config, random_tensors(config)))
    folder, written = tmp_path / "many", []
    monkeypatch.setattr(weights, "SHARD_BYTES", 9000)
    export_model(backbone, folder)
    save = weights.save_weights

    def killed(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        save(tensors, path)

    monkeypatch.setattr(weights, "save_weights", killed)
    with pytest.raises(KeyboardInterrupt):
        export_model(backbone, folder)
    with pytest.raises((ValueError, OSError), match=r"many.*safetensors"):
        load_backbone(folder)


def test_unknown_ids_stay_unknown(tmp_path: Path):
    config = {key: value for key, value in HF.items() if not key.endswith("token_id")}
    backbone = load_backbone(write(tmp_path / "m", config, random_tensors(config)))
    for layout in ("hf", "original"):
        export_model(backbone, tmp_path / layout, layout=layout)  # type: ignore[arg-type]
        assert load_backbone(tmp_path / layout).spec == backbone.spec
        written = json.loads((tmp_path / layout / "config.json").read_text())
        assert written.get("eos_token_id") is None
    with pytest.raises(ValueError, match="layout"):  # of no family's files
        export_model(HFBackbone(architecture=tiny_architecture()), tmp_path, layout="original")
