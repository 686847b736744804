import csv
from itertools import product
from pathlib import Path

import pytest

from lit_dlm.commands.profile import decode_arguments, grid, main, policy_files
from tests.e2e.runs import ROOT, problems

DECODE = ROOT / "configs" / "decode"


def test_every_policy_is_crossed_with_every_cache_and_budget():
    policies = {"sure": DECODE / "threshold_09.yaml"}
    config = grid(policies, [5, "adaptive", 50], ["none", "dual"])
    assert config["data"]["init_args"]["methods"] == [
        *("sure_adaptive", "sure_5", "sure_50"),
        *("sure-dual_adaptive", "sure-dual_5", "sure-dual_50"),
    ]
    model = config["model"]["init_args"]
    policy = {"class_path": "ThresholdPolicy", "init_args": {"threshold": 0.9}}
    # Adaptive: as in the file. A budget replaces the file's quota.
    assert model["decoders"]["sure_adaptive"] == {"policy": policy, "quota": "NoQuota"}
    budget = {"class_path": "BudgetQuota", "init_args": {"steps": 5}}
    assert model["sweep"]["sure-dual"] == {
        "decoder": {"policy": policy, "quota": budget, "cache": {"class_path": "DualCache"}},
        "option": "quota.steps",
        "values": [5, 50],
    }


def test_without_caches_that_of_the_file_stays_and_its_files_are_found_from_anywhere():
    def decoder(*caches: list[str]) -> dict:
        found = grid({"dual": DECODE / "confidence_dual.yaml"}, [4], *caches)
        return found["model"]["init_args"]["sweep"]["dual"]["decoder"]

    assert decoder()["cache"] == {"class_path": "DualCache"}
    assert "cache" not in decoder(["none"])
    sampler_and_cache = decode_arguments(DECODE / "block_static.yaml")
    assert sampler_and_cache["cache"]["class_path"] == "BlockCache"


def test_files_are_named_by_their_stems_or_as_asked():
    path = str(DECODE / "entropy.yaml")
    assert policy_files([path, f"low={path}"]) == {"entropy": Path(path), "low": Path(path)}
    with pytest.raises(ValueError, match="are both named 'entropy'"):
        policy_files([path, path])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies"], "expected at least one argument"),
        (["--steps", "0"], "argument --steps: "),
        (["--steps", "all"], "got all"),
        (["--caches", "kv"], "invalid choice: 'kv'"),
        (["--steps", "5"], "apply to the files of --policies"),
        (["--policies", "none.yaml"], "configuration 'none.yaml': expected a file"),
    ],
)
def test_wrong_options_stop_before_the_work(options: list[str], message: str, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        main(["--config", "exp.yaml", *options])
    assert message in f"{error.value}{capsys.readouterr().err}"


@pytest.mark.slow
def test_a_profile_of_the_embedded_model_from_the_command_line(tmp_path: Path):
    """One problem: budgets are kept, and methods with regions report how evenly they filled."""
    halves = f"{{defaults: {DECODE}/threshold_09.yaml, layout: {DECODE}/layout/halves.yaml}}"
    (tmp_path / "halves.yaml").write_text(halves)
    policies = (str(tmp_path / "halves.yaml"), str(DECODE / "entropy.yaml"))
    options = ("--steps", "4", "adaptive", "--caches", "none", "dual", "--policies", *policies)
    given = (f"--data.init_args.tasks={problems(1)}", "--run_dir", str(tmp_path / "run"))
    assert main(["--config", "exp/evaluate_tiny", *given, *options]) == 0
    with (tmp_path / "run" / "profile.csv").open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    names = product(("halves", "entropy"), ("", "-dual"), ("_4", "_adaptive"))
    assert set(rows) == set(map("".join, names))
    for method, row in rows.items():
        assert row["n"] == "1"
        assert float(row["tokens_per_second"]) > 0
        assert method.endswith("adaptive") or float(row["nfe"]) <= 4
        assert (row["lockstep"] != "") == method.startswith("halves")
    assert [float(rows[f"entropy_{n}"]["nfe"]) for n in (4, "adaptive")] == [4, 32]
    for name in ("profile.md", "profile.png", "summary.md"):
        assert (tmp_path / "run" / name).is_file()
