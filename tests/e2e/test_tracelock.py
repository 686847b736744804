"""Traces, training and decoding of TraceLock through the command line on the embedded model."""

import json
import logging
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from lit_dlm.tracelock.scorer import AcceptanceScorer
from lit_dlm.trajectories.store import TrajectoryShardReader, completed_uids
from tests.e2e.runs import added, assert_same_weights, fails, killed, problems, results, run, traces
from tests.processes import in_two_processes

pytestmark = pytest.mark.slow

ON_ONE_CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
RANKS = ["--model.hidden_rank=8", "--model.delta_rank=4"]
ROUND = [f"--data.tasks={problems(24, 'train')}", "--data.batch_size=4", *RANKS, *ON_ONE_CPU]
GENERATE = [
    *("predict", "--config=exp/generate_tiny", *ROUND, "--data.assignment=each"),
    *("--model.projector_prompts=8", "--trainer.callbacks.init_args.grade=true"),
    "--model.decoders={entropy: {policy: EntropyPolicy}}",
]
STEPS = ["--trainer.max_steps=12", "--trainer.val_check_interval=6", "--data.batch_size=8"]
STEPS += ["--data.val_fraction=0.3", "--trainer.enable_progress_bar=false", "--ckpt_path=last"]
FIT = ["fit", "--config=exp/tracelock_tiny", *STEPS]
FEW = [*STEPS, "--trainer.max_steps=4", "--trainer.val_check_interval=2"]
BENCHMARK = [
    *("predict", "--config=exp/benchmark_tiny", *ON_ONE_CPU, f"--data.tasks={problems(6)}"),
    "--data.methods=[entropy,tracelock_095]",
]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of all three steps, after which signals are handled as before."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    before = [signal.getsignal(number) for number in SIGNALS]
    for command in (GENERATE, FIT, BENCHMARK):
        run(*command, f"--run_dir={run_dir}")
    assert [signal.getsignal(number) for number in SIGNALS] == before
    return run_dir


@pytest.fixture
def begun(whole: Path, tmp_path: Path) -> Path:
    """A folder with the traces of the whole run, to train in."""
    _link(whole, tmp_path)
    return tmp_path


def _last(folder: Path) -> Any:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def interrupted(number: signal.Signals) -> dict[str, Any]:
    return {"number": number, "status": 128 + number}


def _link(whole: Path, folder: Path) -> None:
    for name in ("traces", "projector"):
        (folder / name).symlink_to(whole / name)


def test_problems_have_graded_trajectories_with_features_and_forwards_of_a_policy_are_counted(
    whole: Path,
):
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
        assert 1 <= len(trace.features.kept_steps) <= 32
    rows = results(whole)
    assert all(r.nfe == 32 and r.policy_forwards == 0 for r in rows["word_problems", "entropy"])
    assert all(r.policy_forwards == r.nfe for r in rows["word_problems", "tracelock_095"])
    assert all(r.status == "complete" for r in rows["word_problems", "tracelock_095"])


def test_running_again_redoes_nothing(whole: Path, caplog: pytest.LogCaptureFixture):
    files = [
        path
        for pattern in ("traces/*.tar", "projector/*", "results/**/*.jsonl", "policy/*.safetensors")
        for path in whole.glob(pattern)
    ]
    before = {path: path.read_bytes() for path in files}
    assert len(before) >= 6
    caplog.set_level(logging.INFO)
    for command in (GENERATE, FIT, BENCHMARK):
        run(*command, f"--run_dir={whole}")
    decode = f"--policy=TraceLockPolicy --policy.path {whole}/policy --quota=NoQuota"
    assert f"next: lit-dlm generate PROMPT --backbone tiny {decode}\n" in caplog.text
    assert {path: path.read_bytes() for path in files} == before


def test_killed_generation_resumes_to_the_same_trajectories(whole: Path, tmp_path: Path):
    command = [*GENERATE, f"--run_dir={tmp_path}", "--data.batch_size=3"]
    # One block per sample, so that something is on disk when the process dies.
    command += ["--trainer.callbacks.init_args.records_per_block=1"]
    killed(tmp_path, *command, before=4, files="traces/*.tar*", num_bytes=60_000)
    assert len(completed_uids(tmp_path / "traces")) < 24
    run(*command)
    assert traces(tmp_path / "traces") == traces(whole / "traces")


