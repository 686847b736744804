"""Questions about pictures through the command line, on a twin of LLaDA-V."""

from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image

from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.e2e.runs import ON_ONE_CPU, fails, run, write_jsonl
from tests.twins import write_twin

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unpainted")]
RELEASE = "GSAI-ML/LLaDA-V"
ROWS = [
    {"id": 0, "prompt": "What is it?", "answer": "x", "images": ["0.png"]},
    {"id": 1, "prompt": "And without?", "answer": "x"},
    {"id": 2, "prompt": "Is <image> like <image>?", "answer": "x", "images": ["1.png", "0.png"]},
]


@pytest.fixture(autouse=True)
def folder(twin: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(twin)
    return twin


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_twin(path / RELEASE, RELEASE, hidden_size=16, num_ordinary=2000)
    for number, size in enumerate([(50, 40), (90, 30)]):
        Image.radial_gradient("L").resize(size).save(path / f"{number}.png")
    write_jsonl(path / "questions.jsonl", ROWS)
    return path


def command(name: str, *flags: str, file: str = "questions.jsonl") -> list[str]:
    return [
        "predict",
        "--config=exp/benchmark_llada_v",
        *ON_ONE_CPU,
        f"--run_dir={name}",
        "--model.level=tokens",
        f"--data.tasks=[{{class_path: PromptsFile, init_args: {{path: {file}, grading: exact}}}}]",
        *("--data.methods=[static]", "--data.response_length=32", "--data.responses_per_prompt=1"),
        *flags,
    ]


def test_decodes_about_pictures_are_recorded_and_verified(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    run(*command("one", "--data.batch_size=1"))
    run(*command("two", "--data.batch_size=2"))
    one, two = (
        {record.uid: record for record in TrajectoryShardReader(f"{name}/trajectories")}
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    assert all((one[uid].tokens == two[uid].tokens).all() for uid in one)
    counts = [len(one[f"prompts/test/{n}@static"].meta.get("images", ())) for n in range(3)]
    assert counts == [1, 0, 2]
    pictures = folder / "one/trajectories/pictures"
    digests = {sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.png")}
    assert {path.name for path in pictures.iterdir()} == digests

    verify = ["traj", "verify", "one/trajectories", "--level=3", f"--backbone={RELEASE}"]
    capsys.readouterr()
    run(*verify)
    assert "exact             │ 3" in capsys.readouterr().out
    first, second = sorted(pictures.iterdir())
    first.write_bytes(second.read_bytes())
    assert "the picture is damaged: it has another digest" in fails(capsys, *verify)


def test_pictures_that_do_not_fit_are_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    data = (folder / "0.png").read_bytes()
    (folder / "half.png").write_bytes(data[: len(data) // 2])
    write_jsonl(folder / "half.jsonl", [{**ROWS[0], "images": ["half.png"]}])
    told = fails(capsys, *command("half", file="half.jsonl"))
    assert "prompts/test/0: half.png: the picture is damaged" in told
    blind = command("blind", "--model.backbone.vision=null")
    assert "expected a model that sees them (model.backbone.vision)" in fails(capsys, *blind)
