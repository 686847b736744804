"""Projectors that need no hidden states to be fitted on."""

from pathlib import Path

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


def write_release(folder: Path, inner: int = 0) -> tuple[Path, dict[str, torch.nn.Module]]:
    """Random networks in the layout of the release's file."""
    torch.manual_seed(3)
    networks: dict[str, torch.nn.Module] = {}
    for name, rank in (("hidden", 4), ("delta", 2)):
        norm = torch.nn.LayerNorm(12)
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
        layers = (
            [torch.nn.Linear(12, inner), torch.nn.GELU(), torch.nn.Dropout(0.1)] if inner else []
        )
        encoder = torch.nn.Sequential(*layers, torch.nn.Linear(inner or 12, rank))
        networks |= {f"{name}_norm": norm, f"{name}_encoder": encoder.eval()}
    config = {"d_model": 12, "d_hidden_bottleneck": 4, "d_delta_bottleneck": 2, "dropout": 0.1}
    state = {name: network.state_dict() for name, network in networks.items()}
    path = folder / "best_val_loss.pt"
    torch.save({"autoencoder_config": config, "projection_state": state}, path)
    return path, networks
