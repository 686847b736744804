"""A linear layer with low-rank adapters (arXiv:2106.09685), each of which is added in one launch.

peft copies the input to the adapter's dtype, and multiplies, scales and adds in three launches. In
float32 on a CPU the bits are peft's where the scale is a power of two.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor


class AdaptedLinear(Linear):
    """peft's layer of a plain matrix, with its attributes and keys, but not its own switches.

    ``disable_adapters`` and ``merge`` are not looked at, see :mod:`lit_dlm.backbones.lora`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``(..., out)`` of ``(..., in)``, in the dtype of the base layer's result."""
        # In two dimensions, as autograd copies gradients where a view is added to in place.
        total: Tensor = self.base_layer(x.flatten(0, -2))
        matrices: Any = self.lora_A, self.lora_B
        for name in self.active_adapters:
            if name in self.lora_A:
                # Autocast leaves additions in place alone, and may be off.
                A, B = (part[name].weight.to(total.dtype) for part in matrices)
                # Of x, not of its flattened view: so gradients are summed in the order of peft's.
                low = F.linear(self.lora_dropout[name](x), A)  # (..., rank)
                # Out of place, a GPU would first copy the base layer's result.
                total.addmm_(low.flatten(0, -2), B.t(), alpha=self.scaling[name])
        return total.view(*x.shape[:-1], total.shape[-1])
