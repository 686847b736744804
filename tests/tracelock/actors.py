"""A small random acceptance network that is trained on outcomes."""

from typing import Any

import torch

from lit_dlm.backbones.projection import ProjectorConfig
from lit_dlm.decoding import BlockWindow, Decoder, DecodeSettings, NoQuota, Sampler
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.outcome import TraceLockRLModule
from lit_dlm.tracelock.policy import TraceLockPolicy
from tests.projectors import random_orthogonal
from tests.rollouts import policy

WORDS = {"vocab_size": 462, "forbidden_ids": (0, 3, 4)}
"""Of a model whose responses are text for the embedded tokenizer."""
HEAD = AcceptanceConfig(width=16, num_layers=2, num_heads=2, ffn_width=16, dropout=0.5)


def actor(window: BlockWindow | None = None, **options: Any) -> TraceLockRLModule:
    torch.manual_seed(3)
    backbone = policy(lora=False, **options.pop("family", {}))
    commits = {"threshold": options.pop("threshold", 0.6), "max_accept_per_step": None}
    drawn = TraceLockPolicy("none", temperature=0.7, **commits)
    decoder = Decoder(
        policy=drawn,
        window=window,
        quota=NoQuota(),
        sampler=options.pop("sampler", Sampler()),
        settings=DecodeSettings(eos_rule="fill", eos_gate=True),
    )
    sizes = ProjectorConfig(hidden_size=backbone.hidden_size, hidden_rank=6, delta_rank=3)
    options = {"projector": random_orthogonal(sizes), "head": HEAD, **options}
    return TraceLockRLModule(backbone, tokenizer="tiny", decoders={"drawn": decoder}, **options)
