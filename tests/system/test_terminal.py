"""Texts of others are shown and never obeyed: by every command that prints some, and in pages."""

import io
import logging
import sys
import unicodedata
from pathlib import Path

import pytest
from rich.table import Table
from transformers.utils.chat_template_utils import render_jinja_template

from lit_dlm import cli
from lit_dlm.commands import generation, traj
from lit_dlm.reports import command, viewer_command
from lit_dlm.system.terminal import PlainConsole, printable
from tests.reports.sample_sets import record, write_run

EVIL = "t/test/\x1b]0;x\x07[/bold]\u202e:smile:"
SHOWN = r"t/test/\x1b]0;x\x07[/bold]\u202e:smile:"


def test_control_and_direction_characters_are_escaped_and_texts_are_not():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = printable(every)
    assert {c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} == {"\n", "\t"}
    kinds = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    marks = {c for c in every if unicodedata.bidirectional(c) in kinds}
    assert len(marks) == 9
    assert not marks & set(shown)
    text = "Zürich, 你好,\tשמך\n👩\u200d🚀 \\x1b"
    assert printable(text) == text


def test_a_console_shows_markup_in_lines_and_cells():
    console = PlainConsole(file=io.StringIO(), width=200)
    table = Table(title=EVIL)
    table.add_row(EVIL)
    console.print(EVIL, style="bold")
    console.print(table)
    assert console.file.getvalue().count(SHOWN) == 3


@pytest.fixture(autouse=True)
def _hooks_of_the_process(monkeypatch: pytest.MonkeyPatch):
    """Restores what the command line sets for its process."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


def test_messages_and_tracebacks_of_any_library_are_escaped(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["view", "absent"])
    capsys.readouterr()
    library = logging.getLogger("a_library")
    library.propagate = False  # as transformers, it shows its messages itself
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("[a_library] %(message)s"))
    library.addHandler(shown)
    library.warning("%s: left out", EVIL)
    assert capsys.readouterr().err == f"[a_library] {SHOWN}: left out\n"
    template = "{{ raise_exception(evil) }}"
    try:
        render_jinja_template([[]], chat_template=template, evil=EVIL)
    except Exception as error:
        library.exception("failed")
        sys.excepthook(type(error), error, error.__traceback__)
    told = capsys.readouterr().err
    assert told.count(f"TemplateError: {SHOWN}") == 2
    assert told.count("Traceback (most recent call last)") == 2
    assert not set("\x1b\x07\u202e") & set(told)
    library.removeHandler(shown)


def test_errors_are_escaped(capsys: pytest.CaptureFixture[str]):
    for words in (["view"], ["fit", "--config"], ["traj", "replay"]):
        with pytest.raises(SystemExit):
            cli.main([*words, EVIL])
    assert not set("\x1b\x07\u202e") & set(capsys.readouterr().err)


@pytest.mark.slow
def test_commands_and_pages_show_strange_uids(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path, [record([10, 11], [0, 1], uid=f"{EVIL}|{n}@m") for n in (0, 1)])
    traces, shown = str(tmp_path / "trajectories"), rf"{SHOWN}|1@m"
    told = ["--uid", f"{EVIL}|1@m", "--tokenizer", "none"]
    assert traj.main(["replay", traces, *told]) == 0
    assert f"{shown}: 2 steps" in capsys.readouterr().out
    assert traj.main(["replay", traces, "--uid", "absent"]) == 2
    assert SHOWN in capsys.readouterr().err
    drawn = tmp_path / "order.png"
    viewer_command.main([str(tmp_path), "--order", str(drawn), "--tokenizer", "none"])
    assert SHOWN in capsys.readouterr().out
    command.main([str(tmp_path)])
    text = (tmp_path / "report.md").read_text() + (tmp_path / "summary.md").read_text()
    assert r"t/test/\\x1b]0;x" not in text
    assert not set("\x1b\x07\u202e") & set(text + capsys.readouterr().out)
    assert r"\|1" in text


@pytest.mark.slow
def test_what_a_model_wrote_is_shown(monkeypatch, capsys: pytest.CaptureFixture[str]):
    class Done:
        texts, num_steps = (EVIL,), (3,)

    monkeypatch.setattr(generation, "generate", lambda *_, **__: Done)
    assert generation.main(["?", "--backbone", "tiny"]) == 0
    assert capsys.readouterr().out == f"{SHOWN}\n"
