from __future__ import annotations

from pathlib import Path

import pytest

from lit_dlm.profile.grid import Grid, decode_arguments, policy_files

ROOT = Path(__file__).resolve().parents[2]
DECODE = ROOT / "configs" / "decode"


def test_every_policy_is_crossed_with_every_cache_and_budget():
    grid = Grid(
        policies={"sure": DECODE / "threshold_09.yaml"},
        steps=[5, "adaptive", 50],
        caches=["none", "dual"],
    )
    config = grid.config()
    assert config["data"]["init_args"]["methods"] == [
        *("sure-adaptive", "sure_5", "sure_50"),
        *("sure-dual-adaptive", "sure-dual_5", "sure-dual_50"),
    ]
    model = config["model"]["init_args"]
    policy = {"class_path": "ThresholdPolicy", "init_args": {"threshold": 0.9}}
    # Adaptive: as in the file. A budget replaces the file's quota.
    assert model["decoders"]["sure-adaptive"] == {"policy": policy, "quota": "NoQuota"}
    assert model["sweep"]["sure-dual"] == {
        "decoder": {
            "policy": policy,
            "quota": {"class_path": "BudgetQuota", "init_args": {"steps": 5}},
            "cache": {"class_path": "DualCache"},
        },
        "option": "quota.steps",
        "values": [5, 50],
    }


def test_without_caches_that_of_the_file_stays_and_its_files_are_found_from_anywhere():
    grid = Grid(policies={"dual": DECODE / "confidence_dual.yaml"}, steps=[4])
    decoder = grid.config()["model"]["init_args"]["sweep"]["dual"]["decoder"]
    assert decoder["cache"] == {"class_path": "DualCache"}
    removed = Grid(policies={"dual": DECODE / "confidence_dual.yaml"}, steps=[4], caches=["none"])
    assert "cache" not in removed.config()["model"]["init_args"]["sweep"]["dual"]["decoder"]
    layout = decode_arguments(DECODE / "lockstep_jacobi.yaml")["layout"]
    assert layout["class_path"] == "FractionLayout"


def test_files_are_named_by_their_stems_or_as_asked():
    path = str(DECODE / "entropy.yaml")
    assert policy_files([path, f"low={path}"]) == {"entropy": Path(path), "low": Path(path)}
    with pytest.raises(ValueError, match="are both named 'entropy'"):
        policy_files([path, path])
    with pytest.raises(ValueError, match=r"'nowhere\.yaml': expected a file"):
        policy_files(["nowhere.yaml"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "expected a mapping, got list"),
        ("quota: NoQuota\n", "expected a decode file with a policy"),
        ("", "expected a decode file with a policy, got"),
        ("policy: [", "expected the node content"),
    ],
)
def test_files_that_describe_no_decoder_are_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        decode_arguments(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_decode_file_may_name_its_class(tmp_path: Path):
    path = tmp_path / "some.yaml"
    path.write_text("class_path: Decoder\ninit_args: {policy: EntropyPolicy}\n")
    assert decode_arguments(path) == {"policy": "EntropyPolicy"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": {}}, "expected at least one policy"),
        ({"steps": []}, "one number of steps"),
        ({"steps": [0]}, "steps: expected numbers of at least 1 or 'adaptive', got 0"),
        ({"steps": ["all"]}, "got 'all'"),
        ({"caches": ["kv"]}, "caches: expected some of none, prefix, dual, block, got 'kv'"),
    ],
)
def test_bad_grids_are_refused(changes: dict[str, object], message: str):
    values = {"policies": {"a": Path("a.yaml")}, "steps": [5], **changes}
    with pytest.raises(ValueError, match=message):
        Grid(**values)  # type: ignore[arg-type]
