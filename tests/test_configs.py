"""Trainer, backbone and decode files parse; tests/e2e/test_experiments.py runs the experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

import cli

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow  # every case builds the whole command line
TRAINERS = sorted((ROOT / "configs" / "trainer").glob("*.yaml"))


def _print_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as done:
        cli.main([*arguments, "--print_config"])
    output = capsys.readouterr()
    assert done.value.code == 0, output.err
    return output.out


@pytest.mark.parametrize("path", TRAINERS, ids=lambda path: path.stem)
def test_trainer_parses_on_top_of_an_experiment(path: Path, capsys):
    base = ROOT / "configs" / "exp" / "benchmark_tiny.yaml"
    text = _print_config(capsys, "predict", "--config", str(base), "--config", str(path))
    assert "accelerator:" in text


def test_every_backbone_and_decode_file_is_valid_on_its_own(capsys):
    base = str(ROOT / "configs" / "exp" / "benchmark_tiny.yaml")
    for path in sorted((ROOT / "configs" / "backbone").glob("*.yaml")):
        flag = f"--model.init_args.backbone={path}"
        assert "HFBackbone" in _print_config(capsys, "predict", "--config", base, flag)


def test_run_dir_reaches_everything_that_refers_to_it(capsys):
    base = str(ROOT / "configs" / "exp" / "benchmark_tiny.yaml")
    text = _print_config(capsys, "predict", "--config", base, "--run_dir", "elsewhere")
    assert "results_dir: elsewhere/results" in text
    assert "path: elsewhere/policy" in text
    assert "runs/" not in text
