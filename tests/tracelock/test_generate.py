"""Level ``logits`` of ``TraceModule`` on the embedded model, from its decodes to its files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lit_dlm.backbones import load_backbone
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.callbacks import DecodeWriter
from lit_dlm.datamodules import PromptDataModule, TrajectoryDataModule
from lit_dlm.decoding import BlockWindow, Decoder, NoQuota, ThresholdPolicy
from lit_dlm.decoding.caches import DualCache
from lit_dlm.toy import WordProblems
from lit_dlm.tracelock.generate import TraceModule
from lit_dlm.trajectories.store.files import shards_in
from lit_dlm.trajectories.tools.show import show_set
from lit_dlm.trajectories.tools.verify import Execution, verify
from tests.finetuning.runs import quiet
from tests.traces import small_projector, tracelock
from tests.trajectories.samples import read_all

DECODERS = {
    "canvas": Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota()),
    "blocks": Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota(), window=BlockWindow(8)),
}


@pytest.fixture(scope="module")
def backbone() -> HFBackbone:
    return load_backbone("tiny")


@pytest.fixture(scope="module", params=["fp16", "int8"])
def folder(
    request: pytest.FixtureRequest, backbone: HFBackbone, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run = tmp_path_factory.mktemp(request.param)
    module = TraceModule(
        backbone,
        tokenizer="tiny",
        decoders=dict(DECODERS),
        level="logits",
        step_ratio=0.5,
        scheme=request.param,
    )
    writer = DecodeWriter(trajectories_dir=str(run / "traces"), grade=True)
    prompts = PromptDataModule([WordProblems("test", 3)], response_length=32, batch_size=2)
    quiet(run, callbacks=[writer]).predict(module, prompts, return_predictions=False)
    return run / "traces"


def test_stored_logits_are_those_of_a_forward_of_the_recorded_canvas(
    folder: Path, backbone: HFBackbone
) -> None:
    """Within the scheme's bound, plus 1e-4 for rows that were computed in another batch."""
    num_rows = 0
    for record in read_all(folder):
        stored = record.features
        for k, step in enumerate(stored.kept_steps):
            state = record.state_at(int(step))
            at, G = state == record.mask_id, len(state)
            canvas = torch.tensor([*record.prompt_ids, *state])[None]
            with torch.inference_mode():
                denoised = backbone.denoise(canvas, response_start=canvas.shape[1] - G)
            expected = denoised.logits[0, -G:].double().numpy()[at]
            values = stored.dequantized()[k][at].astype(np.float64)
            is_out = np.isneginf(expected)
            np.testing.assert_array_equal(np.isneginf(values), is_out)
            expected, values = np.where(is_out, 0, expected), np.where(is_out, 0, values)
            bound = np.abs(expected) / 2048
            if stored.scheme == "int8":
                bound = np.abs(expected).max(-1, keepdims=True) / 253
            assert (np.abs(values - expected) <= bound + 1e-4).all()
            num_rows += int(at.sum())
    assert num_rows > 300


def test_records_with_logits_are_verified_and_shown(
    folder: Path, backbone: HFBackbone, capsys: pytest.CaptureFixture[str]
) -> None:
    result = verify(shards_in(folder), level=3, execution=Execution(backbone=backbone))
    assert (result.problems, result.differences, result.failed) == ([], [], False)
    assert result.counts == {"exact": 6, "explained": 0, "failed": 0}
    show_set(shards_in(folder))
    shown = capsys.readouterr().out
    assert '"level": "logits"' in shown
    assert '"layout": "logits"' in shown
    (size,) = (line for line in shown.splitlines() if "of these, features" in line)
    assert int(size.replace("│", " ").split()[-1].replace(",", "")) > 10_000


def test_logits_are_no_features_of_a_policy(folder: Path, tmp_path: Path) -> None:
    rule = "traces: record 'word_problems/.*: expected features, got logits; generate"
    with pytest.raises(ValueError, match=rule):
        quiet(tmp_path).fit(tracelock(small_projector()), TrajectoryDataModule(folder))


def test_a_cache_does_not_compute_the_logits_that_are_kept(backbone: HFBackbone) -> None:
    cached = Decoder(policy=ThresholdPolicy(0.9), window=BlockWindow(8), cache=DualCache())
    rule = r"decoders\.b\.cache: expected NoCache at level 'logits'"
    with pytest.raises(ValueError, match=rule):
        TraceModule(backbone, tokenizer="tiny", decoders={"b": cached}, level="logits")
