"""``lit-dlm traj``: what the commands print, write and return."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lit_dlm.backbones.resolution import ASSETS
from lit_dlm.trajectories.commands import main
from lit_dlm.trajectories.store import RunRecord
from lit_dlm.trajectories.store.files import shards_in
from lit_dlm.trajectories.store.reader import TrajectoryShardReader
from tests.trajectories.decoded_sets import LENGTH, NUM_TEXTS, decoded_set, write_set
from tests.trajectories.samples import random_record

pytestmark = pytest.mark.slow  # whole commands on real shards

METHODS = ("confidence", "drawn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoded_set(tmp_path_factory.mktemp("commands") / "set", METHODS)


def plain_run() -> RunRecord:
    return RunRecord(
        model={}, tokenizer={}, decode={}, randomness={}, data={}, software={}, hardware={}
    )


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("command", ["inspect", "replay", "verify", "recover", "export", "import"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert f"usage: lit-dlm traj {command}" in capsys.readouterr().out
    assert run() == 2


def test_inspect_counts_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = list(TrajectoryShardReader(folder))
    steps = [record.num_steps for record in records]
    assert run("inspect", folder) == 0
    lines = [
        " ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.split("\n")
    ]
    for expected in (
        f"records {2 * NUM_TEXTS}",
        f"response tokens {LENGTH} to {LENGTH}, mean {LENGTH:.1f}",
        f"steps {min(steps)} to {max(steps)}, mean {np.mean(steps):.1f}",
        f"confidence {NUM_TEXTS} {LENGTH:.1f} 1.00 -",
        "digest 16.0",
    ):
        assert expected in lines
    assert "ConfidencePolicy" in " ".join(lines)


def test_replay_prints_each_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = next(iter(TrajectoryShardReader(folder)))
    assert run("replay", folder, "--tokenizer", "none", "--uid", record.uid) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{record.uid}: {record.num_steps} steps, complete")
    steps = [line for line in lines if line[:2].strip().isdigit() and line[2:4] == "  "]
    assert len(steps) == record.num_steps
    assert steps[-1].split()[1:] == [str(token) for token in record.tokens]
    assert steps[0].split().count("·") == LENGTH - 1
    assert run("replay", folder) == 0
    assert "<|user|>Tom has 34 pens" in capsys.readouterr().out


def test_verify_passes_on_the_same_model_and_fails_on_another(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0, then 1 with the changed parts named: weights and tokenizer of a folder."""
    assert run("verify", folder, "--level", 3, "--backbone", "tiny") == 0
    told = capsys.readouterr().out
    assert f"passed: level 3 (teacher-forced), {2 * NUM_TEXTS} records" in told
    assert "(100.00%)" in told
    other = tmp_path / "other"
    shutil.copytree(ASSETS / "tiny", other)
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template + " ")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 0x80  # the sign of one float16 weight
    (other / "model.safetensors").write_bytes(data)
    assert run("verify", folder, "--level", 4, "--backbone", other, "--sample", 2) == 1
    text = capsys.readouterr().out
    assert "model.weights digest" in text
    assert "tokenizer digest" in text
    assert "FAILED: level 4 (free-running)" in text


def test_verify_finds_damage_without_a_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", folder) == 0
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shard = shards_in(copy)[0]
    shard.write_bytes(shard.read_bytes()[:-600])
    capsys.readouterr()
    assert run("verify", copy, "--level", 0) == 1
    assert "bytes, got" in capsys.readouterr().out


def test_exports_come_back_through_imports(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rows.parquet", "rows.jsonl", "rows.json"):
        path, out = tmp_path / name, tmp_path / f"set-{name.partition('.')[2]}"
        assert run("export", folder, "--out", path) == 0
        assert run("import", path, "--out", out) == 0
        digests = {record.uid: record.digest() for record in TrajectoryShardReader(folder)}
        assert digests == {record.uid: record.digest() for record in TrajectoryShardReader(out)}
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert row["prompt"] == "Tom has 34 pens, finds 7, loses 5. How many pens?"
    assert sorted(row["decoding_order"]) == list(range(LENGTH)), "one token a step"
    # Parquet keeps the run, so even what was imported can be executed again.
    options = ("--level", 3, "--backbone", "tiny", "--sample", 1)
    assert run("verify", tmp_path / "set-parquet", *options) == 0
    capsys.readouterr()
    assert run("verify", tmp_path / "set-json", *options) == 2
    assert "none: it cannot be executed again" in capsys.readouterr().err


def test_misfits_stop_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    records = [random_record(rng, f"r/{i}", remask=0.5 * (i == 1)) for i in range(3)]
    folder = write_set(tmp_path / "set", records, plain_run())
    assert run("export", folder, "--out", tmp_path / "rows.jsonl", "--tokenizer", "tiny") == 2
    assert "'r/1'" in capsys.readouterr().err


def test_recover_saves_the_blocks_of_a_dead_process(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "killed"
    shutil.copytree(folder, copy)
    shard = shards_in(copy)[0]
    shard.rename(shard.with_name(shard.name + ".tmp-4194999"))
    shard.with_name(shard.name + ".json").unlink()
    assert run("recover", copy) == 0
    text = capsys.readouterr().out
    assert f"{2 * NUM_TEXTS} records in 1 shards" in text
    assert run("verify", copy) == 0
    assert run("recover", copy) == 0
    assert "nothing to recover" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "nowhere"), "nowhere: there is no such shard"),
        (("inspect", "{empty}"), "there is no such shard or folder"),
        (("verify", "{set}", "--level", "3"), "--backbone: level 3 executes the records"),
        (("verify", "{set}", "--level", "7"), "invalid choice: 7"),
        (("verify", "{set}", "--level", "3", "--backbone", "nope"), "nope"),
        (("verify", "{set}", "--sample", "0"), "--sample: expected at least 1, got 0"),
        (("replay", "{set}", "--uid", "task/test/0"), "did you mean task/test/0@confidence"),
        (("replay", "{set}", "--uid", "zz"), "is 'zz'; did you mean task/"),
        (("export", "{set}", "--out", "x.csv"), "--out: expected one of the endings"),
        (("import", "x.jsonl", "--out", "y"), "x.jsonl"),
        (("import", "a.dtrace", "--out", "y"), "FILE: expected one of the endings"),
        (("recover", "nowhere"), "there is no such folder"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.dtrace").write_bytes(b"")
    places = {"set": folder, "empty": tmp_path / "empty"}
    assert run(*(argument.format(**places) for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_imported_ids_that_end_before_their_steps_need_a_pad_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ids of three steps, as TABOM's release leaves out trailing pads."""
    path = tmp_path / "rows.jsonl"
    row = {"prompt_token_ids": [5], "response_token_ids": [7, 8], "decoding_order": [1, 0, 2]}
    path.write_text(json.dumps(row) + "\n")
    given = ("import", path, "--out", tmp_path / "set", "--mask_id", 2, "--vocab_size", 30)
    assert run(*given) != 0
    assert "rows.jsonl:1: the row has no pad_id; give --pad_id" in capsys.readouterr().err
    assert run(*given, "--pad_id", 0) == 0
    (record,) = TrajectoryShardReader(tmp_path / "set")
    assert record.tokens.tolist() == [7, 8, 0]
    assert record.commit_step.tolist() == [1, 0, 2]
