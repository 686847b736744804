"""Maskings: which training states a response has, what they hide and what they predict.

A masking knows neither model nor layout. Everything random is a hash of the sample's seed, so it
depends neither on the batch nor on what was drawn before. States of policy objectives (complements,
views, masked prompts) come from maskings as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from lit_dlm.system.options import at_least, refuse
from lit_dlm.tensors.sampling import uniform_noise
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.states import (
    NEVER,
    LossWeight,
    Masking,
    States,
    group_rows,
    step_groups,
    weighted_states,
)

_LEVEL, _CELL, _ROWS, _PAIR = 16, 17, 19, 20
"""Streams of noise, apart from those of decoding; 18 is TABOM's and 21 that of hidden prompts."""


@dataclass(eq=False, kw_only=True)
class RandomMasking(Masking):
    """Hides each cell with a probability, its noise level, which is drawn first.

    Cells that may not be a target (padding) are also hidden, as they are when decoding begins.

    Args:
        min_t: smallest noise level.
        max_t: largest noise level.
        level: which cells share a noise level: those of a ``row`` (LLaDA), those of a ``block`` of
            a block model, or none (``token``, as in dLLM-RL for block models: in effect masking at
            a rate of one half).
        copies: states per sample (35 in dLLM-RL for Dream).
        weight: how targets are weighted.
    """

    takes_rewrites: ClassVar[bool] = True

    min_t: float = 0.0
    max_t: float = 1.0
    level: Literal["row", "block", "token"] = "row"
    copies: int = 1
    weight: LossWeight = "none"

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_t <= self.max_t <= 1.0 or self.max_t == 0.0:
            wanted = "0 <= min_t <= max_t <= 1 and max_t above 0 (nothing is ever a target there)"
            refuse("min_t, max_t", wanted, f"{self.min_t}, {self.max_t}")
        at_least(1, copies=self.copies)

    def states(self, batch: SupervisedBatch) -> States:
        B, G = batch.maskable.shape
        device = batch.maskable.device
        response = torch.arange(B, device=device).repeat_interleave(self.copies)
        place = cells = torch.arange(G, device=device).expand(len(response), -1)
        if self.level == "block":
            if batch.blocks is None:
                raise ValueError("RandomMasking.level: 'block' needs a model with block attention")
            place = batch.blocks[response]
        elif self.level == "row":
            place = torch.zeros_like(cells)
        # Copies differ by their key and not by a generator that was drawn from before, so a sample
        # has the same states in every batch.
        copy = torch.arange(B * self.copies, device=device)[:, None] % self.copies
        seeds = batch.seeds[response]
        # The key of a cell and copy is independent of G, which differs between batches.
        noise = uniform_noise(seeds, 0, place * self.copies + copy, stream=_LEVEL)
        t = self.min_t + (self.max_t - self.min_t) * noise
        chosen = uniform_noise(seeds, 0, cells * self.copies + copy, stream=_CELL) < t
        maskable = batch.maskable[response]
        return weighted_states(
            self.weight,
            response,
            hidden=chosen | ~maskable,
            supervised=chosen & maskable,
            maskable=maskable,
            t=t,
            sample=response if self.copies > 1 else None,
        )