def test_an_interrupted_generation_finishes_its_shards(whole: Path, tmp_path: Path):
    command = [*GENERATE, f"--run_dir={tmp_path}"]
    told = killed(tmp_path, *command, before=2, files="traces/*", **interrupted(signal.SIGTERM))
    assert "the same command decodes what is left" in told
    found = traces(tmp_path / "traces")
    assert len(found) == 8
    assert found.items() < traces(whole / "traces").items()


def _trains_as_without_a_break(whole: Path, folder: Path) -> None:
    assert not (folder / "policy").exists()
    run(*FIT, f"--run_dir={folder}")
    assert_same_weights(whole / "policy/model.safetensors", folder / "policy/model.safetensors")
    facts = [json.loads((at / "policy" / "config.json").read_text()) for at in (folder, whole)]
    assert facts[0] == facts[1]


def test_killed_training_resumes_to_the_same_weights(whole: Path, begun: Path):
    killed(begun, *FIT, f"--run_dir={begun}", before=6, files="checkpoints/last.ckpt")
    _trains_as_without_a_break(whole, begun)


@pytest.mark.parametrize(
    ("number", "before", "step"),
    [(signal.SIGTERM, 5, 7), (signal.SIGINT, 7, 8), (signal.SIGUSR1, 10, 11)],
)
def test_an_interrupted_training_goes_on_from_the_step_it_reached(
    whole: Path,
    begun: Path,
    number: signal.Signals,
    before: int,
    step: int,
    capsys: pytest.CaptureFixture[str],
):
    """Of 12, with a validation behind the sixth."""
    command = [*FIT, f"--run_dir={begun}"]
    told = killed(begun, *command, before=before, files="fit.yaml", **interrupted(number))
    assert f"ended at optimiser step {step}, saved as {begun}/checkpoints/last.ckpt" in told
    assert "go on with the same command and --ckpt_path last" in told
    assert _last(begun)["global_step"] == step
    run("runs", str(begun))
    assert "│ interrupted │" in capsys.readouterr().out
    if number == signal.SIGTERM:  # that a stop at the end of a step is whole is shown once
        _trains_as_without_a_break(whole, begun)


TWO = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=4"]


def _fit(rank: int, *folders: Path) -> None:
    torch.set_num_threads(1)
    for folder in folders:
        run(*FIT, f"--run_dir={folder}", *TWO)


@pytest.mark.ddp
def test_two_processes_end_together_at_a_signal_to_the_first(whole: Path, begun: Path):
    """They go on as they would have without it."""
    plain = begun / "plain"
    plain.mkdir()
    _link(whole, plain)
    command = [*FIT, f"--run_dir={begun}", *TWO]
    told = killed(begun, *command, before=3, files="fit.yaml", **interrupted(signal.SIGTERM))
    assert told.count("saved as") == 1
    assert _last(begun)["global_step"] == 4
    in_two_processes(_fit, begun, plain)
    expected, found = (_last(folder)["state_dict"] for folder in (plain, begun))
    for name, value in expected.items():
        if value.is_floating_point():  # sums in another order, under a rate of 0.002
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.ddp
@pytest.mark.parametrize(("rank", "status"), [(0, -signal.SIGKILL), (1, 1)])
def test_a_dead_process_ends_the_others(begun: Path, rank: int, status: int):
    """Within ten seconds: Lightning looks after its children every five."""
    command = [*FIT, f"--run_dir={begun}", *TWO]
    told = killed(begun, *command, before=3, files="fit.yaml", rank=rank, status=status)
    ended = time.monotonic()
    # The first one, which starts the other, may fall before the other can tell.
    assert rank <= told.count("error: another process of this run has ended, so") <= 1
    while [path for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, begun)]:
        assert time.monotonic() < ended + 10
        time.sleep(0.1)


def _names(cmdline: Path, folder: Path) -> bool:
    try:
        return str(folder).encode() in cmdline.read_bytes()
    except OSError:
        return False


def test_last_is_the_last_validation_also_where_it_was_not_the_best(begun: Path):
    """A learning rate of zero: the first validation stays the best."""
    still = ["--model.lr_scheduler=null", "--model.optimizer.init_args.lr=0"]
    run(*FIT, f"--run_dir={begun}", *still)
    saved = {path.stem for path in (begun / "checkpoints").glob("*.ckpt")}
    assert saved == {"tracelock-step=6", "last", "last-former"}
    assert _last(begun)["global_step"] == 12


