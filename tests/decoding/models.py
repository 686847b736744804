"""Small models and acceptance networks of the decoding tests."""

from typing import Any

import torch
from torch import Tensor

from lit_dlm.backbones.attention import AttentionRoute
from lit_dlm.backbones.base import backbone_facts
from lit_dlm.backbones.experts import Experts
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.projection import ProjectorConfig
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.scorer import AcceptanceScorer, ScorerSettings
from tests.backbones.conftest import tiny_architecture
from tests.fakes import PAD, TableBackbone, logits_for
from tests.projectors import random_orthogonal


def table_backbone(tokens: list[int], probs: list[float], prompt: int = 2) -> TableBackbone:
    """Proposes tokens with these probabilities behind prompts of some tokens."""
    return TableBackbone(logits_for([4] * prompt + tokens, [0.5] * prompt + probs, 9))


def hashed(ids: Tensor) -> Tensor:
    """Logits that depend on the visible tokens of the same row, so that order matters.

    Padding does not count: positions are taken from the first real token.
    """
    rows = []
    for row, count in zip(ids, (ids == PAD).sum(1).tolist(), strict=True):
        real = row[count:]
        visible = (real * (real > 1) * torch.arange(1, len(real) + 1)).sum()
        places = torch.arange(len(real))[:, None] * 1.3
        table = 3.0 * torch.sin(visible * 0.7 + places + torch.arange(12) * 2.1)
        rows.append(torch.cat([table.new_zeros(count, 12), table]))
    return torch.stack(rows)


def tiny_backbone(attn: AttentionRoute = "auto", **changes: object) -> HFBackbone:
    """Two layers whose query heads share their keys."""
    torch.manual_seed(3)
    values = {"vocab_size": 97, "num_layers": 2, "num_kv_heads": 1, **changes}
    return HFBackbone(architecture=tiny_architecture(**values), attn_implementation=attn).eval()


def in_blocks(origin: str) -> dict[str, Any]:
    """Changes of a backbone that writes blocks of four."""
    return {"decoder": "qwen3", "attention": "block", "block_size": 4, "block_origin": origin}


SPARSE: dict[str, Any] = {
    "decoder": "qwen3_moe",
    "experts": Experts(number=4, per_token=2, width=8),
}
"""Changes of a backbone whose layers have experts."""


def scorer(
    backbone: HFBackbone | None = None,
    *,
    seed: int = 0,
    bias: float = 0.0,
    spread: float = 1.0,
    layout: str = "generation",
) -> AcceptanceScorer:
    """Random weights; logits are ``spread`` times the network's plus ``bias``."""
    torch.manual_seed(seed)
    width = backbone.hidden_size if backbone else 4
    config = ProjectorConfig(
        hidden_size=width, hidden_rank=3, delta_rank=2, kind="random_orthogonal"
    )
    built = AcceptanceScorer(
        random_orthogonal(config),
        head=AcceptanceConfig(width=16, num_layers=2, num_heads=2, ffn_width=16),
        settings=ScorerSettings(layout=layout, hidden_layers=(-3, -2, -1)),
        backbone=backbone_facts(backbone.spec, backbone) if backbone else None,
    )
    with torch.no_grad():
        built.head.logit_head.weight *= spread
        built.head.logit_head.bias.fill_(bias)
    return built.eval()
