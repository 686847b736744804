"""On-policy conversion: a diffusion model learns an autoregressive teacher's probabilities.

This is the idea of arXiv 2606.06712: states come from the student's own decodes, right or wrong,
and the target of each cell is the autoregressive model's next-token distribution, given everything
to the left of that cell in the finished decode.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.finetuning.tabom import TimeDelay
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.layout import lay_out
from lit_dlm.training.states import States


class OnPolicyModule(SFTModule):
    """Cross-entropy with an autoregressive model's probabilities, on states of recorded decodes.

    A decode is cut at a random step; everything that was written later is hidden and predicted.

    Args:
        backbone: the student, with a ``lora`` or trainable ``adapter``.
        teacher: a frozen model with the same vocabulary, whose attention is causal or has blocks
            of one cell.
        common: options of :class:`~lit_dlm.finetuning.sft.SFTModule`.
    """

    def __init__(self, backbone: HFBackbone, *, teacher: HFBackbone, **common: Any) -> None:
        super().__init__(backbone, masking=TimeDelay(window=2**30), **common)
        self.teacher = teacher.requires_grad_(False)

    def score(self, batch: SupervisedBatch, states: States) -> TokenStats:
        rows = lay_out(batch, states, self.backbone.spec)
        stats, hidden = self.backbone.score_with_hidden(rows)
        read = lay_out(batch, replace(states, causal=True), self.teacher.spec)
        with torch.no_grad():
            known = self.teacher.encode_rows(read)
            wanted = self.teacher.head(known).float().softmax(-1)
        log_prob = self.backbone.head(hidden).float().log_softmax(-1)
        # Forbidden ids have probability 0 in both, and 0 times minus infinity would be NaN.
        ce = -(wanted * log_prob.masked_fill(log_prob.isinf(), 0.0)).sum(-1)
        return stats._replace(ce=ce)
