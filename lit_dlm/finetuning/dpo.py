"""Preferences: DPO with evidence lower bounds in place of log-likelihoods (VRPO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn import functional as F

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.system.options import within
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.bounds import BoundViews
from lit_dlm.training.states import States
from lit_dlm.training.terms import LossTerms


class DPOModule(SFTModule):
    """``-log sigmoid`` of the margin between a chosen and a rejected response.

    VRPO (LLaDA 1.5, arXiv:2505.19223, DPO-E and section 3): lower bounds replace log-likelihoods.
    Their budget is spent on noise levels with one mask each (``BoundViews``). The policy and the
    reference, which is the backbone without its adapter, see the same masks.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, without dropout.
        beta: factor on the log-ratios to the reference (DPO, arXiv:2305.18290, eq. 7).
        num_states: noise levels per response.
        optimizer: constructor of the optimiser, given the trainable parameters.
        common: options of :class:`~lit_dlm.finetuning.sft.SFTModule`; ``num_padding`` positions
            of fill count as tokens of their response.
    """

    trains_on_pairs = True

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        beta: float = 0.1,
        num_states: int = 8,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=2e-5, weight_decay=0.01
        ),
        **common: Any,
    ) -> None:
        masking = BoundViews(num_states=num_states)
        super().__init__(backbone, masking=masking, optimizer=optimizer, **common)
        within("(0, inf)", beta=beta)
        adapter, vision = backbone.adapter, backbone.vision
        if adapter is None or (vision is not None and vision.settings.train != "none"):
            raise ValueError(
                "DPOModule.backbone: the reference is the backbone without its adapter; expected "
                "lora settings or an adapter, and vision.train: none"
            )
        within("[0, 0]", of="backbone.lora.", dropout=adapter.dropout)  # two forwards are compared
        self.beta = beta

    def loss_terms(self, batch: SupervisedBatch, states: States, stats: TokenStats) -> LossTerms:
        # The same states: the noise of two estimates cancels only if both see the same masks.
        with torch.no_grad(), self.backbone.using_adapter(None):
            reference = self.score(batch, states)
        assert states.coefficient is not None
        row, _ = states.supervised.nonzero(as_tuple=True)
        difference = reference.ce - stats.ce  # of log-probabilities, policy less reference
        weighted = states.coefficient[states.supervised].to(difference.dtype) * difference
        means = weighted.new_zeros(len(batch.uids)).index_add(0, states.response[row], weighted)
        # A bound is a mean over the tokens of a response; times their number it is their sum.
        length = batch.maskable.sum(1)
        # Log-ratios in nats, of a chosen and a rejected response in turn.
        chosen, rejected = (length * means).unflatten(0, (-1, 2)).unbind(1)
        margins = self.beta * (chosen - rejected)
        real = length[::2] > 0  # copies that fill a batch have no tokens
        summed, pairs = -F.logsigmoid(margins)[real].sum(), real.sum()
        sums = {
            "loss_dpo": (summed.detach(), pairs),
            "margin": (margins.detach()[real].sum(), pairs),
            "accuracy": ((margins > 0)[real].sum(), pairs),
        }
        return LossTerms(summed / self.divisor(pairs), sums=sums)

    def combined(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["loss_dpo"]
