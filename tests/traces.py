"""Recorded decodes of a small random model, for tests that read trajectories."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.projection import (
    FeatureSettings,
    Projector,
    ProjectorConfig,
    acceptance_features,
    feature_groups,
)
from lit_dlm.decoding import Decoder, EntropyPolicy, Observer, decode, prompt_canvas
from lit_dlm.tracelock.module import TraceLockModule
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.trajectories.capture import FeatureCapture, KeptSteps, TrajectoryCapture
from lit_dlm.trajectories.features import FeatureLayout, FeatureScheme
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import RunRecord, TrajectoryShardWriter
from tests.finetuning.runs import EOS, MASK, PAD, SIZES, VOCAB  # noqa: F401 - for others
from tests.projectors import random_orthogonal

PROJECTOR = ProjectorConfig(hidden_size=16, hidden_rank=6, delta_rank=3, kind="random_orthogonal")


def small_backbone(seed: int = 0, **changes: Any) -> HFBackbone:
    torch.manual_seed(seed)
    own = {"intermediate_size": 32, "family": "tiny", "forbidden_ids": (PAD,)}
    return HFBackbone(architecture=Architecture(**{**SIZES, **own, **changes})).eval()


def small_projector() -> Projector:
    return random_orthogonal(PROJECTOR, seed=5)


def feature_capture(
    projector: Projector,
    *,
    settings: FeatureSettings | None = None,
    scheme: FeatureScheme = "fp16",
    layout: FeatureLayout = "generation",
    step_ratio: float = 1.0,
) -> FeatureCapture:
    settings = settings or FeatureSettings()
    return FeatureCapture(
        function=partial(acceptance_features, projector, settings=settings),
        hidden_layers=(-3, -2, -1),
        groups=feature_groups(projector.config, settings),
        projector_digest=projector.digest(),
        steps=partial(KeptSteps, ratio=step_ratio),
        scheme=scheme,
        layout=layout,
        scores=frozenset(n for n in ("entropy", "margin") if getattr(settings, n)),
    )


def recorded(
    backbone: HFBackbone,
    num_records: int = 12,
    *,
    response_length: int = 8,
    features: FeatureCapture | None = None,
    decoder: Decoder | None = None,
    watching: Sequence[Observer] = (),
) -> list[Trajectory]:
    """Decodes random prompts of one to four tokens in one padded batch."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, VOCAB, (1 + row % 4,), generator=generator) for row in range(num_records)
    ]
    capture = TrajectoryCapture(
        vocab_size=VOCAB, level="features" if features else "tokens", features=features
    )
    canvas = prompt_canvas(
        prompts, response_length=response_length, spec=backbone.spec, seeds=range(num_records)
    )
    decode(backbone, decoder or Decoder(policy=EntropyPolicy()), canvas, [capture, *watching])
    return capture.trajectories(
        [f"fake/train/{row:05d}@entropy" for row in range(num_records)],
        [{"task": "fake", "correct": row % 3 > 0} for row in range(num_records)],
    )


def write_shards(
    folder: Path,
    records: Sequence[Trajectory],
    *,
    records_per_block: int = 4,
    rank: int = 0,
    split: str = "train",
    **run: Any,
) -> Path:
    empty = {key: {} for key in ("model", "tokenizer", "decode", "randomness", "data")}
    with TrajectoryShardWriter(
        folder,
        name="traces",
        split=split,
        rank=rank,
        run=RunRecord(**{**empty, **run}),
        records_per_block=records_per_block,
    ) as writer:
        for record in records:
            writer.put(record)
    return folder


def tracelock(projector: Projector) -> TraceLockModule:
    head = AcceptanceConfig(width=16, num_layers=1, num_heads=2, ffn_width=16)
    return TraceLockModule(small_backbone(), tokenizer="unused", projector=projector, head=head)
