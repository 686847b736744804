import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dlm.backbones.projection import FeatureSettings, ProjectorConfig
from lit_dlm.system.files import write_folder
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.scorer import AcceptanceScorer, ScorerSettings
from tests.projectors import random_orthogonal

HEAD = AcceptanceConfig(width=16, num_layers=1, num_heads=2, ffn_width=16)


def scorer(**changes: object) -> AcceptanceScorer:
    torch.manual_seed(0)
    config = ProjectorConfig(hidden_size=8, hidden_rank=4, delta_rank=2, kind="random_orthogonal")
    return AcceptanceScorer(
        random_orthogonal(config),
        head=HEAD,
        **{"settings": ScorerSettings(features=FeatureSettings(entropy=False)), **changes},
    )


def test_saved_policy_scores_alike_and_keeps_its_facts(tmp_path: Path) -> None:
    original = scorer(backbone={"hidden_size": 8, "family": "tiny"}, training={"seed": 3}).eval()
    original.save(tmp_path)
    loaded = AcceptanceScorer.load(tmp_path)
    hidden, prob, margin = torch.randn(2, 5, 3, 8), torch.rand(2, 5), torch.rand(2, 5)
    state, visible = torch.full((2, 5), 2), torch.ones(2, 5, dtype=torch.bool)
    ours, theirs = (
        s(s.features(hidden, prob, margin=margin), state, visible) for s in (original, loaded)
    )
    assert torch.equal(ours.decision_logits, theirs.decision_logits)
    assert not loaded.training
    assert (loaded.settings, loaded.head.config) == (original.settings, HEAD)
    assert loaded.backbone == {"hidden_size": 8, "family": "tiny"}
    assert loaded.training_facts == {"seed": 3}
    assert loaded.digest() == original.digest()
    with torch.no_grad():
        loaded.head.logit_head.bias += 1e-3
    assert loaded.digest() != original.digest()


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


def test_a_policy_with_a_weight_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    broken = scorer()
    broken.save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    next(broken.head.parameters()).data.view(-1)[3] = torch.nan
    with pytest.raises(ValueError, match=r"head\..* has numbers that are not finite"):
        broken.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def settings(folder: Path, **changes: object) -> None:
    """Writes a policy with other settings, and digests of them."""
    record = json.loads((folder / "config.json").read_text())
    names = {"config": "config.json", "weights": "model.safetensors"}
    write_folder(folder, {**record, **changes}, scorer().state_dict(), **names)


def of_another_export(folder: Path) -> None:
    former = (folder / "config.json").read_bytes()
    scorer(training={"seed": 4}).save(folder)
    (folder / "config.json").write_bytes(former)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (of_another_export, r"damaged, or config\.json and model\.safetensors are of two"),
        (lambda folder: settings(folder, version=99), r"version 1, got .*99"),
        (lambda folder: settings(folder, head={"depth": 3}), r"config\.json: expected what this"),
        (lambda folder: settings(folder, settings={}), r"config\.json: expected what this"),
        (lambda folder: settings(folder, projector=None), r"config\.json: expected what this"),
    ],
)
def test_a_folder_that_is_none_of_this_version_is_refused(
    tmp_path: Path, spoil: Any, message: str
) -> None:
    scorer().save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        AcceptanceScorer.load(tmp_path)
