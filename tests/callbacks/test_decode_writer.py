"""What a predict run leaves on disk, and what it makes of a folder that another run left."""

import errno
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from lightning.pytorch import Callback

from lit_dlm.callbacks import DecodeWriter, Interruption
from lit_dlm.callbacks.decode_writer import GradingQueue, grade_metadata
from lit_dlm.callbacks.interruption import Interrupted
from lit_dlm.datamodules import PromptDataModule
from lit_dlm.decoding import Decoder, RandomPolicy
from lit_dlm.grading import Verdict
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.reports.summary import summarise_run
from lit_dlm.tasks import PromptExample
from lit_dlm.trajectories.store import TrajectoryShardReader, completed_uids
from tests.callbacks.letters import LENGTH, Letters, trace_module
from tests.fakes import MASK
from tests.finetuning.runs import quiet
from tests.processes import in_two_processes

pytestmark = pytest.mark.slow  # whole predict loops


def predict(
    *writers: DecodeWriter, module=None, count: int = 6, data=PromptDataModule, **options
) -> None:
    settings = {"callbacks": list(writers), **options.pop("trainer", {})}
    trainer = quiet(".", **settings)
    options = {"batch_size": 3, **options}
    prompts = data([Letters(count)], response_length=LENGTH, **options)
    trainer.predict(module or trace_module(), datamodule=prompts, return_predictions=False)


def both(run_dir: Path) -> DecodeWriter:
    return DecodeWriter(str(run_dir))


def shards(folder: Path, **options) -> DecodeWriter:
    return DecodeWriter(trajectories_dir=str(folder), **{"records_per_block": 4, **options})


def rows_of(run_dir: Path) -> list[ResultRow]:
    folder = ResultFolder(run_dir / "results")
    return [row for pair in folder.pairs() for row in folder.rows(*pair)]


def check(run_dir: Path, count: int) -> None:
    """Each sample has one row and one record, and the row names the record by its digest."""
    rows, records = rows_of(run_dir), list(TrajectoryShardReader(run_dir / "trajectories"))
    by_uid = {record.uid: record for record in records}
    assert len(rows) == len(records) == count
    for row in rows:
        record = by_uid.pop(row.trajectory["uid"])
        own = {"uid": f"{row.uid}@{row.method}", "digest": record.digest().hex()}
        assert row.trajectory == {"set": "trajectories", **own}
        assert (row.nfe, row.seed, row.status) == (record.num_steps, record.seed, record.status)
        assert row.completion == " ".join(str(token) for token in record.tokens)
        assert record.meta["correct"] == row.correct


def test_a_folder_gets_what_it_lacks_and_every_row_names_its_trajectory(tmp_path):
    """A further method, then a further response of the one that draws."""
    predict(both(tmp_path), methods=["confidence"])
    check(tmp_path, 6)
    predict(both(tmp_path))
    check(tmp_path, 12)
    first = {(row.method, row.uid): row for row in rows_of(tmp_path)}
    predict(both(tmp_path), responses_per_prompt=2)
    check(tmp_path, 18)
    rows = {(row.method, row.uid): row for row in rows_of(tmp_path)}
    assert {key: rows[key] for key in first} == first
    for row in (row for key, row in rows.items() if key not in first):
        assert (row.method, row.response) == ("random", 1)
        assert row.uid == f"{row.prompt_uid}#1"
        assert row.seed != first[row.method, row.prompt_uid].seed
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {record["method"]: (record["n"], [*(record["pass_at"] or ())]) for record in summary}
    assert found == {"confidence": (6, []), "random": (12, ["2"])}
    module = trace_module()
    predict(both(tmp_path), module=module)
    assert module.backbone.forwards == 0


