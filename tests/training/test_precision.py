"""Precisions of the trainer, and results that must not follow torch's default dtype."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dlm import AutoencoderModule, DecodeModule, SFTModule
from lit_dlm.decoding import (
    BudgetQuota,
    Decoder,
    EntropyPolicy,
    EvenQuota,
    FixedQuota,
    NoQuota,
    Sampler,
    ScheduleQuota,
    ThresholdPolicy,
    decode,
    prompt_canvas,
)
from lit_dlm.decoding.api import SampledWrites
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.policy import TraceLockPolicy
from lit_dlm.tracelock.scorer import AcceptanceScorer, ScorerSettings
from tests import rollouts
from tests.finetuning.runs import Data, examples, quiet, run, small, trained
from tests.traces import small_backbone, small_projector
from tests.training.supervised import sft, tabom


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("kind", [DecodeModule, SFTModule, AutoencoderModule])
def test_true_precisions_are_refused_by_name(kind: Any, precision: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"hidden_rank": 8, "delta_rank": 4}
    if kind is not AutoencoderModule:
        options = {"tokenizer": "tiny"}
    trainer = quiet(tmp_path, precision=precision)
    with pytest.raises(ValueError, match=f"trainer.precision: expected 32-true.*got {precision}"):
        (trainer.predict if kind is DecodeModule else trainer.fit)(kind(small(), **options), [0])


def tracelock(positions: Any) -> Decoder:
    torch.manual_seed(0)
    config = AcceptanceConfig(positions=positions, width=16, num_heads=2, num_layers=1)
    settings = ScorerSettings(layout="generation")
    scorer = AcceptanceScorer(small_projector(), head=config, settings=settings).eval()
    return Decoder(policy=TraceLockPolicy(scorer=scorer, threshold=0.5), quota=NoQuota())


DECODERS = {
    "schedule": Decoder(policy=EntropyPolicy(), quota=ScheduleQuota(12)),
    "schedule per block": Decoder(policy=EntropyPolicy(), quota=ScheduleQuota(steps_per_block=12)),
    "even": Decoder(policy=EntropyPolicy(), quota=EvenQuota(6)),
    "budget": Decoder(policy=EntropyPolicy(), quota=BudgetQuota(6)),
    "fixed": Decoder(policy=EntropyPolicy(), quota=FixedQuota(2), sampler=Sampler(temperature=1.0)),
    "threshold": Decoder(
        policy=ThresholdPolicy(0.2),
        quota=NoQuota(),
        sampler=Sampler(temperature=0.7, top_p=0.9, top_k=9, score_on="filtered"),
    ),
    "tracelock frontier": tracelock("frontier"),
    "tracelock learned": tracelock("learned"),
}


class Watch(SampledWrites):
    """Keeps the scores of every step, too."""

    def on_start(self, state: Any) -> None:
        super().on_start(state)
        self.scores: list[Tensor] = []

    def on_step(self, record: Any) -> None:
        super().on_step(record)
        self.scores.append(record.scores)


@pytest.mark.parametrize("name", list(DECODERS))
def test_decoding_does_not_follow_the_default_dtype(name: str) -> None:
    backbone, found = small_backbone(), []
    canvas = prompt_canvas([[3], [4, 5, 6]], response_length=16, spec=backbone.spec, seeds=[1, 2])
    for dtype in (torch.float32, torch.bfloat16):
        with default_dtype(dtype):
            watch = Watch()
            result = decode(backbone, DECODERS[name], canvas, [watch])
        found.append((result.ids, result.num_steps, watch.ended(), *watch.scores))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["sft", "tabom", "tracerl"])
def test_training_does_not_follow_the_default_dtype(kind: str, tmp_path: Path) -> None:
    """Whole runs, their data and rollouts included."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        folder, data = tmp_path / str(dtype), rollouts.rollout_data()
        model = {"sft": sft, "tabom": tabom, "tracerl": rollouts.learner}[kind]()
        before = trained(model)
        with default_dtype(dtype):
            if kind == "tracerl":
                rollouts.fit(model, data, folder, steps=1)
            else:
                run(model, Data(examples(), batch_size=4), folder, steps=2)
        found.append(trained(model))
        assert any(not torch.equal(before[name], value) for name, value in found[-1].items())
    torch.testing.assert_close(*found, rtol=0, atol=0)