@dataclass(eq=False, kw_only=True)
class SemiAutoregressive(Masking):
    """States of decoding block by block (dLLM-RL's semi-autoregressive SFT, arXiv:2509.06949).

    With full attention every block needs a state of its own: earlier blocks are shown, later ones
    hidden. Blocks are cells, also of recorded decodes, where the release has steps.

    Args:
        block_size: cells of a block, for models with full attention (a block model has its own).
        rows_per_sample: states per sample and pass with full attention, drawn among its blocks;
            ``None`` takes them all.
        weight: how targets are weighted.
    """

    block_size: int | None = None
    rows_per_sample: int | None = None
    weight: LossWeight = "1/num_targets"

    def __post_init__(self) -> None:
        at_least(1, block_size=self.block_size, rows_per_sample=self.rows_per_sample)
        self.noise = RandomMasking(min_t=0.1, max_t=0.9, level="token", weight=self.weight)

    def states(self, batch: SupervisedBatch) -> States:
        noisy = self.noise.states(batch)
        if batch.blocks is not None:
            return noisy  # noisy blocks see clean earlier ones, so one state teaches all
        if self.block_size is None:
            refuse("SemiAutoregressive.block_size", "a number with full attention", "null")
        maskable = batch.maskable
        # Blocks of answer positions: given tokens and fill between them take no place in a block.
        groups = torch.where(maskable, (maskable.cumsum(1) - 1) // self.block_size, NEVER)
        response, group, _ = group_rows(groups, self.rows_per_sample, batch.seeds, stream=_ROWS)
        groups = groups[response]
        supervised = noisy.supervised[response] & (groups == group[:, None])
        return weighted_states(
            self.weight,
            response,
            hidden=supervised | (groups > group[:, None]),
            supervised=supervised,
            maskable=maskable[response],
        )


@dataclass(eq=False, kw_only=True)
class TraceMasking(Masking):
    """The states of a recorded decode: each predicts what its step wrote (arXiv:2509.06949).

    With a block model, state ``r`` shows what the first ``r`` groups of steps of each block wrote
    and supervises the next one. With full attention the groups are those of the whole response.
    Cells that no step wrote stay hidden.

    Args:
        shrink: consecutive distinct steps that form a group.
        rows_per_sample: states per sample and pass, drawn among all; ``None`` takes them all.
        weight: how targets are weighted.
        padding: cells after the answer, which are no targets: ``hidden`` in every state, as in
            dLLM-RL's scripts for block models, or ``replayed``: shown once they were written, so
            that a state is exactly what its step saw. States without a target are left out.
    """

    shrink: int = 1
    rows_per_sample: int | None = None
    weight: LossWeight = "1/num_targets"
    padding: Literal["hidden", "replayed"] = "hidden"

    def __post_init__(self) -> None:
        at_least(1, shrink=self.shrink, rows_per_sample=self.rows_per_sample)

    def states(self, batch: SupervisedBatch) -> States:
        maskable = batch.maskable
        groups = step_groups(
            batch.steps,
            maskable if self.padding == "hidden" else torch.ones_like(maskable),
            shrink=self.shrink,
            segments=batch.blocks,
        )
        response, group, share = group_rows(
            groups, self.rows_per_sample, batch.seeds, stream=_ROWS, targets=maskable
        )
        # ``NEVER`` is above every group, so what no step wrote is hidden in all states.
        groups, maskable = groups[response], maskable[response]
        return weighted_states(
            self.weight,
            response,
            hidden=groups >= group[:, None],
            supervised=(groups == group[:, None]) & maskable,
            maskable=maskable,
            share=share,
        )


@dataclass(eq=False, kw_only=True)
class Autoregressive(Masking):
    """Next-token prediction: nothing is hidden and attention is causal.

    For models whose raw row ``i - 1`` predicts token ``i`` (Dream's shift). The first token of a
    response without a prompt is no target, since nothing comes before it.

    Args:
        weight: how targets are weighted.
    """

    hides_targets: ClassVar[bool] = False

    weight: LossWeight = "1/num_targets"

    def states(self, batch: SupervisedBatch) -> States:
        maskable = batch.maskable
        # The first position is predicted from the prompt's last token, if there is a prompt.
        supervised = maskable.clone()
        supervised[:, 0] &= batch.num_prompt > 0
        return weighted_states(
            self.weight,
            torch.arange(len(maskable), device=maskable.device),
            hidden=torch.zeros_like(maskable),
            supervised=supervised,
            maskable=maskable,
            causal=True,
        )


@dataclass(eq=False, kw_only=True)
class CoupledMasking(Masking):
    """Random states and their complements: every target is predicted exactly once per pair.

    This is the coupled objective that TraceRL is compared with (arXiv:2509.06949), and the
    complementary masks of Fast-dLLM v2's fine-tuning (arXiv:2509.26328: per block from 0.001 to 1,
    every target alike). With a block model the complement is taken in every block at once, since a
    state holds all blocks.

    Args:
        level: which cells share a noise level: ``row``, ``block`` or ``token``.
        pairs: pairs per sample.
        min_t: smallest noise level.
        max_t: largest noise level.
        weight: how targets are weighted.
    """

    level: Literal["row", "block", "token"] = "row"
    pairs: int = 1
    min_t: float = 0.1
    max_t: float = 0.9
    weight: LossWeight = "1/num_targets"

    def __post_init__(self) -> None:
        self.noise = RandomMasking(
            min_t=self.min_t, max_t=self.max_t, level=self.level, copies=self.pairs
        )

    def states(self, batch: SupervisedBatch) -> States:
        first = self.noise.states(batch)
        other = batch.maskable[first.response] & ~first.supervised
        supervised = torch.stack([first.supervised, other], 1).flatten(0, 1)
        response = first.response.repeat_interleave(2)
        maskable = batch.maskable[response]
        return weighted_states(
            self.weight,
            response,
            hidden=supervised | ~maskable,
            supervised=supervised,
            maskable=maskable,
            sample=response,
        )


class CoupledViews(Masking):
    """Coupled-GRPO's estimate of token log-probabilities (DiffuCoder, arXiv:2506.20639).

    Three views of a response: all of it hidden, a random part hidden at noise level ``t``, and the
    complement of that part. A token's log-probability is the mean of the one in the first view and
    the one in the view that hides it, the latter weighted by ``1 / t`` or ``1 / (1 - t)``.
    """

    scores_tokens: ClassVar[bool] = False

    min_t, max_t = 0.2, 0.8  # as in the release

    def states(self, batch: SupervisedBatch) -> States:
        maskable = batch.maskable
        B, G = maskable.shape
        device = maskable.device
        cells = torch.arange(G, device=device).expand(B, -1)
        level = uniform_noise(batch.seeds, 0, cells[:, :1], stream=_PAIR)  # one for each row
        t = self.min_t + (self.max_t - self.min_t) * level
        part = (uniform_noise(batch.seeds, 0, cells, stream=_CELL) < t) & maskable
        supervised = torch.stack([maskable, part, maskable & ~part], 1)  # (B, 3, G)
        # The inverse of the share that a view hides makes both views of a token count alike on
        # average, whatever the level.
        factor = torch.stack([torch.ones_like(t), 1 / t, 1 / (1 - t)], 1)  # (B, 3, 1)
        coefficient = (supervised * factor / 2).float().flatten(0, 1)
        supervised = supervised.flatten(0, 1)
        response = torch.arange(B, device=device).repeat_interleave(3)
        return States(
            response=response,
            hidden=supervised | ~maskable[response],
            supervised=supervised,
            coefficient=coefficient,
        )


class MaskedPrompt(Masking):
    """diffu-GRPO's one-step estimate (d1, arXiv:2504.12216): the whole response is hidden.

    Prompt tokens are hidden at random as well, anew in every pass over the rollouts, so that one
    set of rollouts can be used for many updates.
    """

    rate = 0.15  # as in the paper

    def states(self, batch: SupervisedBatch) -> States:
        maskable = batch.maskable
        return States(
            response=torch.arange(len(maskable), device=maskable.device),
            hidden=torch.ones_like(maskable),
            supervised=maskable,
            prompt_rate=self.rate,
            prompt_seeds=batch.seeds,
        )
