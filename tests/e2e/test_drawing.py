"""Digits that the embedded picture model draws: written, graded, recorded, verified and watched."""

import base64
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from tests.e2e.runs import ON_ONE_CPU, killed, results, run, traces

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unpainted")]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawing") / "run"
    flags = ["--data.responses_per_prompt=2", "--data.methods=[draw]", "--data.batch_size=7"]
    run("predict", "--config=exp/draw_pictures", *ON_ONE_CPU, f"--run_dir={folder}", *flags)
    return folder


def test_drawn_digits_are_written_graded_and_executed_again(
    drawn: Path, capsys: pytest.CaptureFixture[str]
):
    (summary,) = json.loads((drawn / "summary.json").read_text())
    assert (summary["task"], summary["n"]) == ("digit_drawings", 20)
    assert summary["accuracy"] > 0.7
    files = sorted((drawn / "pictures/draw").glob("*.png"))
    assert len(files) == 20
    assert all(Image.open(path).size == (8, 8) for path in files)
    assert len({path.read_bytes() for path in files}) > 15  # no two are made of the same noise
    run("report", str(drawn), f"--out={drawn}")
    assert 'class="drawn" src="data:image/png;base64,' in (drawn / "report.html").read_text()
    run("traj", "verify", str(drawn / "trajectories"), "--level=3", "--backbone=tiny-pictures")
    assert "exact             │ 20" in capsys.readouterr().out


QUESTIONS = [
    {"class_path": "PictureQuestions", "init_args": {"kind": kind, "num_examples": 9}}
    for kind in ("sum", "count")
]


@pytest.mark.parametrize(
    ("configs", "method", "flag"),
    [
        (["exp/draw_pictures"], "draw", "--data.responses_per_prompt=2"),
        (
            ["exp/evaluate_tiny", "domain/pictures_test"],
            "threshold_09",
            f"--data.tasks={json.dumps(QUESTIONS)}",
        ),
    ],
)
def test_a_killed_run_with_pictures_loses_and_doubles_nothing(
    configs: list[str], method: str, flag: str, tmp_path: Path
):
    """Drawn pictures, asked ones, results and records are those of a run that nobody killed."""
    command = [
        "predict",
        *(f"--config={one}" for one in configs),
        f"--data.methods=[{method}]",
        flag,
        *ON_ONE_CPU,
    ]
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(*command, f"--run_dir={whole}")
    command += [f"--run_dir={part}", "--data.batch_size=3"]
    killed(part, *command, before=2, files="results/*/*/part-*.jsonl")
    assert 0 < sum(map(len, results(part).values())) < sum(map(len, results(whole).values()))
    run(*command)
    assert results(part) == results(whole)

    def files(folder: Path) -> dict[str, bytes]:
        found = [*folder.glob("pictures/**/*.png"), *folder.glob("trajectories/pictures/*")]
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}

    assert files(part) == files(whole) != {}
    assert traces(part / "trajectories") == traces(whole / "trajectories")


def test_drawings_are_watched_as_they_are_filled_in(drawn: Path):
    """Grey before the first step, the written file's pixels behind the last."""
    gif = drawn / "decode.gif"
    uid = "digit_drawings/test/3@draw"
    run("view", str(drawn / "trajectories"), f"--out={drawn}", f"--gif={gif}", f"--sample={uid}")
    frames = [np.array(one.convert("RGB")) for one in ImageSequence.Iterator(Image.open(gif))]
    assert len(frames) >= 9
    assert any((one != other).any() for one, other in pairwise(frames))
    text = (drawn / "traces.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    (sample,) = data["samples"]
    shown = [np.frombuffer(base64.b64decode(one), np.uint8) for one in sample["frames"]]
    assert (shown[0] == 128).all()
    written = np.array(Image.open(drawn / "pictures/draw/digit_drawings_test_3.png"))
    assert (shown[-1].reshape(8, 8, 3) == written).all()
    assert len(shown) == sample["steps"] + 1
