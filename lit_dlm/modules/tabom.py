"""TABOM: fine-tuning on a model's own decodes so that it is certain in their order.

Trajectory-Aligned Optimization via Boltzmann Modeling (arXiv:2605.11854): cross-entropy in a window
of a recorded decode, plus a ranking of predictive entropies by the order of that decode.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import Decoder
from lit_dlm.losses.corruption import TimeDelay
from lit_dlm.losses.ranking import Ties, entropy_ranking
from lit_dlm.losses.states import NoisyStates
from lit_dlm.losses.terms import LossTerms
from lit_dlm.modules.finetune import FinetuneModule, LossNorm
from lit_dlm.modules.supervised_batch import SupervisedBatch
from lit_dlm.ops.cuts import CutRange
from lit_dlm.ops.discrimination import entropy_variance
from lit_dlm.ops.fused_head import TokenStats
from lit_dlm.ops.masking import first_written

logger = logging.getLogger(__name__)


class TABOMModule(FinetuneModule):
    """Cross-entropy in a window behind a random cut, plus ``rank_weight`` times the ranking loss.

    All entropies come from one forward at the cut, as in the release; the paper takes each from
    the state just before its position was written.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        tokenizer: folder, embedded name or hub id of the tokenizer.
        window: supervised steps (or tokens) from the cut on, M.
        rank_window: ranked ones among them, W; ``null`` ranks all.
        window_unit: what both count: ``steps`` (the release) or ``tokens`` (the paper).
        cut_range: ``full`` or ``reference``, see :class:`~lit_dlm.losses.corruption.TimeDelay`.
        cut_sampler: ``uniform``, or ``non_ltr`` for steps that decoded out of order.
        rank_weight: lambda; 0 trains on the cross-entropy alone.
        margin: gamma, in nats.
        ties: positions of one step: ``strict`` makes no pair of them, ``position`` takes the left
            one as earlier, ``rank`` the one of lower entropy at decoding (needs recorded
            entropies).
        decoders: decoding methods by name.
        seed: base seed of cuts and decoding.
        num_padding: supervised cells behind the answer; ``null`` for all, as in every recipe of
            the release.
        loss_norm: ``local`` (the release) or ``global``, for both losses.
        optimizer: constructor of the optimiser.
        warmup_steps: optimiser steps of the warm-up.
        lr_floor: factor on the learning rate at the end.
        export_dir: where the last weights are written.
        chat_template: what stands around the turns of a prompt; the tokenizer's own by default.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        tokenizer: str,
        window: int = 32,
        rank_window: int | None = 32,
        window_unit: Literal["steps", "tokens"] = "steps",
        cut_range: CutRange = "full",
        cut_sampler: Literal["uniform", "non_ltr"] = "uniform",
        rank_weight: float = 1.0,
        margin: float = 0.1,
        ties: Ties = "strict",
        decoders: dict[str, Decoder] | None = None,
        seed: int = 0,
        num_padding: int | None = None,
        loss_norm: LossNorm = "local",
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=2e-5, weight_decay=0.01
        ),
        warmup_steps: int = 50,
        lr_floor: float = 0.0,
        export_dir: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(
            backbone,
            corruption=TimeDelay(
                window=window, unit=window_unit, cut_range=cut_range, cut_sampler=cut_sampler
            ),
            tokenizer=tokenizer,
            decoders=decoders,
            seed=seed,
            num_padding=num_padding,
            loss_norm=loss_norm,
            optimizer=optimizer,
            warmup_steps=warmup_steps,
            lr_floor=lr_floor,
            export_dir=export_dir,
            chat_template=chat_template,
        )
        if backbone.spec.attention != "full":
            raise ValueError(
                "TABOMModule: expected a model with full attention, whose states a cut describes; "
                f"got {backbone.spec.attention} attention"
            )
        if rank_window is not None and rank_window < 1:
            raise ValueError(f"rank_window: expected at least 1 or null, got {rank_window}")
        if rank_weight < 0.0:
            raise ValueError(f"rank_weight: expected 0 or more, got {rank_weight}")
        if ties not in ("strict", "position", "rank"):
            raise ValueError(f"ties: expected 'strict', 'position' or 'rank', got {ties!r}")
        if rank_window is not None and rank_window > window:
            logger.warning(
                "rank_window: %d has no effect beyond the supervised window of %d",
                rank_window,
                window,
            )
        self.rank_window = rank_window
        self.window_unit = window_unit
        self.rank_weight = rank_weight
        self.margin = margin
        self.ties: Ties = ties

    def loss_terms(
        self, batch: SupervisedBatch, states: NoisyStates, stats: TokenStats
    ) -> LossTerms:
        """Cross-entropy and ranking of scored states.

        Both are over the ids that the model may produce: a mask in the softmax would shift
        entropies by what decoding, whose order they are compared with, never sees.
        """
        ce = super().loss_terms(batch, states, stats)
        assert states.cut is not None
        assert batch.steps is not None
        if self.ties == "rank" and batch.decode_entropy is None:
            raise ValueError(
                "ties: 'rank' needs the entropies of decoding; record trajectories at level "
                f"'signals' (sample {batch.uids[0]!r} has none)"
            )
        entropy = stats.entropy.new_zeros(states.supervised.shape)
        entropy = entropy.masked_scatter(states.supervised, stats.entropy)
        ranked, window = states.supervised, self.rank_window
        if window is not None and self.window_unit == "tokens":
            ranked, window = first_written(batch.steps, ranked, window), None
        ranking = entropy_ranking(
            entropy,
            batch.steps,
            ranked,
            states.cut,
            window=window,
            margin=self.margin,
            ties=self.ties,
            decode_entropy=batch.decode_entropy,
        )
        loss_rank = self._ranking_loss(ranking.row_terms, ranking.num_pairs)
        variance, counts = entropy_variance(entropy.detach(), states.supervised)
        parts = {
            **ce.parts,
            "loss_rank": loss_rank.detach(),
            "num_pairs": ranking.num_pairs.sum().float(),
            **ranking.parts,
            # Over the supervised window; `val/tds` of the callback is over all open positions.
            "tds_window": variance.sum() / counts.sum().clamp_min(1),
        }
        ranked_rows = (ranking.num_pairs > 0).sum()
        sums = {
            **ce.sums,
            "loss_rank": (ranking.row_terms.detach().sum(), ranked_rows),
            **ranking.sums,
            "tds_window": (variance.sum(), counts.sum()),
        }
        total = self.combined({"loss_ce": ce.total, "loss_rank": loss_rank})
        return LossTerms(total, parts, sums)

    def combined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy plus the weighted ranking loss."""
        return parts["loss_ce"] + self.rank_weight * parts["loss_rank"]

    def _ranking_loss(self, row_terms: Tensor, num_pairs: Tensor) -> Tensor:
        """Mean over rows with pairs, of this batch or of all processes' batches."""
        return row_terms.sum() / self.divisor((num_pairs > 0).sum())
