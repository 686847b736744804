from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

import cli
from lit_dlm.profile.command import main
from tests.e2e.runs import ROOT, write_config

DECODE = ROOT / "configs" / "decode"

CONFIG = """
trainer:
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  callbacks:
  - class_path: ResultWriter
    init_args:
      run_dir: ${{run_dir}}
model:
  class_path: DecodeModule
  init_args:
    backbone: {root}/configs/backbone/tiny.yaml
    tokenizer: tiny
data:
  class_path: PromptDataModule
  init_args:
    tasks:
    - class_path: WordProblems
      init_args: {{split: test, num_examples: 6}}
    response_length: 32
    batch_size: 6
    results_dir: ${{run_dir}}/results
"""


def test_what_predict_is_asked_to_do(tmp_path: Path):
    """The grid lies beside the results; other options are passed on as they are."""
    asked: list[list[str]] = []
    policy = str(DECODE / "entropy.yaml")
    arguments = ["--config", "exp.yaml", "--run_dir", str(tmp_path), "--policies", policy]
    with pytest.raises(ValueError, match=r"expected results in .*, found none"):
        main([*arguments, "--steps", "5", "--trainer.accelerator", "cpu"], predict=asked.append)
    grid = tmp_path / "grid.yaml"
    assert asked == [
        [
            *("predict", "--config", "exp.yaml", "--config", str(grid)),
            *("--run_dir", str(tmp_path), "--trainer.accelerator", "cpu"),
        ]
    ]
    assert yaml.safe_load(grid.read_text())["data"]["init_args"]["methods"] == ["entropy_5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "5"], "apply to the files of --policies, which were not given"),
        (["--policies", "none.yaml"], "policies: there is no file none.yaml"),
    ],
)
def test_wrong_options_stop_before_the_work(tmp_path: Path, arguments, message):
    def never(command: list[str]) -> None:
        raise AssertionError(command)

    with pytest.raises(ValueError, match=message):
        main(["--config", "exp.yaml", "--run_dir", str(tmp_path), *arguments], predict=never)


@pytest.mark.slow
def test_a_profile_of_the_embedded_model_from_the_command_line(tmp_path: Path):
    """Six problems: budgets are kept, and methods with regions report how evenly they filled."""
    config = write_config(tmp_path / "exp.yaml", CONFIG.format(root=ROOT))
    arguments = ["--config", config, "--run_dir", str(tmp_path / "run"), "--policies"]
    arguments += [f"gs={DECODE / 'lockstep_gauss_seidel.yaml'}", str(DECODE / "entropy.yaml")]
    arguments += ["--steps", "4", "8", "adaptive", "--caches", "none", "dual", "--loggers", "csv"]
    assert main(arguments, predict=cli.main) == 0
    with (tmp_path / "run" / "profile.csv").open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == {
        f"{policy}{cache}-{steps}"
        for policy in ("gs", "entropy")
        for cache in ("", "-dual")
        for steps in (4, 8, "adaptive")
    }
    for method, row in rows.items():
        assert row["n"] == "6"
        assert float(row["tokens_per_second"]) > 0
        steps = method.rsplit("-", 1)[1]
        if steps != "adaptive":
            assert float(row["nfe"]) <= int(steps)
        assert (row["lockstep"] != "") == method.startswith("gs")
    assert [float(rows[f"entropy-{n}"]["nfe"]) for n in (4, 8, "adaptive")] == [4, 8, 32]
    for name in ("profile.md", "profile.png", "summary.md", "profile_csv/metrics.csv"):
        assert (tmp_path / "run" / name).is_file()
