"""dParallel: fine-tuning on a model's own answers so that it is certain of many cells at once.

Certainty-forcing distillation (arXiv:2509.26488): cross-entropy on states of semi-autoregressive
decoding, plus the entropy of those predictions that are already right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.system.options import at_least
from lit_dlm.tensors.fused_head import TokenStats, token_stats
from lit_dlm.tensors.sampling import uniform_noise
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.layout import lay_out
from lit_dlm.training.states import NEVER, Masking, States, group_rows
from lit_dlm.training.terms import LossTerms

_BLOCK, _HALF = 24, 25
"""Streams of noise; ``BoundViews``, which is never used in the same run, uses 24 as well."""

_VIEWS = ("half", "complement")

TEMPERATURE = 0.5  # temperature of the softmax whose entropy is minimised, as in the release


@dataclass(eq=False, kw_only=True)
class BlockComplements(Masking):
    """States with a random half of a random block hidden, and with the block's other half hidden.

    Earlier blocks are shown and later ones hidden. The two states of a sample are adjacent rows.
    For an answer of whole blocks, the release may also draw the empty block after it.

    Args:
        block_size: cells of a block, 32 in the release for LLaDA; ``None`` takes the whole answer
            as one block, as its recipe for Dream does.
    """

    block_size: int | None = 32

    def __post_init__(self) -> None:
        at_least(1, block_size=self.block_size)

    def states(self, batch: SupervisedBatch) -> States:
        maskable = batch.maskable
        # Counted in positions of the answer: given tokens take no place in a block.
        size = self.block_size or maskable.shape[1]
        blocks = torch.where(maskable, (maskable.cumsum(1) - 1) // size, NEVER)
        response, block, _ = group_rows(blocks, 1, batch.seeds, stream=_BLOCK)
        blocks, block = blocks[response], block[:, None]
        cells = torch.arange(maskable.shape[1], device=maskable.device).expand(len(response), -1)
        half = uniform_noise(batch.seeds[response], 0, cells, stream=_HALF) < 0.5
        # Both halves share the noise, so each target is predicted once, seeing the other half.
        inside = blocks == block
        supervised = torch.stack([inside & half, inside & ~half], 1).flatten(0, 1)
        return States(
            response=response.repeat_interleave(2),
            hidden=supervised | (blocks > block).repeat_interleave(2, 0),
            supervised=supervised,
        )


class DParallelModule(SFTModule):
    """Cross-entropy of both halves, plus ``entropy_weight`` times the entropy of right predictions.

    Each of the four terms is a mean over its own cells: the targets of all first or all second
    states, or those among them whose prediction is right (``argmax = target``). No gradient flows
    through this choice.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        block_size: see :class:`BlockComplements`.
        entropy_weight: beta; 2 in the release for LLaDA, 1 for Dream.
        num_padding: supervised cells after the answer; ``null`` for all, as in the release.
        optimizer: constructor of the optimiser, given the trainable parameters.
    """

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        block_size: int | None = 32,
        entropy_weight: float = 2.0,
        num_padding: int | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=2e-5, weight_decay=0.01
        ),
        **common: Any,
    ) -> None:
        masking = BlockComplements(block_size=block_size)
        super().__init__(
            backbone, masking=masking, num_padding=num_padding, optimizer=optimizer, **common
        )
        if backbone.spec.attention != "full":
            raise ValueError(
                "DParallelModule: expected a model with full attention, which sees both halves of "
                f"a block; got {backbone.spec.attention} attention"
            )
        at_least(0, entropy_weight=entropy_weight)
        self.entropy_weight = entropy_weight

    def score(self, batch: SupervisedBatch, states: States) -> TokenStats:
        """Returns scores with entropies of sharpened predictions; the rest is at temperature 1."""
        spec, head = self.backbone.spec, self.backbone.model.lm_head
        rows = lay_out(batch, states, spec)
        # One forward for both temperatures: logits are not kept, and the head is applied twice.
        stats, hidden = self.backbone.score_with_hidden(rows)
        sharpened = token_stats(
            hidden,
            head.weight,
            rows.targets[rows.scored],
            logit_scale=spec.logit_scale / TEMPERATURE,
            forbidden_ids=spec.forbidden_ids,
        )
        return stats._replace(entropy=sharpened.entropy)

    def loss_terms(self, batch: SupervisedBatch, states: States, stats: TokenStats) -> LossTerms:
        sums = super().loss_terms(batch, states, stats).sums  # for the log: both halves together
        row, _ = states.supervised.nonzero(as_tuple=True)
        means: dict[str, Tensor] = {}
        # Four means, each over its own targets: one over all would let the half with more decide.
        for number, view in enumerate(_VIEWS):
            targets = row % 2 == number
            # Only where the model is right already: being certain of a wrong token helps nobody.
            right = targets & stats.is_top
            for name, values, cells in (
                ("ce", stats.ce, targets),
                ("entropy", stats.entropy, right),
            ):
                summed = torch.where(cells, values, 0.0).sum()
                means[f"{name}_{view}"] = summed / self.divisor(cells.sum())
                sums[f"{name}_{view}"] = (summed.detach(), cells.sum())
        return LossTerms(self.combined(means), sums=sums)

    def combined(self, parts: Mapping[str, Tensor]) -> Tensor:
        ce, entropy = (
            torch.stack([parts[f"{name}_{view}"] for view in _VIEWS]).sum()
            for name in ("ce", "entropy")
        )
        return ce + self.entropy_weight * entropy