def test_a_foreign_checkpoint_changes_no_settings_and_must_fit(
    whole: Path, begun: Path, capsys: pytest.CaptureFixture[str]
):
    """Another run's settings are in it: Lightning's command line would take its class and folder.

    Torch itself takes the state of another optimiser, which fails in the first step.
    """
    path = begun / "foreign.ckpt"
    command = [*FIT[:-1], f"--ckpt_path={path}", f"--run_dir={begun}"]
    theirs = {"_class_path": "lit_dlm.predict.decode.DecodeModule", "export_dir": "elsewhere"}

    torch.save({**_last(whole), "hyper_parameters": theirs}, path)
    run(*command)
    assert (begun / "policy" / "config.json").is_file()
    shutil.rmtree(begun / "policy")
    without, other, larger = (_last(whole) for _ in range(3))
    del without["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    del other["optimizer_states"][0]["param_groups"][0]["betas"]
    name, weight = next(iter(larger["state_dict"].items()))
    larger["state_dict"][name] = torch.cat([weight, weight])
    for stored, reason in (
        (without, f"{path}: expected what this version reads, got KeyError: 'total'"),
        (other, "ckpt_path: expected the state of AdamW, got that of another optimiser, without b"),
        (larger, f"ckpt_path: expected weights of this model (size mismatch for {name}: "),
    ):
        torch.save(stored, path)
        assert reason in fails(capsys, *command, "--trainer.max_steps=13")


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
    folder = tmp_path / "run"
    for name in ("traces", "projector"):
        shutil.copytree(whole / name, folder / name)
    flags = ["--trainer.log_every_n_steps=1", added(f"{__name__}.DeleteRun", folder=str(folder))]
    error = fails(capsys, *FIT, f"--run_dir={folder}", *flags)
    assert "deleted during the run" in error
    assert not (folder / "checkpoints").exists()


def test_a_longer_run_goes_on_along_the_schedule_of_its_length(whole: Path, begun: Path):
    """Up to step 18, from a checkpoint of a run that was to end at step 12."""
    shutil.copytree(whole / "checkpoints", begun / "checkpoints")
    last = {"filename": "new", "every_n_train_steps": 18, "save_top_k": 1}
    new = added("lightning.pytorch.callbacks.ModelCheckpoint", **last)
    run(*FIT, "--trainer.max_steps=18", f"--run_dir={begun}", new)
    (path,) = begun.rglob("new*.ckpt")
    state = torch.load(path, weights_only=True)
    weight = torch.nn.Parameter(torch.zeros(1))
    expected = OneCycleLR(AdamW([weight], lr=0.002), max_lr=0.002, total_steps=18, pct_start=0.1)
    for _ in range(18):
        expected.optimizer.step()
        expected.step()
    assert state["global_step"] == 18
    assert state["lr_schedulers"][0]["_last_lr"] == expected.get_last_lr()


def test_an_autoencoder_replaces_the_principal_components(begun: Path) -> None:
    run(
        "fit",
        "--config=exp/projector_dream",
        "--config=method/projector_tiny",
        *FEW,
        *RANKS,
        f"--run_dir={begun}",
    )
    own = ["--data.source=tokens", f"--model.projector={begun / 'autoencoder'}"]
    run(*FIT[:2], *FEW, *own, f"--run_dir={begun}")
    assert AcceptanceScorer.load(begun / "policy").projector.config.kind == "autoencoder"


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (97, "ProjectorConfig.hidden_rank: expected a number in [1, 96], got 97"),
        (80, "expected at least 80 positions for hidden_rank=80 and delta_rank=4, got 64"),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_anything_is_decoded(
    tmp_path: Path, rank: int, message: str, capsys, caplog
) -> None:
    few = [f"--model.hidden_rank={rank}", "--model.projector_prompts=1"]
    with caplog.at_level(logging.INFO, logger="lit_dlm.tracelock.generate"):
        command = [*GENERATE, *few, "--data.response_length=16", f"--run_dir={tmp_path}"]
        assert message in fails(capsys, *command, "--data.batch_size=12")
    assert "decoded" not in caplog.text