def test_what_only_one_of_both_folders_holds_is_made_again(tmp_path, caplog):
    """An exception keeps rows and records in step. A run that was killed between the two writers
    has rows without records; lost rows leave their records."""
    with pytest.raises(RuntimeError, match="the machine broke"):
        predict(both(tmp_path), module=trace_module(fail_at=LENGTH))
    kept = {f"{row.uid}@{row.method}" for row in rows_of(tmp_path)}
    assert kept == completed_uids(tmp_path / "trajectories")
    predict(both(tmp_path))
    check(tmp_path, 12)
    for path in (tmp_path / "trajectories").glob("*.tar*"):
        path.unlink()
    predict(both(tmp_path))
    assert "makes 12 results again, which are there twice or lack a trajectory" in caplog.text
    check(tmp_path, 12)
    (part,) = (tmp_path / "results" / "letters" / "random").glob("part-*.jsonl")
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:2]))
    predict(both(tmp_path))
    check(tmp_path, 12)


class Uneven(RandomPolicy):
    """Commits a cell a step, or where the seed is odd all of them at once."""

    def select(self, state, candidates, proposal, quota):
        chosen = super().select(state, candidates, proposal, quota)
        odd = state.seeds[:, None] % 2 == 1
        return replace(chosen, commit=torch.where(odd, candidates, chosen.commit))


class SignalAt(Callback):
    def __init__(self, step: int) -> None:
        self.left = step

    def on_decode_step(self, trainer, batch, done) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7])
def test_a_signal_within_a_batch_keeps_what_has_ended_and_the_rest_is_made_again(tmp_path, step):
    """One batch of six: rows with an odd seed end at step 1, others at step 4; then the other
    method, which goes on from its first step."""

    def module():
        made = trace_module()
        made.decoders["random"] = Decoder(policy=Uneven())
        return made

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    predict(both(whole), module=module(), batch_size=6)
    expected = {f"{row.uid}@{row.method}": row.nfe for row in rows_of(whole)}
    assert {1, 4} == set(expected.values())
    callbacks = [both(cut), SignalAt(step), Interruption()]
    with pytest.raises(Interrupted) as ended:
        predict(*callbacks, module=module(), batch_size=6, methods=["random", "confidence"])
    assert ended.value.code == 128 + signal.SIGTERM
    within = {"random": step, "confidence": step - LENGTH}
    kept = {uid for uid, steps in expected.items() if steps <= within[uid.rpartition("@")[2]]}
    assert {f"{row.uid}@{row.method}" for row in rows_of(cut)} == kept
    check(cut, len(kept))
    predict(both(cut), module=module(), batch_size=6)
    check(cut, 12)
    digests = [
        {(r.uid, r.digest()) for r in TrajectoryShardReader(d / "trajectories")}
        for d in (cut, whole)
    ]
    assert digests[0] == digests[1]


def test_settings_that_do_not_fit_are_refused_before_any_work(tmp_path):
    bare = trace_module(capture=False)
    with pytest.raises(ValueError, match=r"model\.level"):
        predict(shards(tmp_path), module=bare)
    with pytest.raises(ValueError, match="expected one DecodeWriter"):
        predict(both(tmp_path), shards(tmp_path / "other"), module=bare)
    predict(shards(tmp_path), count=1)
    other = trace_module(seed=5)
    with pytest.raises(ValueError, match=r"randomness\.seed: 0 in the folder, 5 now"):
        predict(shards(tmp_path), module=other)
    assert bare.backbone.forwards == other.backbone.forwards == 0


def test_every_decode_is_written_with_its_provenance_and_grade(tmp_path):
    """Two methods. The confidence order follows the table: 0.9, 0.8, 0.7, 0.6."""
    predict(shards(tmp_path, grade=True))
    records = {record.uid: record for record in TrajectoryShardReader(tmp_path)}
    methods = ("confidence", "random")
    assert set(records) == {f"letters/test/{n}@{name}" for n in range(6) for name in methods}
    right, wrong = (records[f"letters/test/{n}@confidence"] for n in (1, 2))
    assert right.prompt_ids.tolist() == [7, 10 + ord("b")]
    assert right.tokens.tolist() == [40, 41, 42, 43]
    assert right.commit_step.tolist() == [0, 1, 2, 3]
    assert right.mask_id == MASK
    problem = Letters(6).examples()[1].digest
    plain = {"task": "letters", "method": "confidence"}
    assert right.meta == {**plain, "problem": problem, "correct": True}
    assert wrong.meta == {**right.meta, "problem": ANY, "correct": False, "score": 0.5}
    assert grade_metadata(Verdict(status="ungraded")) == {"correct": None}
    assert records["letters/test/1@random"].commit_step.tolist() != [0, 1, 2, 3]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".tar"}
    assert {"run.json", "manifest.json"} < {path.name for path in tmp_path.iterdir()}


