"""Projectors that need no hidden states to be fitted on."""

import torch

from lit_dlm.backbones.projection import Projector, ProjectorConfig


def random_orthogonal(config: ProjectorConfig, *, seed: int = 0) -> Projector:
    """A projector onto random orthonormal directions, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    projector = Projector(config)
    for name in ("hidden_weight", "delta_weight"):
        weight = getattr(projector, name)
        noise = torch.randn(
            config.hidden_size, weight.shape[0], generator=generator, dtype=torch.float64
        )
        weight.copy_(torch.linalg.qr(noise).Q.T)
    return projector
