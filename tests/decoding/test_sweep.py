from pathlib import Path

import pytest

from lit_dlm.decoding import (
    Decoder,
    DecodeSettings,
    EntropyPolicy,
    NoQuota,
    SlidingWindow,
    ThresholdPolicy,
)
from lit_dlm.decoding.decoder import Sweep, expanded, with_option
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.projection import Projector, ProjectorConfig
from lit_dlm.heads.scorer import AcceptanceScorer
from lit_dlm.reports.plots import family

BASE = Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota(), window=SlidingWindow(8))


def test_a_sweep_is_one_decoder_per_value_and_leaves_its_base_alone() -> None:
    points = expanded(
        {}, {"cut": Sweep(decoder=BASE, option="policy.threshold", values=[0.5, 0.75])}
    )
    assert list(points) == ["cut_05", "cut_075"]
    assert [p.describe()["policy"]["threshold"] for p in points.values()] == [0.5, 0.75]
    assert BASE.describe()["policy"]["threshold"] == 0.9
    rest = [{k: v for k, v in p.describe().items() if k != "policy"} for p in points.values()]
    assert rest[0] == rest[1] == {k: v for k, v in BASE.describe().items() if k != "policy"}
    assert {family(name) for name in points} == {"cut"}


@pytest.mark.parametrize(
    ("option", "value", "place"),
    [
        ("window.width", 3, ("window", "width")),
        ("settings.max_commits_per_step", 2, ("settings", "max_commits_per_step")),
        ("quota.tokens_per_step", 4, ("quota", "tokens_per_step")),
    ],
)
def test_any_plug_has_options(option: str, value: int, place: tuple[str, str]) -> None:
    base = Decoder(policy=EntropyPolicy(), window=SlidingWindow(8), settings=DecodeSettings())
    described = with_option(base, option, value).describe()
    assert described[place[0]][place[1]] == value


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("policy.treshold", 0.5, "'policy.treshold' is unknown.* threshold"),
        ("polcy.threshold", 0.5, "'polcy.threshold' is unknown"),
        ("settings.cap", 1, "'settings.cap' is unknown"),
        ("layout.cells", 4, "'layout.cells' is unknown"),
        ("policy.threshold", 1.5, "threshold"),
    ],
)
def test_wrong_options_and_values_are_named(option: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_option(BASE, option, value)


def test_the_points_of_an_unread_policy_read_the_same_folder(tmp_path: Path) -> None:
    base = Decoder(policy=TraceLockPolicy(tmp_path, max_accept_per_step=2), quota=NoQuota())
    points = expanded(
        {}, {"learned": Sweep(decoder=base, option="policy.threshold", values=[0.5, 0.9])}
    )
    config = ProjectorConfig(hidden_size=4, hidden_rank=3, delta_rank=2, kind="random_orthogonal")
    AcceptanceScorer(Projector.random_orthogonal(config)).save(tmp_path)
    told = [point.describe()["policy"] for point in points.values()]
    assert [one.pop("threshold") for one in told] == [0.5, 0.9]
    assert told[0] == told[1]
    assert told[0]["max_accept_per_step"] == 2


def test_two_methods_of_one_name_are_refused() -> None:
    sweep = Sweep(decoder=BASE, option="policy.threshold", values=[0.5])
    with pytest.raises(ValueError, match=r"sweep\.cut: .* 'cut_05'"):
        expanded({"cut_05": BASE}, {"cut": sweep})
