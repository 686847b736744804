"""TensorBoard and Weights & Biases get what fit and predict measure, offline."""

from pathlib import Path

import pytest

from tests.e2e.runs import added, problems, run

pytestmark = pytest.mark.slow


def predict(folder: Path, tracker: str) -> None:
    run(
        *("predict", "--config=exp/benchmark_tiny", f"--config=trainer/{tracker}"),
        *(f"--run_dir={folder}", f"--data.tasks={problems(2)}", "--model.sweep=null"),
        "--model.decoders={one: {policy: ThresholdPolicy, quota: NoQuota}}",
        added("TracePictures", kinds=["fill_order"], folder=f"{folder}/pictures"),
        "--trainer.enable_progress_bar=false",
    )


def fit(folder: Path, tracker: str) -> None:
    run(
        *("fit", "--config=exp/sft_gt_tiny", f"--config=trainer/{tracker}", f"--run_dir={folder}"),
        *("--trainer.max_steps=4", "--trainer.log_every_n_steps=2"),
        "--data.sources.init_args.tasks.init_args.num_examples=40",
        "--trainer.enable_progress_bar=false",
    )


def test_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    predict(tmp_path / "predict", "tensorboard")
    fit(tmp_path / "fit", "tensorboard")
    found = {}
    for name in ("predict", "fit"):
        events = EventAccumulator(str(tmp_path / name / "tensorboard"))
        events.Reload()
        found[name] = events.Tags()
    scores = {f"word_problems/one/{name}" for name in ("accuracy", "tokens_per_second")}
    assert scores <= set(found["predict"]["scalars"])
    pictures = {f"decode/one/word_problems/test/0000{n}/fill_order" for n in range(2)}
    assert set(found["predict"]["images"]) == {"profile", *pictures}
    assert "profile/text_summary" in found["predict"]["tensors"]
    assert "train/loss" in found["fit"]["scalars"]
    assert [name for name in found["fit"]["scalars"] if "cpu_percent" in name]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    predict(tmp_path / "predict", "wandb")
    wandb.finish()
    fit(tmp_path / "fit", "wandb")
    wandb.finish()  # otherwise the next logger of this process writes into the torn-down run
    wandb.teardown()
    kept = {}
    for name in ("predict", "fit"):
        (recorded,) = (tmp_path / name).glob("wandb/offline-run-*/*.wandb")
        kept[name] = recorded.read_bytes()
        assert (tmp_path / name / "logs").is_dir()  # CSV stays beside it
    assert b"word_problems/one/tokens_per_second" in kept["predict"]
    (media,) = (tmp_path / "predict").glob("wandb/offline-run-*/files/media")
    assert list(media.glob("images/profile*.png"))
    assert list(media.glob("table/profile_*.table.json"))
    assert b"train/loss" in kept["fit"]
