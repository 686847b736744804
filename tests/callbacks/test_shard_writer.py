from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lit_dlm.callbacks import ShardWriter
from lit_dlm.datamodules import PromptDataModule
from lit_dlm.trajectories.store import TrajectoryShardReader, completed_uids
from tests.callbacks.letters import LENGTH, Letters, trace_module
from tests.fakes import MASK


def predict(folder: Path, module=None, *, count: int = 10, recover_first=True, **options) -> None:
    callback = ShardWriter(str(folder), **{"name": "demo", "records_per_block": 4, **options})
    data = PromptDataModule(
        [Letters(count)],
        response_length=LENGTH,
        batch_size=3,
        trajectories_dir=str(folder) if recover_first else None,
    )
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.predict(module or trace_module(), datamodule=data, return_predictions=False)


def test_every_decode_is_written_with_its_provenance(tmp_path):
    """Ten problems, two methods. The confidence order follows the table: 0.9, 0.8, 0.7, 0.6."""
    predict(tmp_path)
    records = {record.uid: record for record in TrajectoryShardReader(tmp_path)}
    assert set(records) == {
        f"letters/test/{n}@{method}" for n in range(10) for method in ("confidence", "random")
    }
    record = records["letters/test/1@confidence"]
    assert record.prompt_ids.tolist() == [7, 10 + ord("b")]
    assert record.tokens.tolist() == [40, 41, 42, 43]
    assert record.commit_step.tolist() == [0, 1, 2, 3]
    assert record.mask_id == MASK
    assert (record.meta["task"], record.meta["method"]) == ("letters", "confidence")
    assert records["letters/test/1@random"].commit_step.tolist() != [0, 1, 2, 3]
    assert (tmp_path / "run.json").exists()
    assert (tmp_path / "manifest.json").exists()
    assert not list(tmp_path.glob("*.tmp*"))


def test_a_second_run_does_only_what_is_missing(tmp_path):
    predict(tmp_path, count=4)
    first = set(tmp_path.glob("*.tar"))
    module = trace_module()
    predict(tmp_path, module)
    assert len(list(TrajectoryShardReader(tmp_path))) == 20
    assert {path.name for path in first} < {path.name for path in tmp_path.glob("*.tar")}
    assert module.backbone.forwards == 2 * 2 * LENGTH  # six problems, two batches, two methods
    module = trace_module()
    predict(tmp_path, module)
    assert module.backbone.forwards == 0


def test_records_that_are_there_already_are_left_out(tmp_path, caplog):
    predict(tmp_path, count=3)
    predict(tmp_path, count=4, recover_first=False)
    assert len(list(TrajectoryShardReader(tmp_path))) == 8
    assert "letters/test/0@confidence (and 2 more) is in" in caplog.text


def test_an_exception_keeps_the_finished_batches(tmp_path):
    """Three problems a batch and four forwards each: the ninth forward is in the third batch."""
    with pytest.raises(RuntimeError, match="the machine broke"):
        predict(tmp_path, trace_module(fail_at=2 * LENGTH))
    assert completed_uids(tmp_path) == {f"letters/test/{n}@confidence" for n in range(6)}
    predict(tmp_path)
    assert len(list(TrajectoryShardReader(tmp_path))) == 20


def test_other_settings_are_refused_before_any_work(tmp_path):
    predict(tmp_path, count=1)
    module = trace_module(seed=5)
    with pytest.raises(ValueError, match=r"randomness\.seed: 0 in the folder, 5 now"):
        predict(tmp_path, module)
    assert module.backbone.forwards == 0


def test_the_size_limit_stops_the_run_and_keeps_what_is_written(tmp_path):
    """The first block is already larger than 100 bytes."""
    with pytest.raises(RuntimeError, match="max_gigabytes"):
        predict(tmp_path, max_gigabytes=1e-7)
    written = completed_uids(tmp_path)
    assert 0 < len(written) < 20
    predict(tmp_path, max_gigabytes=1.0)
    assert len(list(TrajectoryShardReader(tmp_path))) == 20
    with pytest.raises(ValueError, match="max_gigabytes: expected a positive number"):
        ShardWriter(str(tmp_path), max_gigabytes=0.0)


def test_a_module_that_captures_nothing_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="carries no trajectories"):
        predict(tmp_path, trace_module(capture=False))


def test_a_full_disk_surfaces_and_flushed_blocks_are_recovered(tmp_path, monkeypatch, caplog):
    """The third block cannot be written, nor anything after it."""
    plain, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) > 3:  # the run record and two blocks
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left on device") as error:
        predict(tmp_path)
    assert "demo-train-r00000-000000.tar.tmp-" in error.value.filename
    assert all(record.exc_info is None or record.exc_info is False for record in caplog.records)
    assert completed_uids(tmp_path) == set()
    monkeypatch.undo()
    module = trace_module()
    predict(tmp_path, module)
    assert len(list(TrajectoryShardReader(tmp_path))) == 20
    assert module.backbone.forwards < 8 * LENGTH  # eight records came from the orphan


def test_grades_are_stored_with_the_records(tmp_path):
    predict(tmp_path, grade=True)
    records = {record.uid: record for record in TrajectoryShardReader(tmp_path)}
    assert len(records) == 20
    assert records["letters/test/2@random"].meta["correct"] is False
    assert records["letters/test/2@random"].meta["score"] == 0.5
    assert records["letters/test/3@random"].meta["correct"] is True
    assert "score" not in records["letters/test/3@random"].meta
