"""Precisions of the trainer, and results that must not follow torch's default dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

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
    prompt_canvas,
)
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.scorer import AcceptanceScorer, ScorerSettings
from lit_dlm.losses.corruption import RandomMasking
from lit_dlm.modules import AutoencoderModule, DecodeModule, SFTModule, TABOMModule
from lit_dlm.modules.decode import PromptBatch
from lit_dlm.rl.rollout import SampledLogProb
from lit_dlm.tasks import PromptExample
from tests import rollouts
from tests.finetuning import Data, examples, quiet, run, small, trained
from tests.traces import small_backbone, small_projector

SGD: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def batch() -> PromptBatch:
    example = PromptExample(uid="t/test/0", task="t", text="2 + 3")
    return PromptBatch([example], [[3, 4]], method="entropy", response_length=8)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("kind", [DecodeModule, SFTModule, AutoencoderModule])
def test_true_precisions_are_refused_by_name(
    kind: type[LightningModule], precision: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"hidden_rank": 8, "delta_rank": 4}
    if kind is not AutoencoderModule:
        options = {"tokenizer": "tiny", "decoders": {"entropy": Decoder(policy=EntropyPolicy())}}
    if kind is SFTModule:
        options["corruption"] = RandomMasking()
    trainer = quiet(tmp_path, precision=precision)
    loader = torch.utils.data.DataLoader([batch()], batch_size=None)
    with pytest.raises(ValueError, match=f"trainer.precision: expected 32-true.*got {precision}"):
        (trainer.predict if kind is DecodeModule else trainer.fit)(kind(small(), **options), loader)


def scorer(config: AcceptanceConfig) -> AcceptanceScorer:
    torch.manual_seed(0)
    settings = ScorerSettings(layout="generation")
    return AcceptanceScorer(small_projector(), head=config, settings=settings).eval()


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
    **{
        f"tracelock {positions}": Decoder(
            policy=TraceLockPolicy(
                scorer=scorer(
                    AcceptanceConfig(
                        positions=positions,  # type: ignore[arg-type]
                        width=16,
                        num_heads=2,
                        num_layers=1,
                    )
                ),
                threshold=0.5,
            ),
            quota=NoQuota(),
        )
        for positions in ("frontier", "learned")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(DECODERS))
def test_decoding_does_not_follow_the_default_dtype(name: str) -> None:
    backbone = small_backbone()
    canvas = prompt_canvas([[3], [4, 5, 6]], response_length=16, spec=backbone.spec, seeds=[1, 2])

    def decoded(dtype: torch.dtype) -> tuple[Tensor, ...]:
        scores: list[Tensor] = []

        class Watch(SampledLogProb):
            def on_step(self, record: Any) -> None:
                super().on_step(record)
                scores.append(record.scores)

        with default_dtype(dtype):
            watch = Watch()
            result = DECODERS[name](backbone, canvas, [watch])
        return result.ids, result.num_steps, watch.ended(), *scores

    for one, other in zip(decoded(torch.float32), decoded(torch.bfloat16), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["sft", "tabom", "tracerl"])
def test_training_does_not_follow_the_default_dtype(kind: str, tmp_path: Path) -> None:
    """Whole runs, their data and rollouts included."""

    def weights(dtype: torch.dtype) -> dict[str, Tensor]:
        folder = tmp_path / str(dtype)
        if kind == "tracerl":
            rl, data = rollouts.learner(), rollouts.rollout_data()
            before = trained(rl)
            with default_dtype(dtype):
                rollouts.fit(rl, data, folder, steps=1)
            assert any(not torch.equal(before[name], value) for name, value in trained(rl).items())
            return trained(rl)
        options = {"tokenizer": "tiny", **SGD}
        model = (
            SFTModule(small(), corruption=RandomMasking(), **options)
            if kind == "sft"
            else TABOMModule(small(), window=4, rank_window=3, **options)
        )
        with default_dtype(dtype):
            run(model, Data(examples(), batch_size=4), folder, steps=2)
        return trained(model)

    torch.testing.assert_close(weights(torch.bfloat16), weights(torch.float32), rtol=0, atol=0)
