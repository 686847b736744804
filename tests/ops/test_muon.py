"""Muon and AdamW in one optimiser, against torch's own."""

import pytest
import torch

from lit_dlm.ops.muon import MuonAdamW, orthogonalise


def test_orthogonalise_keeps_singular_vectors_and_flattens_singular_values() -> None:
    left, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    right, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    values = torch.tensor([5.0, 2.0, 1.0, 0.5])
    matrix = left[:, :4] @ torch.diag(values) @ right.T
    turned = left[:, :4].T @ orthogonalise(matrix[None])[0] @ right
    off_diagonal = turned - torch.diag(turned.diagonal())
    torch.testing.assert_close(off_diagonal, torch.zeros(4, 4), atol=1e-4, rtol=0)
    assert turned.diagonal().min() > 0.6
    assert turned.diagonal().max() < 1.25


def test_a_tall_matrix_is_the_transpose_of_a_wide_one() -> None:
    matrix = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalise(matrix).mT, orthogonalise(matrix.mT))


def _train(make: object, parameter: torch.Tensor, steps: int) -> torch.Tensor:
    value = parameter.clone().requires_grad_()
    optimizer = make(value)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        value.grad = torch.randn(value.shape, generator=generator)
        optimizer.step()
    return value.detach()


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_matrices_follow_torch_muon(shape: tuple[int, int]) -> None:
    """torch multiplies in bfloat16, three digits, hence the tolerance (ten steps of 0.01)."""
    start = torch.zeros(shape)
    ours = _train(lambda p: MuonAdamW([p], [], matrix_lr=0.01), start, 10)
    theirs = _train(
        lambda p: torch.optim.Muon([p], lr=0.01, momentum=0.95, weight_decay=0.0), start, 10
    )
    torch.testing.assert_close(ours, theirs, atol=4e-3, rtol=0)


def test_others_follow_torch_adamw() -> None:
    start = torch.linspace(-1, 1, 8)
    ours = _train(lambda p: MuonAdamW([], [p], other_lr=0.1), start, 12)
    theirs = _train(
        lambda p: torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0), start, 12
    )
    torch.testing.assert_close(ours, theirs)


def test_grouping_by_shape_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(3, 4, generator=generator) for _ in range(2)]
    together = [torch.zeros(3, 4, requires_grad=True) for _ in range(2)]
    alone = [torch.zeros(3, 4, requires_grad=True) for _ in range(2)]
    for parameters, optimizers in (
        (together, [MuonAdamW(together, [])]),
        (alone, [MuonAdamW([p], []) for p in alone]),
    ):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for first, second in zip(together, alone, strict=True):
        torch.testing.assert_close(first, second)