def test_a_second_run_does_only_what_is_missing(tmp_path):
    predict(shards(tmp_path), count=4)
    first = set(tmp_path.glob("*.tar"))
    for forwards in (2 * 2 * LENGTH, 0):  # six problems, two batches, two methods
        module = trace_module()
        predict(shards(tmp_path), module=module, count=10)
        assert module.backbone.forwards == forwards
    metas = [record.meta for record in TrajectoryShardReader(tmp_path)]
    assert len(metas) == 20
    assert all(meta.keys() == {"task", "method", "problem"} for meta in metas)  # nothing is graded
    assert first < set(tmp_path.glob("*.tar"))


def test_problems_that_are_too_long_are_counted_beside_the_accuracy_of_the_others(tmp_path):
    """Letter 2, which is graded wrong, has a prompt of three tokens here; a resumed run skips it
    as well."""

    def go(count: int, **options) -> list[tuple[int, float, int]]:
        task = Other(count, 2)
        options |= {"max_prompt_length": 2, "overlong": "skip"}
        predict(both(tmp_path), data=lambda _, **more: PromptDataModule([task], **more), **options)
        summary = json.loads((tmp_path / "summary.json").read_text())
        return [(one["n"], one["accuracy"], one["skipped"]) for one in summary]

    assert go(4, methods=["random"]) == [(3, 1.0, 1)]
    assert go(6) == [(5, 1.0, 1), (5, 1.0, 1)]
    check(tmp_path, 10)
    assert "| ms/sample | n | skipped |" in (tmp_path / "summary.md").read_text()
    assert "| 5 | 1 |" in (tmp_path / "summary.md").read_text()
    assert {one.skipped for one in summarise_run(tmp_path)} == {1}  # as lit-dlm report reads it


class Other(Letters):
    """The same uids, another question, if ``at`` is among them."""

    def __init__(self, count: int, at: int) -> None:
        super().__init__(count)
        self.at = at

    def examples(self):
        kept = super().examples()
        return [replace(one, text=one.text * (1 + (n == self.at))) for n, one in enumerate(kept)]


def test_results_of_an_edited_problem_or_class_are_refused(tmp_path, caplog, monkeypatch):
    def again(at: int) -> None:
        predict(both(tmp_path), data=lambda _, **more: PromptDataModule([Other(6, at)], **more))

    again(-1)
    caplog.set_level("INFO")
    again(6)
    assert "All 12 responses are in" in caplog.text
    with pytest.raises(ValueError, match="decode of another problem under the uid letters/test/2"):
        again(2)
    source = tmp_path / "edited.py"
    source.write_text("# edited")
    monkeypatch.setattr(sys.modules[Other.__module__], "__file__", str(source))
    with pytest.raises(ValueError, match=r"other settings \(sources.*Other: '\w+', now '\w+'"):
        again(6)


def test_trajectories_of_an_edited_problem_are_refused(tmp_path):
    def again(count: int, at: int) -> None:
        def data(_, **more):
            return PromptDataModule([Other(count, at)], **more)

        predict(shards(tmp_path), data=data)

    again(3, -1)
    with pytest.raises(ValueError, match="decode of another problem under the uid letters/test/1"):
        again(6, 1)


