"""Pages for what people bring run as they stand: their files, their commands, what these print.

Here on less data, so that only the words of an output are compared; with ``-m docs`` in full.
"""

import json
import logging
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cli
from tests.e2e.runs import OWN_PAGES, ROOT, problems, write_jsonl
from tests.twins import write_autoregressive

pytestmark = pytest.mark.slow
PAGES = {path.stem: path for path in OWN_PAGES}
BLOCK = re.compile(r"(?:`(\w+\.\w+)`[^`]*:\n\n)?^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""A block, with the name of a file where the words before it end in one."""
ROWS = 8
SMALLER = {
    "exp/own_data": ("--trainer.max_steps=2",),
    "exp/sft_from_ar": ("--trainer.max_steps=2",),
    "exp/tracelock_tiny": (
        *("--trainer.max_steps=4", "--trainer.val_check_interval=2", "--data.val_fraction=0.5"),
    ),
    "exp/generate_tiny": ("--model.hidden_rank=8", "--model.delta_rank=4"),
    "exp/tracerl_tiny": ("--data.prompts_per_step=4", "--data.filters=null"),
}
"""Flags of less work, by experiment."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder beside a checkout's examples."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [path for path in sys.path if path])
        yield folder


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Gives all that was printed and logged since the last call."""
    caplog.set_level(logging.INFO)

    def since() -> str:
        logged = caplog.text
        caplog.clear()
        return "".join([*capsys.readouterr(), logged])

    return since


def run(page: str, told: Callable[[], str], *, in_full: bool) -> None:
    """Writes a page's files, runs its commands, and compares what they print with what it shows."""
    output = ""
    for name, kind, text in BLOCK.findall(PAGES[page].read_text()):
        if name:
            Path(name).write_text(text)
        elif kind == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line)
                obey(words if in_full else less(words, page))
                for path in Path().glob("*.jsonl") if not in_full else ():
                    path.write_text("".join(path.read_text().splitlines(keepends=True)[:ROWS]))
            output = told()
        elif kind == "text" and output:
            printed = [plain(line, in_full=in_full) for line in output.splitlines()]
            for line in text.splitlines():
                assert any(plain(line, in_full=in_full) in one for one in printed), line


def less(words: list[str], page: str) -> list[str]:
    added = [flag for name, flags in SMALLER.items() if name in words for flag in flags]
    if page in ("own_policy", "own_window") and "predict" in words:
        added += [f"--data.tasks={problems(ROWS)}"]
    return [*words, *added]


def obey(words: list[str]) -> None:
    if words[0] == "cp":
        shutil.copy(*words[1:])
    elif words[0] == "python":
        runpy.run_path(words[1])
    else:
        assert words[0] == "lit-dlm"
        try:
            code = cli.main(words[1:])
        except SystemExit as done:  # of --print_config
            code = done.code
        assert not code


def plain(line: str, *, in_full: bool) -> str:
    """A line with single spaces; unless all was run in full, every number is alike."""
    if not in_full:
        line = re.sub(r"(< )?[-+]?\d[\d.]*", "0", line)
    return " ".join(line.split())


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"own_model"}))
def test_a_page_runs(page: str, desk: Path, told: Callable[[], str]):
    run_anew(page, desk, told, in_full=False)


@pytest.mark.docs
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"own_model"}))
def test_a_page_shows_what_its_commands_print(page: str, desk: Path, told: Callable[[], str]):
    run_anew(page, desk, told, in_full=True)


def run_anew(page: str, desk: Path, told: Callable[[], str], *, in_full: bool) -> None:
    shutil.rmtree(desk / "runs", ignore_errors=True)
    if page == "own_benchmark":  # it compares with the adapter of this one
        run("own_data", told, in_full=in_full)
    run(page, told, in_full=in_full)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_a_checkpoint_becomes_a_diffusion_model(
    model_type: str, desk: Path, told: Callable[[], str]
):
    write_answers(desk)
    for folder in ("qwen", "runs/sft_from_ar"):
        shutil.rmtree(desk / folder, ignore_errors=True)
    write_autoregressive(desk / "qwen", model_type)
    run("own_model", told, in_full=False)
    made = json.loads((desk / "runs/sft_from_ar/model/config.json").read_text())
    assert made["lit_dlm"]["block_size"] == 4
    # What it wrote is a model to adapt, as the page says.
    adapted = "fit --config exp/own_data --model.backbone.path runs/sft_from_ar/model"
    flags = f"--data.path chat.jsonl --run_dir runs/adapted_{model_type} --trainer.max_steps 1"
    cli.main([*adapted.split(), *flags.split()])
    assert (desk / f"runs/adapted_{model_type}/adapter/adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("lacks", "expected"),
    [
        ("from_ar", "start from it with from_ar"),
        ("chat_template", "plain: expected a tokenizer with a chat template, got none; put a chat"),
        ("eos", "model.backbone.spec_overrides: expected eos_ids, as the model's files name none"),
    ],
)
def test_what_a_checkpoint_lacks_is_one_line(
    lacks: str, expected: str, desk: Path, capsys: pytest.CaptureFixture[str]
):
    write_answers(desk)
    shutil.rmtree(desk / "plain", ignore_errors=True)
    write_autoregressive(desk / "plain")
    name = "own_data" if lacks == "from_ar" else "sft_from_ar"
    for path in (desk / "plain").glob(f"{lacks}*"):
        path.unlink()
    for path in (desk / "plain").glob("*.json"):
        fields = json.loads(path.read_text())
        kept = {key: value for key, value in fields.items() if not key.startswith(lacks)}
        path.write_text(json.dumps(kept))
    flags = "--model.backbone.path plain --data.path chat.jsonl --run_dir runs/plain"
    with pytest.raises(SystemExit):
        cli.main(["fit", "--config", f"exp/{name}", *flags.split()])
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "error" in one]
    assert expected in line


def write_answers(folder: Path) -> None:
    rows = [{"prompt": f"{n}+1?", "response": f"{n + 1}"} for n in range(ROWS)]
    write_jsonl(folder / "chat.jsonl", rows)
