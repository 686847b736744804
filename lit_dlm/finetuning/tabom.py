"""TABOM: fine-tuning on a model's own decodes so that its certainty follows their order.

Trajectory-Aligned Optimization via Boltzmann Modeling (arXiv:2605.11854): cross-entropy in a window
of a recorded decode, plus a ranking of predictive entropies by the order of that decode. In this
file are its module, its states (:class:`TimeDelay`), and below them the ranking and the cuts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.system.options import at_least
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.tensors.order import non_ltr_positions
from lit_dlm.tensors.sampling import entropy_variance, uniform_noise
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.states import Masking, States
from lit_dlm.training.terms import LossTerms

logger = logging.getLogger(__name__)

CutRange = Literal["full", "reference"]
Ties = Literal["strict", "position", "rank"]

_CUT = 18  # stream of noise, see ``training/masking.py``


class TABOMModule(SFTModule):
    """Cross-entropy in a window after a random cut, plus ``rank_weight`` times the ranking loss.

    The paper's models have full attention. In a block model, whose blocks are seen in states of
    their own, only positions of the same block are ranked; the decodes should have its blocks.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        window: supervised steps from the cut on, M.
        rank_window: ranked steps among them, W; ``null`` ranks all.
        cut_range: ``full`` or ``reference``, see :class:`TimeDelay`.
        cut_sampler: ``uniform``, or ``non_ltr`` for steps that decoded out of order.
        rank_weight: lambda; 0 trains on the cross-entropy alone.
        margin: gamma, in nats.
        ties: how positions of the same step are ranked: ``strict`` makes no pair of them,
            ``position`` takes the left one as earlier, ``rank`` the one with the lower entropy at
            decoding (needs recorded entropies).
        num_padding: supervised cells after the answer; ``null`` for all, as in every recipe of
            the release.
        optimizer: constructor of the optimiser, given the trainable parameters.
        common: options of :class:`~lit_dlm.finetuning.sft.SFTModule`; its ``loss_norm``
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
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=2e-5, weight_decay=0.01
        ),
        **common: Any,
    ) -> None:
        masking = TimeDelay(window=window, cut_range=cut_range, cut_sampler=cut_sampler)
        super().__init__(
            backbone, masking=masking, num_padding=num_padding, optimizer=optimizer, **common
        )
        at_least(1, rank_window=rank_window)
        at_least(0, rank_weight=rank_weight)
        if rank_window is not None and rank_window > window:
            message = "rank_window: %d has no effect beyond the supervised window of %d"
            logger.warning(message, rank_window, window)
        self.rank_window = rank_window
        self.rank_weight = rank_weight
        self.margin = margin
        self.ties = ties

    def loss_terms(self, batch: SupervisedBatch, states: States, stats: TokenStats) -> LossTerms:
        # Step 3 of SFT's training_step, in three parts; steps 1, 2 and 4 are its own.
        # 3a. Cross-entropy in the window after the cut. Both losses are over the ids that the model
        # may produce: with a mask in the softmax, entropies would differ from those at decoding,
        # whose order they are compared with.
        ce = super().loss_terms(batch, states, stats)
        assert states.cut is not None
        # 3b. Pairs of positions. All entropies are from one forward at the cut, as in the release;
        # the paper takes each from the state just before its position was written.
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
            blocks=batch.blocks,  # each is seen in a state of its own
        )
        # 3c. A mean over rows with pairs, of this batch or of all processes' batches: long decodes,
        # which have many more pairs, weigh no more than short ones.
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

    def needs(self) -> dict[str, str]:
        if self.ties != "rank":
            return super().needs()
        message = "ties 'rank' needs trajectories of level 'signals'"
        return {**super().needs(), "decode_entropy": message}

    def combined(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["loss_ce"] + self.rank_weight * parts["loss_rank"]


@dataclass(eq=False, kw_only=True)
class TimeDelay(Masking):
    """TABOM's states (arXiv:2605.11854): a recorded decode cut at a random step.

    With a block model, blocks that the decode had not begun are in the state in which it began
    them: all hidden, behind earlier blocks that are complete.

    Args:
        window: supervised steps from the cut on, as in the release; the paper counts tokens.
        cut_range: ``full`` draws any step, and late windows are shorter; ``reference`` keeps whole
            windows before the last step, which is then never learnt, and leaves samples of
            ``window`` steps or fewer without a target.
        cut_sampler: ``uniform``, or ``non_ltr`` to draw among the steps that decoded out of order.
    """

    window: int = 32
    cut_range: CutRange = "full"
    cut_sampler: Literal["uniform", "non_ltr"] = "uniform"

    def __post_init__(self) -> None:
        at_least(1, window=self.window)

    def last_cuts(self, batch: SupervisedBatch) -> Tensor:
        """``(B,)`` int64: the largest cut of each response, -1 where nothing is to be learnt."""
        return last_cuts(batch.steps, batch.maskable, window=self.window, cut_range=self.cut_range)

    def needs(self) -> dict[str, str]:
        return {"steps": "TimeDelay needs trajectories"}

    def check(self, batches: Iterable[SupervisedBatch]) -> None:
        """Warns if cuts leave nothing to learn of some responses; refuses if of all."""
        lasts = [self.last_cuts(batch) for batch in batches]
        count, without = sum(map(len, lasts)), sum(int((last < 0).sum()) for last in lasts)
        message = (
            f"cut_range: {self.cut_range!r} with a window of {self.window} leaves "
            f"{without} of {count} samples without a cut"
        )
        if without and without == count:
            raise ValueError(
                f"{message}; expected longer decodes, a smaller window or cut_range 'full'"
            )
        if without:
            logger.warning("%s: nothing is learnt from them", message)

    def states(self, batch: SupervisedBatch) -> States:
        last, steps = self.last_cuts(batch), batch.steps
        noise = uniform_noise(batch.seeds, 0, torch.zeros_like(steps[:, :1]), stream=_CUT)[:, 0]
        if self.cut_sampler == "non_ltr":
            listed = batch.non_ltr
            is_non_ltr = non_ltr_positions(steps) if listed is None else listed
            cut = non_ltr_cuts(last, steps, is_non_ltr, noise)
        else:
            cut = uniform_cuts(last, noise)
        hidden, supervised = time_delay_mask(steps, batch.maskable, cut, window=self.window)
        return States(
            response=torch.arange(len(steps), device=steps.device),
            hidden=hidden,
            supervised=supervised,
            cut=cut,
        )


class RankingTerms(NamedTuple):
    """The ranking loss row by row; its mean is over rows with pairs."""

    row_terms: Tensor  # (B,) mean hinge over the pairs of each row, differentiable; 0 without any
    num_pairs: Tensor  # (B,) int64 pairs of each row
    num_ordered: Tensor  # Scalar: pairs of the batch whose earlier member has the lower entropy


def entropy_ranking(
    entropy: Tensor,
    steps: Tensor,
    supervised: Tensor,
    cut: Tensor,
    *,
    window: int | None,
    margin: float = 0.0,
    ties: Ties = "strict",
    decode_entropy: Tensor | None = None,
    blocks: Tensor | None = None,
) -> RankingTerms:
    """``mean over pairs of max(0, h_earlier - h_later + margin)`` of each row.

    The members of a pair are supervised and were written at steps in ``[cut, cut + window)``, one
    of them earlier than the other. Gradients flow into both entropies.

    Args:
        entropy: ``(B, L)`` floating point, predictive entropies in nats. Entries outside the pairs
            may hold anything, NaN included, and get no gradient.
        steps: ``(B, L)`` integer, the step that wrote each position, or -1.
        supervised: ``(B, L)`` bool.
        cut: ``(B,)`` int64, the step at which the decode was cut; -1 in a row without one.
        window: ranked steps from the cut on; ``None`` ranks everything supervised from the cut on.
        margin: by how much a later entropy should be larger, in nats.
        ties: what becomes of two positions of the same step. ``strict``: no pair. ``position``: the
            left one counts as earlier. ``rank``: the one with the lower ``decode_entropy`` does, or
            the left one if these are equal (the paper's order).
        decode_entropy: ``(B, L)`` floating point, entropies recorded at decoding; for ``rank``.
        blocks: ``(B, L)`` int64 blocks; if given, the members of a pair are of one block.
    """
    at = cut[:, None]
    usable = supervised & (steps >= 0) & (at >= 0) & (steps >= at)
    if window is not None:
        usable = usable & (steps < at + window)

    # Usable positions first, in the order of decoding: then a pair is any (i, j) with i < j. The
    # table of pairs, quadratic in its width, is as wide as the largest window.
    order = _decoding_order(steps, usable, decode_entropy if ties == "rank" else None)
    width = int(usable.sum(1).max()) if len(usable) else 0
    order = order[:, :width]  # (B, n)
    usable, steps = usable.gather(1, order), steps.gather(1, order)
    # Chosen with ``where``, not multiplied with 0: NaN outside the pairs would stay NaN.
    h = torch.where(usable, entropy.gather(1, order), 0.0)
    pair = usable[:, :, None] & usable[:, None, :]
    pair &= torch.ones(width, width, dtype=torch.bool, device=h.device).triu_(1)
    if ties == "strict":
        pair &= steps[:, :, None] < steps[:, None, :]
    if blocks is not None:
        blocks = blocks.gather(1, order)
        pair &= blocks[:, :, None] == blocks[:, None, :]
    gap = h[:, :, None] - h[:, None, :]  # (B, n, n), earlier less later
    num_pairs = pair.sum((1, 2))
    hinge = (gap + margin).relu() * pair
    row_terms = hinge.sum((1, 2)) / num_pairs.clamp_min(1)
    return RankingTerms(row_terms, num_pairs, ((gap.detach() < 0.0) & pair).sum())


def _decoding_order(steps: Tensor, usable: Tensor, decode_entropy: Tensor | None) -> Tensor:
    """``(B, L)`` positions by step, then recorded entropy, then column; unusable ones last."""
    key = torch.where(usable, steps.long(), torch.iinfo(torch.long).max)
    if decode_entropy is None:
        return key.argsort(dim=1, stable=True)
    by_entropy = decode_entropy.argsort(dim=1, stable=True)
    return by_entropy.gather(1, key.gather(1, by_entropy).argsort(dim=1, stable=True))


def time_delay_mask(
    steps: Tensor, maskable: Tensor, cut: Tensor, *, window: int
) -> tuple[Tensor, Tensor]:
    """Returns what a cut hides and what is learnt there, ``(B, L)`` bool each.

    What was written before the cut is shown, everything else is hidden. What was written in the
    next ``window`` steps (the cut's own included) is supervised; what came later, or never, is
    hidden but not learnt.

    Args:
        steps: ``(B, L)`` integer, the step that wrote each response position; -1 where none did.
        maskable: ``(B, L)`` bool, positions that may be supervised.
        cut: ``(B,)`` int64 steps; -1 for a row without a cut: all of it is hidden.
    """
    at = cut[:, None]
    hidden = (steps < 0) | (steps >= at)
    # A position that no step wrote is hidden for good: its step of -1 must not count as early.
    later = maskable & (steps >= 0) & (steps >= at) & (at >= 0)
    return hidden, later & (steps < at + window)


def last_cuts(
    steps: Tensor, maskable: Tensor, *, window: int, cut_range: CutRange = "full"
) -> Tensor:
    """``(...)`` int64: the largest cut that may be drawn for each row; -1 for a row without any.

    ``full`` lets the cut reach the last step, where windows end early, so that every step is
    supervised and no row is lost. ``reference`` is the release's range: at most the last step minus
    the window, so the last step is never supervised and a row of ``window`` steps or fewer has no
    cut.
    """
    last_step = torch.where(maskable, steps.long(), -1).amax(dim=-1)
    if cut_range == "full":
        return last_step
    return (last_step - window).clamp_min(-1)


def uniform_cuts(last: Tensor, noise: Tensor) -> Tensor:
    """``(B,)`` int64: cuts uniform in ``0..last``, from ``(B,)`` noise; -1 where ``last`` is."""
    # Rounding must not exceed ``last``: the largest noise below 1, times a long decode, may be it.
    drawn = (noise * (last + 1)).long().minimum(last)
    return torch.where(last >= 0, drawn, -1)


def non_ltr_cuts(last: Tensor, steps: Tensor, is_non_ltr: Tensor, noise: Tensor) -> Tensor:
    """Draws a cut among the steps at which something was decoded out of order.

    This is the recipe for code in TABOM's release for Dream. Each distinct step is equally likely;
    a row without such a step gets a uniform cut. ``noise`` is ``(B,)`` float64, uniform in (0, 1).
    """
    wanted = is_non_ltr & (steps >= 0) & (steps <= last[:, None])
    ordered = torch.where(wanted, steps.long(), -1).sort(dim=1).values
    is_first = torch.ones_like(wanted)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_first &= ordered >= 0
    count = is_first.sum(1)
    chosen = (noise * count).long().minimum(count - 1)  # number among the distinct steps
    is_chosen = is_first & (is_first.cumsum(1) - 1 == chosen[:, None])
    drawn = torch.where(is_chosen, ordered, -1).amax(1)
    return torch.where(count > 0, drawn, uniform_cuts(last, noise))
