"""The layer of an adapted matrix, against peft's own."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from lit_dlm.backbones import HFBackbone, LoRASettings
from lit_dlm.backbones.adapted_linear import AdaptedLinear
from lit_dlm.backbones.base import Rows
from lit_dlm.backbones.lora import inject
from tests.backbones.conftest import tiny_architecture
from tests.backbones.folders import IDS, randomise


def adapted(base: list[list[float]], A: list[list[float]], B: list[list[float]]) -> Any:
    """A matrix in bfloat16 and its adapter in float32, of scale 1."""
    matrix = nn.Linear(len(base[0]), len(base), bias=False, dtype=torch.bfloat16)
    model: Any = nn.ModuleDict({"q_proj": matrix})
    inject(model, LoRASettings(rank=len(A), alpha=len(A), targets=["q_proj"]))
    layer = model["q_proj"]
    for part, values in (
        (matrix, base),
        (layer.lora_A["default"], A),
        (layer.lora_B["default"], B),
    ):
        part.weight.data.copy_(torch.tensor(values))
    return layer


def loss_and_gradients(settings: LoRASettings) -> tuple[Tensor, list[Tensor | None]]:
    torch.manual_seed(0)
    backbone = HFBackbone(architecture=tiny_architecture(num_kv_heads=1), lora=settings)
    randomise(backbone.train())
    loss = backbone.score_tokens(Rows(IDS % 32, IDS % 32, IDS > 3)).ce.mean()
    loss.backward()
    return loss, [value.grad for value in backbone.parameters() if value.requires_grad]


@pytest.mark.parametrize(
    ("alpha", "dropout", "bound"), [(4.0, 0.0, 0.0), (8.0, 0.5, 0.0), (5.0, 0.0, 1e-5)]
)
def test_float32_gives_the_bits_of_peft_at_scales_of_a_power_of_two(
    alpha: float, dropout: float, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients; other scales are multiplied and added with one rounding, not two."""
    settings = LoRASettings(rank=4, alpha=alpha, dropout=dropout, targets="all")
    ours = loss_and_gradients(settings)
    monkeypatch.setattr(AdaptedLinear, "forward", peft.tuners.lora.Linear.forward)
    torch.testing.assert_close(ours, loss_and_gradients(settings), rtol=bound, atol=bound)


@pytest.mark.parametrize("is_autocast", [True, False])
def test_half_precision_rounds_the_sum_once_and_keeps_the_input_alone(is_autocast: bool) -> None:
    """256 + (1 + 1 / 512) is 258 in bfloat16, whose numbers there are 2 apart.

    peft's autocast rounds the product to 1, and 257 to the even 256. Gradients: of A the input
    times B, of B the rows (1, 1 / 512). Kept are the input, the matrix, A, B, and the rows between.
    """
    layer = adapted([[256.0, 0.0]], A=[[1.0, 0.0], [0.0, 1 / 512]], B=[[1.0, 1.0]])
    x = torch.ones(3, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []

    def keep(one: Tensor) -> Tensor:
        kept.append(one)
        return one

    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one)
    with saving, torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [[[258.0]]] * 3
    assert len({one.untyped_storage().data_ptr() for one in kept}) == 5
    y.sum().backward()
    A, B = (part["default"].weight.grad for part in (layer.lora_A, layer.lora_B))
    assert (A.tolist(), B.tolist()) == ([[3.0, 3.0], [3.0, 3.0]], [[3.0, 3 / 512]])
