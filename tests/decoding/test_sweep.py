from pathlib import Path

import pytest

import lit_dlm.decoding as d
from lit_dlm.decoding import Decoder
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.decoding.sweep import Sweep, expanded, with_option
from lit_dlm.reports.plots import family
from tests.decoding.models import scorer

BASE = Decoder(policy=d.ThresholdPolicy(0.9), quota=d.NoQuota(), window=d.SlidingWindow(8))


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
def test_any_plug_has_options(option: str, value: int) -> None:
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
    ],
)
def test_wrong_options_and_values_are_named(option: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_option(BASE, option, value)


def test_two_methods_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sweep\.cut: .* 'cut_05'"):
        expanded({"cut_05": BASE}, {"cut": swept(BASE, 0.5)})


def test_the_points_of_an_unread_policy_read_the_same_folder(tmp_path: Path) -> None:
    base = Decoder(policy=TraceLockPolicy(tmp_path, max_accept_per_step=2), quota=d.NoQuota())
    points = expanded({}, {"learned": swept(base, 0.5, 0.9)})
    scorer().save(tmp_path)
    told = [point.describe()["policy"] for point in points.values()]
    assert [one.pop("threshold") for one in told] == [0.5, 0.9]
    assert told[0] == told[1]
    assert told[0]["max_accept_per_step"] == 2
