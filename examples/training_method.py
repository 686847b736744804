"""A training method of your own: which states of a response a model is trained on.

In the folder of this file, add these lines to an experiment with ``SFTModule``::

    model:
      init_args:
        masking: {class_path: training_method.SuffixMasking, init_args: {least: 1}}
"""

from __future__ import annotations

import torch

from lit_dlm.tensors.sampling import uniform_noise
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.states import States


class SuffixMasking:
    """Hides everything from a random cell on: the states of a left-to-right decode.

    Args:
        least: fewest cells to hide.
    """

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def states(self, batch: SupervisedBatch) -> States:
        """Returns one state per response, drawn from its own seed."""
        maskable = batch.maskable
        noise = uniform_noise(batch.seeds, 0, torch.zeros_like(batch.seeds)[:, None])[:, 0]
        num_kept = (noise * (maskable.sum(1) - self.least + 1).clamp_min(1)).long()
        hidden = maskable & (maskable.cumsum(1) > num_kept[:, None])
        return States(
            response=torch.arange(len(maskable), device=maskable.device),
            hidden=hidden | ~maskable,  # else the model sees where the answer ends
            supervised=hidden,
        )
