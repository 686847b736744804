"""Muon for matrices and AdamW for the rest, in one optimiser, in float32.

The matrix update is that of ``torch.optim.Muon`` (which multiplies in bfloat16, slow on processors
without matrix units), but matrices of equal shape are iterated as one batch. One optimiser instead
of two keeps automatic optimisation, one step counter and one checkpoint entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Odd quintic of the iteration (K. Jordan, Muon, 2024), which moves singular values near one."""

_MOMENTUM = 0.95  # of the gradients of matrices
_BETAS = (0.9, 0.95)  # of AdamW


def orthogonalise(matrices: Tensor) -> Tensor:
    """Maps ``(N, R, C)`` matrices with singular vectors ``U, V`` to about ``U V^T``.

    Singular values that are not tiny end between about 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    # The Gram matrix of the shorter side is smaller, and every product has that size.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # The iteration needs singular values of at most 1; the Frobenius norm bounds the largest.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class MuonAdamW(Optimizer):
    """Muon with Nesterov momentum for ``matrices``, AdamW for ``others``.

    Args:
        matrices: parameters with two dimensions that map vectors to vectors. An update has a
            spectral norm of about ``matrix_lr * sqrt(max(1, rows / columns))``.
        others: everything else: embeddings, norms and biases.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        *,
        matrix_lr: float = 0.01,
        other_lr: float = 3e-3,
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"params": list(matrices), "lr": matrix_lr, "is_matrix": True},
            {"params": list(others), "lr": other_lr, "is_matrix": False},
        ]
        super().__init__([group for group in groups if group["params"]], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if group["is_matrix"]:
                self._update_matrices(trained, group)
            else:
                for parameter in trained:
                    self._update_other(parameter, group)
        return loss

    def _update_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        # A batch of equal shapes: the layers of a model have few, and small products alone leave a
        # processor waiting.
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        for shape, alike in by_shape.items():
            ahead = []
            for parameter in alike:
                assert parameter.grad is not None
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"].lerp_(parameter.grad, 1.0 - _MOMENTUM)
                ahead.append(parameter.grad.lerp(average, _MOMENTUM))
            updates = orthogonalise(torch.stack(ahead).float())
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, update in zip(alike, updates, strict=True):
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * scale)

    def _update_other(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """One AdamW step (Loshchilov and Hutter, 1711.05101, algorithm 2)."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["num_steps"] = torch.zeros(())
            state["first"] = torch.zeros_like(parameter)
            state["second"] = torch.zeros_like(parameter)
        state["num_steps"] += 1
        steps = float(state["num_steps"])
        first_decay, second_decay = _BETAS
        state["first"].lerp_(parameter.grad, 1.0 - first_decay)
        state["second"].mul_(second_decay).addcmul_(
            parameter.grad, parameter.grad, value=1.0 - second_decay
        )
        spread = (state["second"] / (1.0 - second_decay**steps)).sqrt_().add_(1e-8)
        parameter.addcdiv_(state["first"], spread, value=-group["lr"] / (1.0 - first_decay**steps))
