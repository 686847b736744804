"""A fine-tuning loss of your own: cross-entropy, and certainty where predictions are right.

In the folder of this file, use these lines with
``lit-dlm fit --config exp/sft_gt_tiny --config FILE``::

    model:
      class_path: finetuning_loss.CertainModule
      init_args: {certainty: 0.5}

``training_method.py`` shows how to choose the states that a model is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lit_dlm import SFTModule
from lit_dlm.backbones import HFBackbone
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.states import States
from lit_dlm.training.terms import LossTerms


class CertainModule(SFTModule):
    """Adds the entropy of predictions that are already right to the cross-entropy.

    Args:
        backbone: see :class:`~lit_dlm.finetuning.sft.SFTModule`, also for ``common``.
        certainty: weight of the entropy.
    """

    def __init__(self, backbone: HFBackbone, *, certainty: float = 0.5, **common: Any) -> None:
        super().__init__(backbone, **common)
        self.certainty = certainty

    def loss_terms(self, batch: SupervisedBatch, states: States, stats: TokenStats) -> LossTerms:
        base = super().loss_terms(batch, states, stats)
        summed = stats.entropy[stats.is_top].sum()  # of the supervised cells, (M,)
        count = stats.is_top.sum()
        total = base.total + self.certainty * summed / self.divisor(count)
        return LossTerms(total, sums={**base.sums, "certainty": (summed.detach(), count)})

    def combined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the logged loss, given the means of all ``sums``."""
        return super().combined(parts) + self.certainty * parts["certainty"]
