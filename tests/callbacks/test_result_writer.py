from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lit_dlm.callbacks import ResultWriter, ShardWriter
from lit_dlm.datamodules import PromptDataModule
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.trajectories.store import TrajectoryShardReader, completed_uids
from tests.callbacks.letters import LENGTH, Letters, trace_module
from tests.processes import in_two_processes

pytestmark = pytest.mark.slow  # whole predict loops


def predict(
    run_dir: Path, module=None, *, count: int = 6, folder="trajectories", more=(), responses=1
) -> None:
    data = PromptDataModule(
        [Letters(count)],
        response_length=LENGTH,
        batch_size=3,
        responses_per_prompt=responses,
        results_dir=str(run_dir / "results"),
        trajectories_dir=None if folder is None else str(run_dir / folder),
    )
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[ResultWriter(str(run_dir)), *more],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.predict(module or trace_module(), datamodule=data, return_predictions=False)


def rows_of(run_dir: Path) -> list[ResultRow]:
    folder = ResultFolder(run_dir / "results")
    return [row for pair in folder.pairs() for row in folder.rows(*pair)]


def check(run_dir: Path, count: int) -> None:
    """Each sample has one row and one record, and the row names the record by its digest."""
    rows = rows_of(run_dir)
    records = list(TrajectoryShardReader(run_dir / "trajectories"))
    assert len(rows) == len(records) == count
    by_uid = {record.uid: record for record in records}
    for row in rows:
        assert row.trajectory is not None
        record = by_uid.pop(row.trajectory["uid"])
        assert row.trajectory == {
            "set": "trajectories",
            "uid": f"{row.uid}@{row.method}",
            "digest": record.digest().hex(),
        }
        assert (row.nfe, row.seed, row.status) == (record.num_steps, record.seed, record.status)
        assert row.completion == " ".join(str(token) for token in record.tokens)
        assert record.meta["correct"] == row.correct


def test_every_row_names_the_trajectory_that_it_came_from(tmp_path):
    predict(tmp_path)
    check(tmp_path, 12)
    module = trace_module()
    predict(tmp_path, module)
    assert module.backbone.forwards == 0
    check(tmp_path, 12)


def test_further_responses_join_the_first_ones(tmp_path):
    """Six prompts, of which the method that draws gives one response more."""
    predict(tmp_path)
    first = {(row.method, row.uid): row for row in rows_of(tmp_path)}
    predict(tmp_path, responses=2)
    check(tmp_path, 18)
    rows = {(row.method, row.uid): row for row in rows_of(tmp_path)}
    assert {key: rows[key] for key in first} == first
    others = [row for key, row in rows.items() if key not in first]
    for row in others:
        assert (row.method, row.response) == ("random", 1)
        assert row.uid == f"{row.prompt_uid}#1"
        assert row.seed != first[row.method, row.prompt_uid].seed
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {record["method"]: (record["n"], record["pass_at"]) for record in summary}
    assert found["confidence"] == (6, None)
    assert found["random"][0] == 12
    assert list(found["random"][1]) == ["2"]


def test_rows_without_trajectory_are_made_again(tmp_path, caplog):
    """Killed between the two writers: rows are on disk, their records are not."""
    predict(tmp_path)
    for path in (tmp_path / "trajectories").glob("*.tar*"):
        path.unlink()
    predict(tmp_path)
    assert "12 results lack their trajectory" in caplog.text
    check(tmp_path, 12)


def test_records_without_row_are_decoded_again_and_written_once(tmp_path):
    predict(tmp_path)
    (part,) = (tmp_path / "results" / "letters" / "random").glob("part-*.jsonl")
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:2]))
    predict(tmp_path)
    check(tmp_path, 12)


def test_more_methods_in_the_same_folder_are_welcome(tmp_path):
    module = trace_module()
    del module.decoders["random"]
    predict(tmp_path, module)
    check(tmp_path, 6)
    predict(tmp_path)
    check(tmp_path, 12)


def test_an_exception_keeps_rows_and_records_in_step(tmp_path):
    with pytest.raises(RuntimeError, match="the machine broke"):
        predict(tmp_path, trace_module(fail_at=LENGTH))
    assert {f"{row.uid}@{row.method}" for row in rows_of(tmp_path)} == completed_uids(
        tmp_path / "trajectories"
    )
    predict(tmp_path)
    check(tmp_path, 12)


def test_settings_that_do_not_fit_are_refused_before_any_work(tmp_path):
    module = trace_module(capture=False)
    with pytest.raises(ValueError, match=r"set both model\.level and data\.trajectories_dir"):
        predict(tmp_path, module)
    with pytest.raises(ValueError, match=r"set both model\.level and data\.trajectories_dir"):
        predict(tmp_path, folder=None)
    with pytest.raises(ValueError, match="leave ShardWriter out"):
        predict(tmp_path, more=[ShardWriter(str(tmp_path / "other"))])
    assert module.backbone.forwards == 0


def test_without_capture_rows_name_no_trajectory(tmp_path):
    predict(tmp_path, trace_module(capture=False), folder=None)
    assert {row.trajectory for row in rows_of(tmp_path)} == {None}


def _plain(rank: int, folder: Path) -> None:
    """A trainer as anybody makes one, whose own sampler would deal the samples again."""
    data = PromptDataModule(
        [Letters(7)], response_length=LENGTH, batch_size=2, results_dir=str(folder / "results")
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", callbacks=[ResultWriter(str(folder))],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    module = trace_module(capture=False)
    trainer.predict(module, datamodule=data, return_predictions=False)


@pytest.mark.ddp
def test_a_plain_trainer_of_two_processes_decodes_every_sample_once(tmp_path):
    in_two_processes(_plain, tmp_path)
    rows = rows_of(tmp_path)
    assert len(rows) == len({(row.uid, row.method) for row in rows}) == 14
    (summary, _) = json.loads((tmp_path / "summary.json").read_text())
    assert summary["n"] == 7


class Half(PromptDataModule):
    """Deals samples that were dealt already."""

    def streams(self):
        return super().streams()[::2]


def test_a_run_that_lost_samples_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.callbacks.test_result_writer.PromptDataModule", Half)
    with pytest.raises(ValueError, match=r"results: expected 12 samples, got 6; .* 5 more were no"):
        predict(tmp_path)
    monkeypatch.undo()
    predict(tmp_path)
    check(tmp_path, 12)
