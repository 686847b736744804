"""A decoder and its description say the same; sweeps change one option of it."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import lit_dlm.decoding as d
from lit_dlm.decoding import ConfidencePolicy, Decoder, NoQuota, Region
from lit_dlm.decoding.caches import CacheScheme
from lit_dlm.decoding.decoder import Sweep, expanded, with_option
from lit_dlm.decoding.description import (
    decoder_from_description,
    known_class,
    layout_from_description,
)
from lit_dlm.reports.plots import family
from lit_dlm.tracelock.policy import TraceLockPolicy
from tests.components import AlternatePolicy
from tests.decoding.models import scorer

SURE, TWO = ConfidencePolicy(), [Region(name="R", length=8), Region(name="A", tau=0.95)]
SETTINGS = Decoder(policy=SURE).describe()["settings"]
DECODERS: list[dict[str, Any]] = [
    {"policy": SURE},
    {"policy": d.EntropyPolicy(), "window": d.BlockWindow(8), "quota": d.EvenQuota(16)},
    {"policy": d.MarginPolicy(), "window": d.SlidingWindow(12), "quota": d.FixedQuota(3)},
    {
        "policy": d.RandomPolicy(),
        "quota": d.ScheduleQuota(8, eps=1e-2),
        "sampler": d.Sampler(temperature=0.7, top_k=5, top_p=0.9, score_on="filtered"),
    },
    {
        "policy": d.ThresholdPolicy(0.8),
        "quota": NoQuota(),
        "sampler": d.Sampler(score_dtype="float64"),
        "settings": d.DecodeSettings(
            max_steps=9, stall_rule="idle", eos_rule="fill", eos_gate=True, max_commits_per_step=2
        ),
    },
    {"policy": d.KLASSPolicy(0.6, max_kl=0.015, history=3), "quota": NoQuota()},
    {"policy": d.CreditPolicy(alpha=0.5), "quota": NoQuota()},
    {"policy": d.WINOPolicy(0.5, threshold_back=0.8), "quota": NoQuota()},
    {"policy": d.ReMDMPolicy(2, loop_steps=9, loop_from=0.5)},
    {"policy": d.TokenEditingPolicy(0.5, edit_threshold=0.1, max_post_steps=2), "quota": NoQuota()},
    {"policy": d.PCSamplerPolicy("tiny", decay=0.5)},
    {"policy": SURE, "window": d.BlockWindow(8), "cache": d.PrefixCache(horizon=16)},
    {"policy": SURE, "window": d.BlockWindow(8), "cache": d.DualCache()},
    {
        "policy": d.EBSamplerPolicy(0.5),
        "quota": d.BudgetQuota(7),
        "cache": d.DualCache(),
        "layout": d.FixedLayout(TWO),
    },
]
LAYOUTS = [
    d.FixedLayout([Region(name="R", length=3, tau=0.8), Region(name="A")]),
    d.FractionLayout([Region(name="R", fraction=0.5, weight=0.0), Region(name="A", fraction=0.5)]),
    d.TemplateLayout([Region(name="R", length=2), Region(name="A", marker=[7])]),
    d.MarkerLayout([Region(name="A", marker=[7, 8])], rest=Region(name="else", max_fill_frac=0.5)),
]


def stored(decoder: Decoder) -> dict[str, Any]:
    return json.loads(json.dumps(decoder.describe()))


@pytest.mark.parametrize("components", DECODERS)
def test_a_description_gives_a_decoder_of_the_same_description(components) -> None:
    decoder = Decoder(**components)
    assert decoder_from_description(stored(decoder)).describe() == decoder.describe()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)
def test_a_layout_comes_back_from_the_description_of_its_decoder(layout: d.Layout) -> None:
    decoder = Decoder(policy=SURE, layout=layout)
    described = stored(decoder)
    assert decoder_from_description(described).describe() == decoder.describe()
    rebuilt = layout_from_description(described)
    assert rebuilt is not None
    assert (rebuilt.regions, rebuilt.rest) == (layout.regions, layout.rest)
    unknown = {**described["layout"], "regions": [{"name": "R", "size": 3}]}
    with pytest.raises(ValueError, match=r"layout: .*'size'"):
        layout_from_description({**described, "layout": unknown})
    assert layout_from_description(Decoder(policy=SURE).describe()) is None


def test_every_component_of_the_package_can_be_named() -> None:
    """A new policy, window, quota or cache that is exported but not listed would be forgotten."""
    protocols = {
        "policy": d.CommitPolicy,
        "window": d.Window,
        "quota": d.Quota,
        "cache": CacheScheme,
        "layout": d.Layout,
    }
    classes = [value for value in vars(d).values() if inspect.isclass(value)]
    for part, protocol in protocols.items():
        exported = {value for value in classes if protocol in value.__mro__[1:]}
        assert all(known_class(part, one.__name__) is one for one in exported), part


class Holds(AlternatePolicy):
    def __init__(self) -> None:
        self.inner = AlternatePolicy()


def test_an_attribute_that_records_cannot_hold_is_named() -> None:
    with pytest.raises(ValueError, match=r"Holds\.inner: .* AlternatePolicy; name it _inner"):
        Decoder(policy=Holds()).describe()


def test_a_component_from_outside_is_imported_only_from_modules_that_were_named() -> None:
    decoder = Decoder(policy=AlternatePolicy(first=1))
    described = stored(decoder)
    assert described["policy"] == {"name": "tests.components.AlternatePolicy", "first": 1}
    rebuilt = decoder_from_description(described, component_modules=["tests.components"])
    assert isinstance(rebuilt.policy, AlternatePolicy)
    assert rebuilt.describe() == decoder.describe()
    with pytest.raises(
        ValueError, match=r"trust it, name its module with --components tests\.components"
    ):
        decoder_from_description(described, component_modules=["tests"])


@pytest.mark.parametrize(
    ("part", "said", "message"),
    [
        ("policy", {"name": "os.system"}, "policy .* is none of .*ConfidencePolicy, "),
        ("policy", {"name": "Decoder"}, "policy .* is none of .*ConfidencePolicy, "),
        ("policy", {"name": "EntropyPolicy.__init__"}, "policy .* is none of .*ConfidencePolicy, "),
        ("policy", {"name": None}, "policy .* is none of .*ConfidencePolicy, "),
        ("policy", {"name": "subprocess.Popen"}, "is none of"),
        ("policy", {"name": "tests.components.Missing"}, "expected a class, got None"),
        ("policy", {"name": "tests.components.torch"}, "expected a class, got <module"),
        ("policy", {"name": "nowhere.Policy"}, "expected a class, got None"),
        (
            "policy",
            {"name": "ThresholdPolicy", "threshold": 0.8, "temper": 1},
            "policy ThresholdPolicy: expected .*, got .*temper",
        ),
        ("settings", SETTINGS | {"temper": 1}, "settings: expected .*, got .*temper"),
        ("hook", {"name": "x"}, "decoder: expected policy, quota, sampler"),
        ("quota", None, "decoder: expected policy, quota, sampler"),
    ],
)
def test_what_names_no_decoder_is_refused(part: str, said: Any, message: str) -> None:
    description = {**Decoder(policy=SURE).describe(), part: said}
    if said is None:
        del description[part]
    with pytest.raises(ValueError, match=message):
        decoder_from_description(description, component_modules=["tests.components", "nowhere"])


def test_a_learned_policy_is_found_by_its_digest_among_the_folders(tmp_path: Path) -> None:
    for seed in (0, 1):
        scorer(seed=seed).save(tmp_path / str(seed))
    policy = TraceLockPolicy(tmp_path / "1", threshold=0.7, max_accept_per_step=None)
    decoder = Decoder(policy=policy, quota=NoQuota())
    folders = [tmp_path / "0", tmp_path / "1"]
    rebuilt = decoder_from_description(stored(decoder), policy_folders=folders)
    assert rebuilt.describe() == decoder.describe()
    with pytest.raises(ValueError, match=r"no policy has the weights digest .* give the folder"):
        decoder_from_description(stored(decoder), policy_folders=folders[:1])


# -- sweeps over one option of a decoder -----------------------------------------------------------

BASE = Decoder(policy=d.ThresholdPolicy(0.9), quota=NoQuota(), window=d.SlidingWindow(8))


def swept(decoder: Decoder, *values: float) -> Sweep:
    return Sweep(decoder=decoder, option="policy.threshold", values=list(values))


def test_a_sweep_is_one_decoder_per_value_and_leaves_its_base_alone() -> None:
    points = expanded({}, {"cut": swept(BASE, 0.5, 0.75)})
    assert list(points) == ["cut_05", "cut_075"]
    assert [p.describe()["policy"]["threshold"] for p in points.values()] == [0.5, 0.75]
    assert BASE.describe()["policy"]["threshold"] == 0.9
    rest = [{k: v for k, v in p.describe().items() if k != "policy"} for p in points.values()]
    assert rest[0] == rest[1] == {k: v for k, v in BASE.describe().items() if k != "policy"}
    assert {family(name) for name in points} == {"cut"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("window.width", 3), ("settings.max_commits_per_step", 2), ("quota.tokens_per_step", 4)],
)
def test_any_component_has_options(option: str, value: int) -> None:
    base = Decoder(policy=d.EntropyPolicy(), window=d.SlidingWindow(8), settings=d.DecodeSettings())
    part, name = option.split(".")
    assert with_option(base, option, value).describe()[part][name] == value


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("policy.treshold", 0.5, "'policy.treshold' is unknown.* threshold"),
        ("polcy.threshold", 0.5, "'polcy.threshold' is unknown"),
        ("settings.cap", 1, "'settings.cap' is unknown"),
        ("layout.cells", 4, "'layout.cells' is unknown"),
        ("policy.threshold", 1.5, "threshold"),
        ("policy.threshold", 0.5, r"sweep\.cut: .* 'cut_05'"),  # there is such a method
    ],
)
def test_wrong_options_and_values_are_named(option: str, value: float, message: str) -> None:
    sweep = Sweep(decoder=BASE, option=option, values=[value])
    with pytest.raises(ValueError, match=message):
        expanded({"cut_05": BASE}, {"cut": sweep})


def test_values_whose_names_are_one_are_refused() -> None:
    base = Decoder(policy=d.FactorPolicy(1.0), quota=NoQuota())
    twice = Sweep(decoder=base, option="policy.factor", values=[0.1, 1.0, 10])
    with pytest.raises(ValueError, match=r"sweep\.f: .* got \[0\.1, 1\.0, 10\] for f_01, f_10$"):
        expanded({}, {"f": twice})


def test_the_points_of_an_unread_policy_read_the_same_folder(tmp_path: Path) -> None:
    base = Decoder(policy=TraceLockPolicy(tmp_path, max_accept_per_step=2), quota=NoQuota())
    points = expanded({}, {"learned": swept(base, 0.5, 0.9)})
    scorer().save(tmp_path)
    told = [point.describe()["policy"] for point in points.values()]
    assert [one.pop("threshold") for one in told] == [0.5, 0.9]
    assert told[0] == told[1]
    assert told[0]["max_accept_per_step"] == 2
