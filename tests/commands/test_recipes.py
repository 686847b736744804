"""The list of experiments says what each needs, and what may follow it."""

import re

import pytest

from lit_dlm.commands import recipes
from lit_dlm.config.files import FOLDER, experiments, packaged


def test_every_experiment_and_variant_is_listed_with_what_it_needs(
    capsys: pytest.CaptureFixture[str],
):
    assert recipes.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    methods = [line for line in lines if not line.startswith(" ")]
    assert methods == sorted(f"{path.name}:" for path in (FOLDER / "exp").iterdir())
    told = [line for line in lines if line not in methods]
    named = [line for line in told if re.match(r"  \w", line)]
    assert [f"exp/{line.split()[0]}" for line in named] == packaged("exp")
    assert len(told) == len(experiments())
    assert any(re.match(" +--config domain/planning +The embedded planning", line) for line in told)
    assert all("Needs: " in line for line in told)
    # No GPU's memory was measured at real size.
    assert all("(estimated)" in line for line in told if " GPU" in line.partition("Needs: ")[2])
    on_cpu = [line for line in told if "CPU core" in line]
    assert not [line for line in on_cpu if not re.search("second|minute|hour", line)]


def test_one_is_shown_with_all_that_it_takes_from_other_files(capsys: pytest.CaptureFixture[str]):
    assert recipes.main(["tracerl_tiny"]) == 0
    text = capsys.readouterr().out
    assert "run_dir: runs/tracerl_tiny" in text
    assert "defaults:" not in text