def test_the_size_limit_stops_the_run_and_keeps_what_is_written(tmp_path):
    """The first block is already larger than 100 bytes."""
    with pytest.raises(OSError, match=r"max_gigabytes.* limit of 100 bytes"):
        predict(shards(tmp_path, max_gigabytes=1e-7))
    with pytest.raises(ValueError, match=r"max_gigabytes: expected more than the .* got 1e-07"):
        predict(shards(tmp_path, max_gigabytes=1e-7))
    assert 0 < len(completed_uids(tmp_path)) < 12
    predict(shards(tmp_path, max_gigabytes=1.0))
    assert len(list(TrajectoryShardReader(tmp_path))) == 12


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
        predict(shards(tmp_path), count=10)
    assert "decodes-train-r00000-000000.tar.tmp-" in error.value.filename
    assert all(record.exc_info is None or record.exc_info is False for record in caplog.records)
    assert completed_uids(tmp_path) == set()
    monkeypatch.undo()
    module = trace_module()
    predict(shards(tmp_path), module=module, count=10)
    assert len(list(TrajectoryShardReader(tmp_path))) == 20
    assert module.backbone.forwards < 8 * LENGTH  # eight records came from the orphan


def _plain(rank: int, folder: Path) -> None:
    """A trainer as anybody makes one, whose own sampler would deal the samples again."""
    trainer = {"devices": 2, "strategy": "ddp"}
    predict(both(folder), module=trace_module(capture=False), count=7, trainer=trainer)


@pytest.mark.ddp
def test_a_plain_trainer_of_two_processes_decodes_every_sample_once(tmp_path):
    in_two_processes(_plain, tmp_path)
    rows = rows_of(tmp_path)
    assert len(rows) == len({(row.uid, row.method) for row in rows}) == 14
    assert {row.trajectory for row in rows} == {None}  # nothing is captured
    (summary, _) = json.loads((tmp_path / "summary.json").read_text())
    assert summary["n"] == 7


class Half(PromptDataModule):
    """Deals samples that were dealt already."""

    def streams(self):
        return super().streams()[::2]


def test_a_run_that_lost_samples_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"results: expected 12 samples, got 6; .* 5 more were no"):
        predict(both(tmp_path), data=Half)
    predict(both(tmp_path))
    check(tmp_path, 12)


class Slow:
    """Grades when it is let, and counts."""

    name = "slow"
    runs_code = False
    is_graded = True

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.num_graded = 0

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        self.began.set()
        self.may_end.wait(10)
        self.num_graded += 1
        return Verdict(status="right", answer=completion)


def batch(uid: str) -> SimpleNamespace:
    example = PromptExample(uid=uid, task="slow", text="x")
    return SimpleNamespace(examples=[example], completions=["y"], trajectories=[])


def test_what_a_closed_queue_has_not_graded_is_left_out_in_silence() -> None:
    """The first grade is running when the run breaks off; the second never begins."""
    task = Slow()
    queue = GradingQueue({"slow": task})
    queue.submit(batch("a"))
    queue.submit(batch("b"))
    assert task.began.wait(10)
    closing = threading.Thread(target=queue.close)
    closing.start()
    task.may_end.set()
    closing.join()
    assert [decoded.examples[0].uid for decoded, _ in queue.finished()] in ([], ["a"])
    assert task.num_graded == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: True, "a: verdict: expected Verdict, got bool"),
        (lambda: Verdict(status="correct"), "Verdict.status: expected 'right', .*, got 'correct'"),
    ],
)
def test_what_is_no_verdict_is_named(given, told) -> None:
    task = Slow()
    task.grade = lambda example, completion: given()
    queue = GradingQueue({"slow": task})
    queue.submit(batch("a"))
    with pytest.raises(ValueError, match=told) as raised:
        list(queue.finished(wait=True))
    queue.close()
    assert raised.value.__notes__ == ["a: graded by Slow"]


def test_equal_completions_of_a_problem_are_graded_once() -> None:
    task = Slow()
    task.may_end.set()
    queue = GradingQueue({"slow": task})
    for uid in ("a", "a", "b"):
        queue.submit(batch(uid))
    assert len(list(queue.finished(wait=True))) == 3
    queue.close()
    assert task.num_graded == 2
