"""``lit-dlm traj``: what the commands print, write and return."""

import gzip
import json
import shutil

import numpy as np
import pytest

from lit_dlm.backbones import load_backbone
from lit_dlm.backbones.location import ASSETS
from lit_dlm.commands.traj import main
from lit_dlm.reports import viewer_command as view
from lit_dlm.trajectories.store.files import shards_in
from lit_dlm.trajectories.tools.recorder import foreign_run
from tests.trajectories.decoded_sets import DECODERS, LENGTH, NUM_TEXTS, decoded_set
from tests.trajectories.samples import (
    flip,
    random_record,
    read_all,
    records_of,
    run_record,
    write_shards,
)

pytestmark = pytest.mark.slow  # whole commands on real shards


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A set of a model, one with a record that other formats cannot hold, and no set."""
    names = ("set", "misfits", "empty")
    found = {name: tmp_path_factory.mktemp("commands") / name for name in names}
    decoders = {name: DECODERS[name] for name in ("confidence", "drawn")}
    decoded_set(found["set"], decoders, load_backbone("tiny"))
    rng = np.random.default_rng(1)
    records = [random_record(rng, f"r/{i}", remask=0.5 * (i == 1)) for i in range(3)]
    write_shards(found["misfits"], records)
    found["empty"].mkdir()
    return found


@pytest.fixture(scope="module")
def folder(places):
    return places["set"]


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_every_command_explains_itself(capsys):
    for command in ("inspect", "replay", "verify", "recover", "export", "import"):
        assert run(command, "--help") == 0
        assert f"usage: lit-dlm traj {command}" in capsys.readouterr().out
    assert run() == 2


def test_inspect_counts_what_is_there(folder, capsys):
    steps = [record.num_steps for record in read_all(folder)]
    assert run("inspect", folder) == 0
    told = capsys.readouterr().out.replace("│", " ")
    lines = [" ".join(line.split()) for line in told.split("\n")]
    for expected in (
        f"records {2 * NUM_TEXTS}",
        f"response tokens {LENGTH} to {LENGTH}, mean {LENGTH:.1f}",
        f"steps {min(steps)} to {max(steps)}, mean {np.mean(steps):.1f}",
        f"confidence {NUM_TEXTS} {LENGTH:.1f} 1.00 -",
        "digest 16.0",
    ):
        assert expected in lines
    assert "ConfidencePolicy" in " ".join(lines)


def test_replay_prints_each_step(folder, capsys):
    record = read_all(folder)[0]
    assert run("replay", folder, "--tokenizer", "none", "--uid", record.uid) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{record.uid}: {record.num_steps} steps, complete")
    steps = [line for line in lines if line[:2].strip().isdigit() and line[2:4] == "  "]
    assert len(steps) == record.num_steps
    assert steps[-1].split()[1:] == [str(token) for token in record.tokens]
    assert steps[0].split().count("·") == LENGTH - 1
    assert run("replay", folder) == 0
    assert "<|user|>Tom has 34 pens" in capsys.readouterr().out


def test_records_of_a_foreign_loop_are_shown_as_ids(tmp_path, capsys):
    """Its run names no tokenizer; formats that hold texts need one."""
    write_shards(tmp_path, records_of(1), run=foreign_run("loop", "it is not described"))
    (record,) = read_all(tmp_path)
    assert run("replay", tmp_path) == 0
    ids = [str(token) for token in record.prompt_ids]
    assert capsys.readouterr().out.splitlines()[1] == f"[{', '.join(ids)}]"
    assert view.main([str(tmp_path)]) == 0
    assert f'" {record.tokens[0]}"' in (tmp_path / "traces.html").read_text()
    assert run("export", tmp_path, "--out", tmp_path / "x.jsonl") == 2
    assert "--tokenizer: .jsonl holds texts; name one" in capsys.readouterr().err


def test_verify_passes_on_the_same_model_and_fails_on_another(folder, tmp_path, capsys):
    """Exit status 0, then 1 with the changed parts named: weights and tokenizer of a folder."""
    assert run("verify", folder, "--level", 3, "--backbone", "tiny") == 0
    told = capsys.readouterr().out
    assert f"passed: level 3 (teacher-forced), {2 * NUM_TEXTS} records" in told
    assert "(100.00%)" in told
    other = shutil.copytree(ASSETS / "tiny", tmp_path / "other")
    with (other / "chat_template.jinja").open("a") as template:
        template.write(" ")
    flip(other / "model.safetensors", -1, 0x80)  # the sign of one float16 weight
    assert run("verify", folder, "--level", 4, "--backbone", other, "--sample", 2) == 1
    text = capsys.readouterr().out
    for part in ("model.weights digest", "tokenizer digest", "FAILED: level 4 (free-running)"):
        assert part in text


def test_exports_come_back_through_imports(folder, tmp_path, capsys):
    digests = {record.uid: record.digest() for record in read_all(folder)}
    for kind in ("parquet", "jsonl", "json"):
        path, out = tmp_path / f"rows.{kind}", tmp_path / f"set-{kind}"
        assert run("export", folder, "--out", path) == 0
        assert run("import", path, "--out", out) == 0
        assert digests == {record.uid: record.digest() for record in read_all(out)}
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert row["prompt"] == "Tom has 34 pens, finds 7, loses 5. How many pens?"
    assert sorted(row["decoding_order"]) == list(range(LENGTH)), "one token a step"
    # Parquet keeps the run, so even what was imported can be executed again.
    options = ("--level", 3, "--backbone", "tiny", "--sample", 1)
    assert run("verify", tmp_path / "set-parquet", *options) == 0
    capsys.readouterr()
    assert run("verify", tmp_path / "set-json", *options) == 2
    assert "none: it cannot be executed again" in capsys.readouterr().err


def test_recover_saves_what_verify_misses_of_a_dead_process(copy, capsys):
    (shard,) = shards_in(copy)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-600])
    assert run("verify", copy, "--level", 0) == 1
    assert "bytes, got" in capsys.readouterr().out
    shard.with_name(shard.name + ".tmp-4194999").write_bytes(whole)
    shard.unlink()
    shard.with_name(shard.name + ".json").unlink()
    assert run("recover", copy) == 0
    assert f"{2 * NUM_TEXTS} records in 1 shards" in capsys.readouterr().out
    assert run("verify", copy) == 0
    assert run("recover", copy) == 0
    assert "nothing to recover" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("inspect nowhere", "nowhere: there is no such shard"),
        ("inspect {empty}", "there is no such shard or folder"),
        ("inspect {set}/..", "folder with shards; there are some in its "),
        ("verify {set} --level 3", "--backbone: level 3 executes the records"),
        ("verify {set} --level 3 --backbone nope", "nope"),
        ("verify {set} --sample 0", "--sample: expected at least 1, got 0"),
        ("replay {set} --uid task/test/0", "did you mean task/test/0@confidence"),
        ("replay {set} --uid zz", "is 'zz'; did you mean task/"),
        ("export {set} --out x.csv", "--out: expected one of the endings"),
        ("export {misfits} --out x.jsonl --tokenizer tiny", "'r/1'"),
        ("import x.jsonl --out y", "x.jsonl"),
        ("import a.dtrace --out y", "FILE: expected one of the endings"),
        ("recover nowhere", "there is no such folder"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(places, tmp_path, monkeypatch, capsys, line, message):
    monkeypatch.chdir(tmp_path)
    assert run(*line.format(**places).split()) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


def test_an_import_that_failed_leaves_nothing_and_can_be_repeated(tmp_path, capsys):
    """Options say what the rows do not; a pad stands behind two ids of three steps."""
    path, out = tmp_path / "rows.jsonl.gz", tmp_path / "set"
    files = ("import", path, "--out", out, "--mask_id", 2, "--vocab_size", 30, "--pad_id", 0)
    ids = {"prompt_token_ids": [5], "response_token_ids": [7, 8]}

    def imported(*orders: list[int]) -> int:
        rows = [json.dumps({**ids, "decoding_order": order}) for order in orders]
        path.write_bytes(gzip.compress("\n".join(rows).encode()))
        return run(*files)

    assert imported([0, 1], [1, 0], [0]) == 2
    assert "rows.jsonl.gz:3: decoding_order has 1 entries" in capsys.readouterr().err
    assert list(out.iterdir()) == []
    assert imported([0, 1], [1, 0], [1, 0, 2]) == 0
    records = read_all(out)
    assert [record.uid for record in records] == ["rows/1", "rows/2", "rows/3"]
    assert records[2].tokens.tolist() == [7, 8, 0]
    assert {(record.mask_id, record.vocab_size) for record in records} == {(2, 30)}


def test_an_export_of_several_runs_says_that_it_has_no_run_record(tmp_path, capsys):
    for number in range(2):
        run_of_set = run_record(randomness={"seed": number})
        write_shards(tmp_path / str(number), records_of(1, start=number), run=run_of_set)
    assert run("export", tmp_path / "0", tmp_path / "1", "--out", tmp_path / "x.parquet") == 0
    assert "has no run record, since the shards are of 2 runs" in capsys.readouterr().err
