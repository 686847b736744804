"""TABOM: fine-tuning on a model's own decodes so that its certainty follows their order.

Trajectory-Aligned Optimization via Boltzmann Modeling (arXiv:2605.11854): cross-entropy in a window
of a recorded decode, plus a ranking of predictive entropies by the order of that decode.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.finetuning.ranking import Ties, entropy_ranking
from lit_dlm.finetuning.sft import FinetuneModule
from lit_dlm.system.options import at_least
from lit_dlm.tensors.cuts import CutRange
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.tensors.sampling import entropy_variance
from lit_dlm.training.layout import SupervisedBatch
from lit_dlm.training.masking import TimeDelay
from lit_dlm.training.states import NoisyStates
from lit_dlm.training.terms import LossTerms

logger = logging.getLogger(__name__)


class TABOMModule(FinetuneModule):
    """Cross-entropy in a window after a random cut, plus ``rank_weight`` times the ranking loss.

    The paper's models have full attention. In a block model, whose blocks are seen in states of
    their own, only positions of the same block are ranked; the decodes should have its blocks.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        window: supervised steps from the cut on, M.
        rank_window: ranked steps among them, W; ``null`` ranks all.
        cut_range: ``full`` or ``reference``, see :class:`~lit_dlm.training.masking.TimeDelay`.
        cut_sampler: ``uniform``, or ``non_ltr`` for steps that decoded out of order.
        rank_weight: lambda; 0 trains on the cross-entropy alone.
        margin: gamma, in nats.
        ties: how positions of the same step are ranked: ``strict`` makes no pair of them,
            ``position`` takes the left one as earlier, ``rank`` the one with the lower entropy at
            decoding (needs recorded entropies).
        num_padding: supervised cells after the answer; ``null`` for all, as in every recipe of
            the release.
        common: options of :class:`~lit_dlm.finetuning.sft.FinetuneModule`; its ``loss_norm``
            applies to both losses.
    """

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        window: int = 32,
        rank_window: int | None = 32,
        cut_range: CutRange = "full",
        cut_sampler: Literal["uniform", "non_ltr"] = "uniform",
        rank_weight: float = 1.0,
        margin: float = 0.1,
        ties: Ties = "strict",
        num_padding: int | None = None,
        **common: Any,
    ) -> None:
        masking = TimeDelay(window=window, cut_range=cut_range, cut_sampler=cut_sampler)
        super().__init__(backbone, masking=masking, num_padding=num_padding, **common)
        at_least(1, rank_window=rank_window)
        at_least(0, rank_weight=rank_weight)
        if rank_window is not None and rank_window > window:
            logger.warning(
                "rank_window: %d has no effect beyond the supervised window of %d",
                rank_window,
                window,
            )
        self.rank_window = rank_window
        self.rank_weight = rank_weight
        self.margin = margin
        self.ties = ties

    def loss_terms(
        self, batch: SupervisedBatch, states: NoisyStates, stats: TokenStats
    ) -> LossTerms:
        # Both losses are over the ids that the model may produce: with a mask in the softmax,
        # entropies would differ from those at decoding, whose order they are compared with.
        ce = super().loss_terms(batch, states, stats)
        assert states.cut is not None
        # All entropies are from one forward at the cut, as in the release; the paper takes each
        # from the state just before its position was written.
        entropy = stats.entropy.new_zeros(states.supervised.shape)
        entropy = entropy.masked_scatter(states.supervised, stats.entropy)
        ranking = entropy_ranking(
            entropy,
            batch.steps,
            states.supervised,
            states.cut,
            window=self.rank_window,
            margin=self.margin,
            ties=self.ties,
            decode_entropy=batch.decode_entropy,
            blocks=states.blocks,
        )
        # A mean over rows with pairs, of this batch or of all processes' batches.
        summed, ranked_rows = ranking.row_terms.sum(), (ranking.num_pairs > 0).sum()
        loss_rank = summed / self.divisor(ranked_rows)
        num_pairs = ranking.num_pairs.sum()
        variance, counts = entropy_variance(entropy.detach(), states.supervised)
        sums = {
            **ce.sums,
            "loss_rank": (summed.detach(), ranked_rows),
            "num_pairs": (num_pairs, torch.zeros_like(num_pairs)),
            "pair_accuracy": (ranking.num_ordered, num_pairs),
            # Over the supervised window; the callback's `val/tds` is over all masked positions.
            "tds_window": (variance.sum(), counts.sum()),
        }
        total = self.combined({"loss_ce": ce.total, "loss_rank": loss_rank})
        return LossTerms(total, sums=sums)

    def combined(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["loss_ce"] + self.rank_weight * parts["loss_rank"]
