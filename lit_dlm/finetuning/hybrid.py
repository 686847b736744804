"""Hybrid fine-tuning (Nemotron-Labs-Diffusion): masked tokens, and next tokens of a clean copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.system.options import refuse
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.layout import lay_out
from lit_dlm.training.states import States
from lit_dlm.training.terms import LossTerms


class HybridModule(SFTModule):
    """``alpha`` times the loss of masked tokens, plus the mean cross-entropy of next tokens.

    With ``RandomMasking(weight="none/t")`` this is the loss of NeMo AutoModel's hybrid recipe.

    Args:
        backbone: to be trained, with a ``causal_context``.
        alpha: weight of masked tokens.
    """

    def __init__(self, backbone: HFBackbone, *, alpha: float = 0.3, **common: Any) -> None:
        super().__init__(backbone, **common)
        self.alpha, spec = alpha, backbone.spec
        if spec.shift or not spec.causal_context:  # a clean token would see the one it predicts
            refuse("HybridModule.backbone", "causal_context and shift 0", spec.family)

    def score(self, batch: SupervisedBatch, states: States) -> TokenStats:
        """Returns the scores of all targets, state by state, then those of next tokens."""
        if states.sample is not None:
            refuse("HybridModule.masking", "one state in a row", "several (copies or pairs)")
        rows = lay_out(batch, states, self.backbone.spec)
        length, slots = batch.ids.shape[1], torch.arange(rows.ids.shape[1], device=rows.ids.device)
        # A row begins with the clean copy, each of whose tokens predicts the one behind it.
        is_next = torch.zeros_like(rows.scored)
        is_next[:, batch.start : length] = batch.maskable[states.response]
        is_next[:, batch.start] &= batch.num_prompt[states.response] > 0
        before = slots - (slots < length).long()
        rows = replace(rows, scored=rows.scored | is_next, predictors=before[None])
        order = is_next[rows.scored].byte().argsort(stable=True)
        return TokenStats(*(one[order] for one in self.backbone.score_tokens(rows)))

    def loss_terms(self, batch: SupervisedBatch, states: States, stats: TokenStats) -> LossTerms:
        num_masked = int(states.supervised.sum())
        masked, ce = (one[:num_masked] for one in stats), stats.ce[num_masked:]
        terms = super().loss_terms(batch, states, TokenStats(*masked))
        count = torch.tensor(len(ce), device=ce.device)
        terms.sums["loss_next"] = (ce.sum().detach(), count)
        return replace(terms, total=self.alpha * terms.total + ce.sum() / self.divisor(count))

    def combined(self, parts: Mapping[str, Tensor]) -> Tensor:
        return self.alpha * parts["loss_ce"] + parts["loss_next"]
