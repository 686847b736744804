"""Editing: fine-tuning a model to fill masks and to correct tokens that stand (LLaDA2.1).

The report (arXiv:2602.08676, section 3.1) names three parts and gives the details of none:

* Masks are filled (mask-to-token), as in all fine-tuning.
* Tokens that random noise replaced are recovered (token-to-token). Here both share a state, as in a
  decode that edits: some positions are hidden, and some that are shown hold a wrong token, which is
  uniform over what the model may produce. *All* of the answer is predicted. A loss on wrong tokens
  alone would teach that whatever stands is wrong.
* Several forwards in turn show the model what it wrote itself (multi-turn forward). Here it is one
  forward without gradients, whose most probable tokens are written into a part of the positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.system.options import refuse, within
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.tensors.sampling import uniform_noise
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.layout import lay_out
from lit_dlm.training.states import States
from lit_dlm.training.terms import LossTerms

_RATE, _WRONG, _TOKEN, _SHARE, _OWN = 26, 27, 28, 29, 30  # streams of noise


class EditModule(SFTModule):
    """Cross-entropy of hidden tokens and of all that are shown, of which some are wrong.

    Set ``backbone.spec_overrides: {edits_tokens: true}``, so that ``TokenEditingPolicy`` takes the
    model; an exported model says it itself, for an adapter it has to be said again.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        most_wrong: largest share of noise in what is shown; each state draws its own, from 0 on.
        drafted: share of the states into which the model writes first: its most probable tokens
            take a share of the positions, uniform from 0 to 1, hidden or shown.
    """

    allowed_ids: Tensor  # (V,) int64: what noise is drawn from

    def __init__(
        self, backbone: HFBackbone, *, most_wrong: float = 0.2, drafted: float = 0.5, **common: Any
    ) -> None:
        super().__init__(backbone, **common)
        within("[0, 1]", most_wrong=most_wrong, drafted=drafted)
        if (weight := getattr(self.masking, "weight", "none")) != "none":
            # It depends on how much is hidden, and would say nothing of tokens that are shown.
            refuse("masking.weight", "'none', which counts all targets alike", repr(weight))
        self.most_wrong = most_wrong
        self.drafted = drafted
        ids = torch.arange(backbone.spec.text_vocab_size or backbone.vocab_size)
        allowed = ids[~torch.isin(ids, torch.tensor(backbone.spec.forbidden_ids))]
        self.register_buffer("allowed_ids", allowed, persistent=False)

    def states(self, batch: SupervisedBatch) -> States:
        """Step 1: the states of the masking, with wrong tokens in what they show."""
        states = super().states(batch)
        maskable, seeds = batch.maskable[states.response], batch.seeds[states.response]
        clean = batch.ids[states.response, batch.start :]
        cells = torch.arange(maskable.shape[1], device=maskable.device).expand_as(maskable)
        # A response's states differ by their number, which is the same in every batch.
        number = torch.arange(len(maskable), device=maskable.device)
        number = number - torch.searchsorted(states.response, states.response)

        def noise(stream: int, positions: Tensor) -> Tensor:
            return uniform_noise(seeds, number, positions, stream=stream)

        # Token to token: noise.
        rate = self.most_wrong * noise(_RATE, cells[:, :1])
        is_noise = ~states.hidden & maskable & (noise(_WRONG, cells) < rate)
        drawn = self.allowed_ids[(noise(_TOKEN, cells) * len(self.allowed_ids)).long()]
        seen = -1 if states.shown is None else states.shown
        shown = torch.where(is_noise & (drawn != clean), drawn, seen)
        supervised = states.supervised | (~states.hidden & maskable)
        states = replace(states, supervised=supervised, shown=shown)
        if not self.drafted:
            return states
        # One more turn: what the model makes of these states stands in a part of them.
        rows = lay_out(batch, states, self.backbone.spec)
        own = clean.masked_scatter(supervised, self.backbone.top_tokens(rows))
        share = 1.0 - noise(_SHARE, cells[:, :1]) / self.drafted  # below 0: nothing is written
        written = supervised & (noise(_OWN, cells) < share)
        shown = torch.where(written, torch.where(own != clean, own, -1), shown)
        return replace(states, hidden=states.hidden & ~written, shown=shown)

    def loss_terms(self, batch: SupervisedBatch, states: States, stats: TokenStats) -> LossTerms:
        """Adds what is right of each kind: filled masks, corrected tokens, kept right ones."""
        terms = super().loss_terms(batch, states, stats)
        assert states.shown is not None
        wrong = states.shown >= 0
        kinds = {"filled": states.hidden, "corrected": wrong, "kept": ~(states.hidden | wrong)}
        for name, kind in kinds.items():
            of_kind = kind[states.supervised]
            terms.sums[name] = ((stats.is_top & of_kind).sum(), of_kind.sum())
        return terms
