"""Muon and AdamW in one optimiser, against torch's own."""

from typing import Any

import pytest
import torch

from lit_dlm.finetuning.muon import MuonAdamW, orthogonalise


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_orthogonalise_keeps_singular_vectors_and_flattens_singular_values() -> None:
    left, right = (torch.linalg.qr(random(n, n))[0] for n in (6, 4))
    values = torch.tensor([5.0, 2.0, 1.0, 0.5])
    matrix = left[:, :4] @ torch.diag(values) @ right.T
    turned = left[:, :4].T @ orthogonalise(matrix[None])[0] @ right
    off_diagonal = turned - torch.diag(turned.diagonal())
    torch.testing.assert_close(off_diagonal, torch.zeros(4, 4), atol=1e-4, rtol=0)
    assert turned.diagonal().min() > 0.6
    assert turned.diagonal().max() < 1.25
    # A tall matrix is the transpose of a wide one.
    tall = random(2, 5, 3)
    torch.testing.assert_close(orthogonalise(tall).mT, orthogonalise(tall.mT))


def trained(make: Any, start: torch.Tensor) -> torch.Tensor:
    value = start.clone().requires_grad_()
    optimizer = make([value])
    for step in range(10):
        value.grad = random(*start.shape, seed=step)
        optimizer.step()
    return value.detach()


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_matrices_follow_torch_muon(shape: tuple[int, int]) -> None:
    """torch multiplies in bfloat16, three digits, hence the tolerance (ten steps of 0.01)."""
    options: Any = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.0}
    expected = trained(lambda p: torch.optim.Muon(p, **options), torch.zeros(shape))
    found = trained(lambda p: MuonAdamW(p, [], matrix_lr=0.01), torch.zeros(shape))
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=0)


def test_others_follow_torch_adamw() -> None:
    start, options = torch.linspace(-1, 1, 8), {"betas": (0.9, 0.95), "weight_decay": 0.0}
    expected = trained(lambda p: torch.optim.AdamW(p, lr=0.1, **options), start)
    torch.testing.assert_close(trained(lambda p: MuonAdamW([], p, other_lr=0.1), start), expected)


def test_matrices_of_one_shape_are_updated_as_each_alone() -> None:
    alone = [torch.zeros(3, 4, requires_grad=True) for _ in range(2)]
    together = [torch.zeros(3, 4, requires_grad=True) for _ in range(2)]
    for parameters in (alone, together):
        for seed, parameter in enumerate(parameters):
            parameter.grad = random(3, 4, seed=seed)
    for optimizer in (*(MuonAdamW([p], []) for p in alone), MuonAdamW(together, [])):
        optimizer.step()
    torch.testing.assert_close(together, alone)
