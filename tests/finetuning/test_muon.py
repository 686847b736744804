"""Muon and AdamW in one optimiser, against torch's own."""

from typing import Any

import torch

from lit_dlm.finetuning.muon import MuonAdamW


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(optimizers: Any, values: list[torch.Tensor], *, seed: int) -> None:
    for step in range(5):
        for value in values:
            value.grad = random(*value.shape, seed=seed + step)
        for optimizer in optimizers:
            optimizer.step()


def test_it_does_what_both_do_also_behind_a_checkpoint() -> None:
    """Checkpoints hold the state of both, and the rates that a schedule has set."""
    ours, theirs, late = (
        [random(6, 4).requires_grad_(), torch.linspace(-1, 1, 8)] for _ in range(3)
    )
    matrix: Any = {"lr": 0.01, "weight_decay": 0.0}
    other: Any = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0}
    both = [torch.optim.Muon(theirs[:1], **matrix), torch.optim.AdamW(theirs[1:], **other)]
    one = MuonAdamW(ours[:1], ours[1:], matrix_lr=0.01, other_lr=0.1)
    trained([one], ours, seed=0)
    trained(both, theirs, seed=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for optimizer, group in ((one, 0), (both[0], 0), (one, 1), (both[1], 0)):
        optimizer.param_groups[group]["lr"] *= 0.5
    again = MuonAdamW(late[:1], late[1:])
    again.load_state_dict(one.state_dict())
    with torch.no_grad():
        for value, trained_one in zip(late, ours, strict=True):
            value.copy_(trained_one)
    trained([again], late, seed=9)
    trained(both, theirs, seed=9)
    torch.testing.assert_close(late, theirs, rtol=0, atol=0)
