import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lit_dlm.reports.profile import log_profile, profile_row, write_profile
from lit_dlm.reports.summary import MethodSummary


def summary(method: str, *, nfe: float, seconds: float, accuracy: float | None = 0.75, **changes):
    zeros = ("policy_forwards", "policy_share", "idle_steps", "unfinished", "timeouts")
    values = {"task": "sums", "method": method, "n": 48, "accuracy": accuracy, "nfe": nfe}
    values |= {"interval": None if accuracy is None else (0.625, 0.875), "seconds": seconds}
    values |= {"tokens_per_step": 32 / nfe, "useful_tokens_per_step": 20 / nfe}
    return MethodSummary(**{**values, **dict.fromkeys(zeros, 0.0), **changes})


SUMMARIES = [
    summary("entropy-8", nfe=8.0, seconds=0.02),
    summary("entropy-16", nfe=16.0, seconds=0.04, accuracy=0.875),
    summary("jacobi-dual-8", nfe=7.5, seconds=0.01, lockstep=0.8),
]


def test_speeds_follow_from_the_summary():
    """32 cells in 0.02 s are 1600 a second, 20 useful ones 1000."""
    first, _, third = map(profile_row, SUMMARIES)
    names = ("tokens_per_second", "useful_tokens_per_second", "ms_per_sample", "tokens_per_forward")
    assert [first[name] for name in names] == pytest.approx([1600, 1000, 20, 4])
    assert [first["curve"], third["curve"]] == ["entropy", "jacobi-dual"]
    assert (first["lockstep"], third["lockstep"]) == (None, 0.8)


@pytest.mark.slow
def test_a_profile_is_a_file_a_table_and_a_picture_without_grades_too(tmp_path: Path):
    write_profile([*SUMMARIES, summary("entropy-8", nfe=8, seconds=1, task="other")], tmp_path)
    with (tmp_path / "profile.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows[:3]] == ["entropy-8", "entropy-16", "jacobi-dual-8"]
    assert float(rows[1]["accuracy"]) == 0.875
    assert rows[0]["lockstep"] == ""
    table = (tmp_path / "profile.md").read_text()
    assert table.count("### ") == 2
    line = "| entropy-8 | 75.0 % [62.5, 87.5] | 8.0 | 4.00 | 1600 | 1000 | 20.0 | - | 48 |"
    assert line in table.splitlines()
    assert (tmp_path / "profile.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    ungraded = [summary("entropy-8", nfe=8, seconds=1, accuracy=None)]
    write_profile(ungraded, tmp_path)
    assert "| entropy-8 | - | 8.0 |" in (tmp_path / "profile.md").read_text()


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    write_profile(SUMMARIES, folder)
    return folder / "profile.png"


def test_points_are_logged_over_forwards(tmp_path: Path, picture: Path):
    log_profile(CSVLogger(tmp_path, name="logs", version=""), SUMMARIES, picture)
    with (tmp_path / "logs" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {int(row["step"]): row["sums/entropy/accuracy"] for row in rows}
    assert {step: value for step, value in found.items() if value} == {8: "0.75", 16: "0.875"}
    assert any(row["sums/jacobi-dual/lockstep"] == "0.8" for row in rows)
