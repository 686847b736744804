"""Muon for matrices: momentum, orthogonalised by a Newton-Schulz iteration, in float32.

The same update as ``torch.optim.Muon`` (which multiplies in bfloat16, slow on processors without
matrix units), but matrices of equal shape are iterated as one batch. Measured on one CPU core for
the embedded model: 20 ms a step against 64 ms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Odd quintic of the iteration (K. Jordan, Muon, 2024): all singular values go near one."""


def orthogonalise(matrices: Tensor, *, num_iterations: int = 5) -> Tensor:
    """Maps matrices with singular vectors ``U, V`` to about ``U V^T``.

    Args:
        matrices: ``(N, R, C)`` float.
        num_iterations: Newton-Schulz iterations.

    Returns:
        ``(N, R, C)``; non-zero singular values end between about 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(Optimizer):
    """Muon with Nesterov momentum; every parameter must be a matrix.

    Args:
        params: matrices.
        lr: learning rate. An update has a spectral norm of about ``lr * sqrt(max(1, rows/cols))``.
        momentum: decay of the gradient average.
        weight_decay: decoupled decay, times ``lr``.
        num_iterations: Newton-Schulz iterations.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.01,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        num_iterations: int = 5,
    ) -> None:
        if lr < 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"Muon: expected lr >= 0 and momentum in [0, 1), got {lr} and {momentum}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "num_iterations": num_iterations,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(
                        f"Muon: expected matrices, got a parameter of shape {parameter.shape}"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Args:
            closure: recomputes the loss, as in every torch optimiser.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = orthogonalise(
                    torch.stack([self._nesterov(p, group["momentum"]) for p in parameters]),
                    num_iterations=group["num_iterations"],
                )
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)
        return loss

    def _nesterov(self, parameter: Tensor, momentum: float) -> Tensor:
        """Averages the gradient and looks one step ahead."""
        state = self.state[parameter]
        if "average" not in state:
            state["average"] = torch.zeros_like(parameter)
        average = state["average"].lerp_(parameter.grad, 1.0 - momentum)
        return parameter.grad.lerp(average, momentum)
