"""Traces, training and decoding of TraceLock through the command line on the embedded model."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from lit_dlm.trajectories.store import TrajectoryShardReader, completed_uids
from tests.e2e.runs import ROOT, fails, finished, killed, results, run, start

pytestmark = pytest.mark.slow

EXP = ROOT / "configs" / "exp"
GENERATE = [
    "predict",
    f"--config={EXP / 'generate_tiny.yaml'}",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--data.init_args.tasks=[{class_path: WordProblems, init_args: {split: train, "
    "num_examples: 24}}]",
    "--data.init_args.batch_size=4",
    "--data.init_args.assignment=each",
    "--model.init_args.decoders={entropy: {policy: EntropyPolicy}}",
    "--model.init_args.projector_prompts=8",
    "--trainer.callbacks.init_args.grade=true",
    "--model.init_args.hidden_rank=8",
    "--model.init_args.delta_rank=4",
]
FIT = [
    "fit",
    f"--config={EXP / 'tracelock_tiny.yaml'}",
    "--trainer.max_steps=12",
    "--trainer.val_check_interval=6",
    "--trainer.enable_progress_bar=false",
    "--data.init_args.batch_size=8",
    "--data.init_args.val_fraction=0.3",
    "--ckpt_path=last",
]
BENCHMARK = [
    "predict",
    f"--config={EXP / 'benchmark_tiny.yaml'}",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--data.init_args.tasks=[{class_path: WordProblems, init_args: {split: test, "
    "num_examples: 6}}]",
    "--data.init_args.methods=[entropy, tracelock_095]",
]


def _traces(run_dir: Path) -> dict[str, tuple[bytes, object]]:
    """Digest and grade of every trajectory by uid."""
    reader = TrajectoryShardReader(run_dir / "traces")
    return {t.uid: (t.digest(), t.meta["correct"]) for t in reader}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of all three steps."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    for command in (GENERATE, FIT, BENCHMARK):
        run(*command, f"--run_dir={run_dir}")
    return run_dir


def test_every_problem_has_one_graded_trajectory_with_features(whole: Path):
    traces = list(TrajectoryShardReader(whole / "traces", features=True))
    assert sorted(t.uid for t in traces) == [
        f"word_problems/train/{n:05d}@entropy" for n in range(24)
    ]
    for trace in traces:
        assert trace.num_steps == 32
        assert sorted(trace.commit_step) == list(range(32))
        assert isinstance(trace.meta["correct"], bool)
        assert trace.features is not None
        # Snapshots 3 x 8, differences 2 x 4, log-odds, entropy, margin.
        assert sum(trace.features.groups) == 3 * 8 + 2 * 4 + 3
        assert 1 <= trace.features.num_kept <= 32


def test_running_again_redoes_nothing(whole: Path):
    files = [
        path
        for pattern in ("traces/*.tar", "projector/*", "results/**/*.jsonl", "policy/*.safetensors")
        for path in whole.glob(pattern)
    ]
    before = {path: path.read_bytes() for path in files}
    assert len(before) >= 6
    for command in (GENERATE, FIT, BENCHMARK):
        run(*command, f"--run_dir={whole}")
    assert {path: path.read_bytes() for path in files} == before


def test_the_policy_decodes_and_its_forwards_are_counted(whole: Path):
    rows = results(whole)
    assert all(r.nfe == 32 and r.policy_forwards == 0 for r in rows["word_problems", "entropy"])
    assert all(r.policy_forwards == r.nfe for r in rows["word_problems", "tracelock_095"])
    assert all(r.status == "complete" for r in rows["word_problems", "tracelock_095"])


def test_killed_generation_resumes_to_the_same_trajectories(whole: Path, tmp_path: Path):
    command = [*GENERATE, f"--run_dir={tmp_path}", "--data.init_args.batch_size=3"]
    # One block per sample, so that something is on disk when the process dies.
    command += ["--trainer.callbacks.init_args.records_per_block=1"]
    killed(tmp_path, *command, before=4, files="traces/*.tar*", num_bytes=60_000)
    assert len(completed_uids(tmp_path / "traces")) < 24
    run(*command)
    assert _traces(tmp_path) == _traces(whole)


def test_killed_training_resumes_to_the_same_weights(whole: Path, tmp_path: Path):
    (tmp_path / "traces").symlink_to(whole / "traces")
    (tmp_path / "projector").symlink_to(whole / "projector")
    command = [*FIT, f"--run_dir={tmp_path}"]
    killed(tmp_path, *command, before=6, files="checkpoints/last.ckpt")
    assert not (tmp_path / "policy").exists()
    run(*command)
    resumed = load_file(tmp_path / "policy" / "model.safetensors")
    expected = load_file(whole / "policy" / "model.safetensors")
    assert resumed.keys() == expected.keys()
    assert all(resumed[name].equal(expected[name]) for name in expected)


def _resumed_equals(whole: Path, folder: Path) -> None:
    resumed, expected = (load_file(at / "policy" / "model.safetensors") for at in (folder, whole))
    assert resumed.keys() == expected.keys()
    assert all(resumed[name].equal(expected[name]) for name in expected)
    facts = [json.loads((at / "policy" / "config.json").read_text()) for at in (folder, whole)]
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    ("number", "before", "step"),
    [(signal.SIGTERM, 5, 7), (signal.SIGINT, 7, 8), (signal.SIGUSR1, 10, 11)],
)
def test_an_interrupted_training_goes_on_from_the_step_it_reached(
    whole: Path, tmp_path: Path, number: signal.Signals, before: int, step: int
):
    """Of 12, with a validation behind the sixth."""
    for name in ("traces", "projector"):
        (tmp_path / name).symlink_to(whole / name)
    command = [*FIT, f"--run_dir={tmp_path}"]
    told = killed(
        tmp_path, *command, before=before, files="fit.yaml", number=number, status=128 + number
    )
    assert f"ended at optimiser step {step}, saved as {tmp_path}/checkpoints/last.ckpt" in told
    assert "go on with the same command and --ckpt_path last" in told
    stored = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["global_step"] == step
    assert not (tmp_path / "policy").exists()
    run(*command)
    _resumed_equals(whole, tmp_path)


def test_a_run_gives_signals_back(whole: Path, tmp_path: Path):
    """A later signal ends the process; a handler of the run would hold all of its memory, too."""
    for name in ("traces", "projector"):
        (tmp_path / name).symlink_to(whole / name)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    run(*FIT, f"--run_dir={tmp_path}")
    assert [signal.getsignal(number) for number in numbers] == before


def test_an_interrupted_generation_finishes_its_shards(whole: Path, tmp_path: Path):
    command = [*GENERATE, f"--run_dir={tmp_path}"]
    number = signal.SIGTERM
    told = killed(
        tmp_path, *command, before=2, files="traces/*", number=number, status=128 + number
    )
    assert "the same command decodes what is left" in told
    assert len(list(TrajectoryShardReader(tmp_path / "traces"))) == 12
    run(*command)
    assert _traces(tmp_path) == _traces(whole)


TWO = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.init_args.batch_size=4"]


@pytest.mark.ddp
def test_two_processes_end_together_at_a_signal_to_the_first(whole: Path, tmp_path: Path):
    """They go on as they would have without it."""
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("traces", "projector"):
        for folder in (tmp_path, plain):
            (folder / name).symlink_to(whole / name)
    number = signal.SIGTERM
    told = killed(
        tmp_path, *FIT, f"--run_dir={tmp_path}", *TWO, before=3, files="fit.yaml", number=number,
        status=128 + number,
    )  # fmt: skip
    assert told.count("saved as") == 1
    stored = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["global_step"] == 4
    for folder in (tmp_path, plain):
        finished(start(*FIT, f"--run_dir={folder}", *TWO))
    one, two = (
        torch.load(at / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for at in (plain, tmp_path)
    )
    for name, value in one.items():
        if value.is_floating_point():  # sums in another order, under a rate of 0.002
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.ddp
@pytest.mark.parametrize(("rank", "status"), [(0, -signal.SIGKILL), (1, 1)])
def test_a_dead_process_ends_the_others(whole: Path, tmp_path: Path, rank: int, status: int):
    """Within ten seconds: Lightning looks after its children every five."""
    for name in ("traces", "projector"):
        (tmp_path / name).symlink_to(whole / name)
    told = killed(
        tmp_path, *FIT, f"--run_dir={tmp_path}", *TWO, before=3, files="fit.yaml", rank=rank,
        status=status,
    )  # fmt: skip
    ended = time.monotonic()
    assert told.count("error: another process of this run has ended, so") == rank
    while [path for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, tmp_path)]:
        assert time.monotonic() < ended + 10
        time.sleep(0.1)


def _names(cmdline: Path, folder: Path) -> bool:
    try:
        return str(folder).encode() in cmdline.read_bytes()
    except OSError:
        return False


def test_last_is_the_last_validation_also_where_it_was_not_the_best(whole: Path, tmp_path: Path):
    """A learning rate of zero: the first validation stays the best."""
    for name in ("traces", "projector"):
        (tmp_path / name).symlink_to(whole / name)
    run(*FIT, f"--run_dir={tmp_path}", "--model.init_args.lr_scheduler=null",
        "--model.init_args.optimizer.init_args.lr=0")  # fmt: skip
    saved = {path.stem for path in (tmp_path / "checkpoints").glob("*.ckpt")}
    assert saved == {"tracelock-step=6", "last", "last-former"}
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 12


def test_a_checkpoint_leaves_the_settings_of_the_command_as_they_are(whole: Path, tmp_path: Path):
    """Another run's are in it: Lightning's command line would take its class and its folder."""
    stored = torch.load(whole / "checkpoints" / "last.ckpt", weights_only=True)
    theirs = {"_class_path": "lit_dlm.modules.decode.DecodeModule", "export_dir": "elsewhere"}
    torch.save({**stored, "hyper_parameters": theirs}, tmp_path / "foreign.ckpt")
    for name in ("traces", "projector"):
        (tmp_path / name).symlink_to(whole / name)
    run(*FIT[:-1], f"--ckpt_path={tmp_path / 'foreign.ckpt'}", f"--run_dir={tmp_path}")
    assert (tmp_path / "policy" / "config.json").is_file()


def test_a_checkpoint_whose_state_does_not_fit_is_one_clear_error(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Wrong where Lightning restores it, and where the optimiser first uses it."""
    for name in ("traces", "projector"):
        (tmp_path / name).symlink_to(whole / name)
    path = tmp_path / "foreign.ckpt"
    stored = torch.load(whole / "checkpoints" / "last.ckpt", weights_only=True)
    del stored["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    torch.save(stored, path)
    command = [*FIT[:-1], "--trainer.max_steps=13", f"--ckpt_path={path}", f"--run_dir={tmp_path}"]
    error = fails(capsys, *command)
    assert "ckpt_path: the state of training does not fit this run (KeyError: 'total')" in error
    stored = torch.load(whole / "checkpoints" / "last.ckpt", weights_only=True)
    stored["optimizer_states"][0]["state"][0]["exp_avg"] = -3
    torch.save(stored, path)
    error = fails(capsys, *command)
    assert "ckpt_path: the state of training does not fit this run (AttributeError: " in error


class DeleteRun(Callback):
    """Deletes the folder of a run before its third optimiser step."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            shutil.rmtree(self.folder)


def test_a_training_ends_where_its_folder_is_deleted(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("traces", "projector"):
        shutil.copytree(whole / name, tmp_path / "run" / name)
    callback = {"class_path": f"{__name__}.DeleteRun", "init_args": {"folder": f"{tmp_path}/run"}}
    error = fails(
        capsys, *FIT, f"--run_dir={tmp_path / 'run'}", "--trainer.log_every_n_steps=1",
        f"--trainer.callbacks+={json.dumps(callback)}",
    )  # fmt: skip
    assert "deleted during the run" in error
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("path", ["http://127.0.0.1:9/last.ckpt", "s3://bucket/last.ckpt"])
def test_a_checkpoint_on_another_machine_is_refused(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
):
    for name in ("traces", "projector"):
        (tmp_path / name).symlink_to(whole / name)
    error = fails(capsys, *FIT[:-1], f"--ckpt_path={path}", f"--run_dir={tmp_path}")
    assert f"ckpt_path: expected a local file, got {path}" in error


def test_a_longer_run_goes_on_along_the_schedule_of_its_length(whole: Path, tmp_path: Path):
    """Up to step 18, from a checkpoint of a run that was to end at step 12."""
    for name in ("traces", "projector"):
        (tmp_path / name).symlink_to(whole / name)
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    last = {"filename": "new", "every_n_train_steps": 18, "save_top_k": 1}
    new = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": last}
    run(*FIT, "--trainer.max_steps=18", f"--run_dir={tmp_path}", f"--trainer.callbacks+={new}")
    (path,) = tmp_path.rglob("new*.ckpt")
    state = torch.load(path, weights_only=True)
    weight = torch.nn.Parameter(torch.zeros(1))
    expected = OneCycleLR(AdamW([weight], lr=0.002), max_lr=0.002, total_steps=18, pct_start=0.1)
    for _ in range(18):
        expected.optimizer.step()
        expected.step()
    assert state["global_step"] == 18
    assert state["lr_schedulers"][0]["_last_lr"] == expected.get_last_lr()


def test_a_truncated_shard_is_one_clear_error(whole: Path, tmp_path: Path, capsys):
    (tmp_path / "traces").mkdir()
    for path in (whole / "traces").iterdir():
        data = path.read_bytes()
        (tmp_path / "traces" / path.name).write_bytes(
            data[: len(data) // 2] if path.suffix == ".tar" else data
        )
    (tmp_path / "projector").symlink_to(whole / "projector")
    error = fails(capsys, *FIT, f"--run_dir={tmp_path}")
    assert ".tar" in error


def test_training_without_traces_names_the_folder(tmp_path: Path, capsys):
    error = fails(capsys, *FIT, f"--run_dir={tmp_path}")
    assert str(tmp_path) in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "prompts.jsonl"),
        ('{"id": 1, "prompt": "a"}\n{broken\n', "prompts.jsonl, line 2"),
        ('{"id": 1}\n', "prompt"),
        ('{"id": 1, "prompt": ""}\n', "prompt"),
    ],
    ids=["empty file", "malformed line", "missing field", "empty prompt"],
)
def test_a_bad_prompt_file_is_one_clear_error(tmp_path: Path, capsys, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    task = f"--data.init_args.tasks=[{{class_path: PromptsFile, init_args: {{path: {path}}}}}]"
    error = fails(
        capsys, *BENCHMARK, task, f"--run_dir={tmp_path}", "--data.init_args.methods=[entropy]",
        "--model.init_args.decoders={entropy: {policy: EntropyPolicy}}",
        "--model.init_args.sweep=null",
    )  # fmt: skip
    assert message in error
