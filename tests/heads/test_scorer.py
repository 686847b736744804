import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.features import FeatureSettings
from lit_dlm.heads.folder import write_folder
from lit_dlm.heads.projection import Projector, ProjectorConfig
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings

HEAD = AcceptanceConfig(width=16, num_layers=1, num_heads=2, ffn_width=16)


def scorer(**changes: object) -> AcceptanceScorer:
    torch.manual_seed(0)
    config = ProjectorConfig(hidden_size=8, hidden_rank=4, delta_rank=2, kind="random_orthogonal")
    return AcceptanceScorer(
        Projector.random_orthogonal(config),
        head=HEAD,
        **{"settings": ScorerSettings(features=FeatureSettings(entropy=False)), **changes},
    )


def test_saved_policy_scores_alike_and_keeps_its_facts(tmp_path: Path) -> None:
    original = scorer(backbone={"hidden_size": 8, "family": "tiny"}, training={"seed": 3}).eval()
    original.save(tmp_path)
    loaded = AcceptanceScorer.load(tmp_path)
    hidden, prob, margin = torch.randn(2, 5, 3, 8), torch.rand(2, 5), torch.rand(2, 5)
    state, visible = torch.full((2, 5), 2), torch.ones(2, 5, dtype=torch.bool)
    outputs = [
        s(s.features(hidden, prob, margin=margin), state, visible) for s in (original, loaded)
    ]
    assert torch.equal(outputs[0].decision_logits, outputs[1].decision_logits)
    assert not loaded.training
    assert loaded.settings == original.settings
    assert loaded.head.config == HEAD
    assert loaded.backbone == {"hidden_size": 8, "family": "tiny"}
    assert loaded.training_facts == {"seed": 3}
    assert loaded.digest() == original.digest()


def test_digest_sees_the_weights() -> None:
    one, other = scorer(), scorer()
    assert one.digest() == other.digest()
    with torch.no_grad():
        other.head.logit_head.bias += 1e-3
    assert one.digest() != other.digest()


def test_folder_without_weights_is_named(tmp_path: Path) -> None:
    scorer().save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        AcceptanceScorer.load(tmp_path)


def test_unknown_version_is_refused(tmp_path: Path) -> None:
    scorer().save(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    write_folder(
        tmp_path, {**record, "version": 99}, scorer().state_dict(),
        config="config.json", weights="model.safetensors",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"version 1, got .* version 99"):
        AcceptanceScorer.load(tmp_path)


def test_projector_needs_one_snapshot_per_layer() -> None:
    with pytest.raises(ValueError, match=r"hidden_layers: expected 3 layers"):
        scorer(settings=ScorerSettings(hidden_layers=(-1,)))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_flipped_bit_of_a_policy_is_refused_or_makes_no_difference(
    tmp_path: Path, name: str
) -> None:
    scorer().save(tmp_path)
    path, wanted, rng = tmp_path / name, AcceptanceScorer.load(tmp_path), random.Random(0)
    whole, refused = path.read_bytes(), 0
    for _ in range(150):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            found = AcceptanceScorer.load(tmp_path)
        except ValueError:
            refused += 1
        else:
            assert found.digest() == wanted.digest()
            assert found.backbone == wanted.backbone
            assert found.training_facts == wanted.training_facts
    assert refused > 140


def test_the_files_of_two_exports_are_no_policy(tmp_path: Path) -> None:
    scorer().save(tmp_path)
    former = (tmp_path / "config.json").read_bytes()
    other = scorer()
    other.training_facts = {"seed": 4}
    other.save(tmp_path)
    (tmp_path / "config.json").write_bytes(former)
    with pytest.raises(
        ValueError, match=r"damaged, or config\.json and model\.safetensors are of two"
    ):
        AcceptanceScorer.load(tmp_path)


def test_a_policy_with_a_weight_that_is_no_number_is_neither_written_nor_read(
    tmp_path: Path,
) -> None:
    broken = scorer()
    broken.save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    next(broken.head.parameters()).data.view(-1)[3] = torch.nan
    with pytest.raises(ValueError, match=r"head\..* has numbers that are not finite"):
        broken.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    save_file(broken.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"head\..* has numbers that are not finite"):
        AcceptanceScorer.load(tmp_path)


def test_settings_of_another_version_are_named(tmp_path: Path) -> None:
    """Without digests, as folders had none once."""
    scorer().save(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path)
    record = json.loads((tmp_path / "config.json").read_text())
    AcceptanceScorer.load(tmp_path)
    for change in ({"head": {"depth": 3}}, {"settings": {}}, {"projector": None}):
        (tmp_path / "config.json").write_text(json.dumps({**record, **change}))
        with pytest.raises(ValueError, match=r"config\.json: other settings than this version"):
            AcceptanceScorer.load(tmp_path)
