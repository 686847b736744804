"""A decoder and its description say the same."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

import lit_dlm.decoding as decoding
from lit_dlm.decoding import (
    BlockWindow,
    BonusPolicy,
    BudgetQuota,
    CommitPolicy,
    ConfidencePolicy,
    Decoder,
    DecodeSettings,
    DualCache,
    EntropyPolicy,
    EvenQuota,
    FixedLayout,
    FixedQuota,
    Layout,
    MarginPolicy,
    NoQuota,
    PrefixCache,
    Quota,
    RandomPolicy,
    Region,
    Sampler,
    ScheduleQuota,
    SlidingWindow,
    ThresholdPolicy,
    Window,
)
from lit_dlm.decoding.caches import CacheScheme
from lit_dlm.decoding.description import decoder_from_description, plugs
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.projection import Projector, ProjectorConfig
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings
from tests.plugs import AlternatePolicy

DECODERS = [
    Decoder(policy=ConfidencePolicy()),
    Decoder(policy=EntropyPolicy(), window=BlockWindow(8), quota=EvenQuota(16)),
    Decoder(policy=MarginPolicy(), window=SlidingWindow(12), quota=FixedQuota(3)),
    Decoder(
        policy=RandomPolicy(),
        quota=ScheduleQuota(8, eps=1e-2),
        sampler=Sampler(temperature=0.7, top_k=5, top_p=0.9, score_on="filtered"),
    ),
    Decoder(
        policy=ThresholdPolicy(0.8),
        quota=NoQuota(),
        sampler=Sampler(score_dtype="float64"),
        settings=DecodeSettings(
            max_steps=9, stall_rule="idle", eos_rule="fill", eos_gate=True, max_commits_per_step=2
        ),
    ),
    Decoder(policy=ConfidencePolicy(), window=BlockWindow(8), cache=PrefixCache(horizon=16)),
    Decoder(policy=ConfidencePolicy(), window=BlockWindow(8), cache=DualCache()),
    Decoder(
        policy=BonusPolicy(batch_wide=True, tau=0.5),
        quota=BudgetQuota(7),
        cache=DualCache(),
        layout=FixedLayout([Region(name="R", length=8), Region(name="A", tau=0.95)]),
    ),
]


def scorer(seed: int = 0) -> AcceptanceScorer:
    torch.manual_seed(seed)
    return AcceptanceScorer(
        Projector(ProjectorConfig(hidden_size=4, num_snapshots=2, hidden_rank=3, delta_rank=2)),
        head=AcceptanceConfig(width=16, num_layers=1, num_heads=2, ffn_width=16),
        settings=ScorerSettings(hidden_layers=(-2, -1)),
    )


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_description_gives_a_decoder_of_the_same_description(decoder: Decoder) -> None:
    stored = json.loads(json.dumps(decoder.describe()))
    assert decoder_from_description(stored).describe() == decoder.describe()


def test_every_plug_of_the_package_can_be_named() -> None:
    """A new policy, window, quota or cache that is exported but not listed would be forgotten."""
    protocols = {
        "policy": CommitPolicy,
        "window": Window,
        "quota": Quota,
        "cache": CacheScheme,
        "layout": Layout,
    }
    for part, protocol in protocols.items():
        exported = {
            value
            for value in vars(decoding).values()
            if inspect.isclass(value) and protocol in value.__mro__[1:]
        }
        assert exported <= set(plugs(part).values()), part


def test_only_listed_names_are_looked_up() -> None:
    description = Decoder(policy=ConfidencePolicy()).describe()
    for name in ("os.system", "Decoder", "ConfidencePolicy.__init__", None):
        changed = {**description, "policy": {"name": name}}
        refused = "policy .* is none of BonusPolicy, "
        with pytest.raises(ValueError, match=refused):
            decoder_from_description(changed)


class Holds(AlternatePolicy):
    def __init__(self) -> None:
        self.inner = AlternatePolicy()


def test_an_attribute_that_records_cannot_hold_is_named() -> None:
    told = r"Holds\.inner: .* AlternatePolicy; name it _inner"
    with pytest.raises(ValueError, match=told):
        Decoder(policy=Holds()).describe()


def test_a_plug_from_outside_is_imported_only_from_modules_that_were_named() -> None:
    decoder = Decoder(policy=AlternatePolicy(first=1))
    stored = json.loads(json.dumps(decoder.describe()))
    assert stored["policy"] == {"name": "tests.plugs.AlternatePolicy", "first": 1}
    rebuilt = decoder_from_description(stored, plug_modules=["tests.plugs"])
    assert isinstance(rebuilt.policy, AlternatePolicy)
    assert rebuilt.describe() == decoder.describe()
    with pytest.raises(ValueError, match=r"trust it, name its module with --plugs tests\.plugs"):
        decoder_from_description(stored, plug_modules=["tests"])
    for name, reason in (
        ("subprocess.Popen", "is none of"),
        ("tests.plugs.Missing", "expected a class, got None"),
        ("tests.plugs.torch", "expected a class, got <module"),
        ("nowhere.Policy", "expected a class, got None"),
    ):
        other = {**stored, "policy": {"name": name}}
        with pytest.raises(ValueError, match=reason):
            decoder_from_description(other, plug_modules=["tests.plugs", "nowhere"])


def test_unknown_settings_and_parts_are_named() -> None:
    description = Decoder(policy=ThresholdPolicy(0.8)).describe()
    for part, where in (("policy", "policy ThresholdPolicy"), ("settings", "settings")):
        changed = {**description, part: {**description[part], "temper": 1}}
        with pytest.raises(ValueError, match=rf"{where}: expected .*, got .*temper"):
            decoder_from_description(changed)
    few = {key: description[key] for key in ("policy", "window")}
    for changed in (few, {**description, "hook": {"name": "x"}}):
        with pytest.raises(ValueError, match="decoder: expected policy, quota, sampler"):
            decoder_from_description(changed)


def test_a_learned_policy_is_found_by_its_digest_among_the_folders(tmp_path: Path) -> None:
    for seed in (0, 1):
        scorer(seed).save(tmp_path / str(seed))
    decoder = Decoder(
        policy=TraceLockPolicy(tmp_path / "1", threshold=0.7, max_accept_per_step=None),
        quota=NoQuota(),
    )
    stored = json.loads(json.dumps(decoder.describe()))
    folders = [tmp_path / "0", tmp_path / "1"]
    rebuilt = decoder_from_description(stored, policy_folders=folders)
    assert rebuilt.describe() == decoder.describe()
    with pytest.raises(ValueError, match=r"no policy has the weights digest .* give the folder"):
        decoder_from_description(stored, policy_folders=folders[:1])
