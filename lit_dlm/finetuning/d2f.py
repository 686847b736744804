"""D2F: a block-causal student of its own full-attention teacher (arXiv:2508.09192).

Discrete diffusion forcing: later blocks are noisier than earlier ones, as they are in the pipeline
that decodes them (:class:`~lit_dlm.decoding.PipelineWindow`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.visibility import key_visibility, position_ids_for
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.system.options import refuse
from lit_dlm.tensors.fused_head import CHUNK_ELEMENTS, TokenStats
from lit_dlm.tensors.sampling import uniform_noise
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.layout import lay_out
from lit_dlm.training.states import Masking, States

_RATE, _CELL = 26, 27
"""Streams of noise, apart from those of ``training/masking.py`` and of other methods."""
_LEAST, _SPREAD, _MOST = 0.2, 0.5, 0.7
"""A first block's rate is from 0.2 to 0.7; no later one's is above 0.7."""


@dataclass(eq=False, kw_only=True)
class RisingMasking(Masking):
    """Hides each cell at the rate of its block; rates rise from block to block.

    The first rate is ``p = 0.2 + u / 2``; each of the ``n - 1`` blocks after it adds
    ``u (0.7 - p) / (n - 1)``, with other uniform ``u``. A target weighs one over its rate. The
    release shares the rise by the most blocks of any answer in the batch; here it is by those of
    the answer, so that a sample has the same states in any batch.
    """

    def states(self, batch: SupervisedBatch) -> States:
        maskable, blocks = batch.maskable, batch.blocks
        if blocks is None:
            refuse("RisingMasking", "a model with block attention", "full attention")
        B, G = maskable.shape
        cells = torch.arange(G, device=maskable.device).expand(B, -1)
        blocks = blocks - blocks[:, :1]  # those of the response, from 0
        last = (blocks * maskable).amax(1, keepdim=True)  # (B, 1)
        # One number for each cell, of which each block uses the one of its own number.
        noise = uniform_noise(batch.seeds, 0, cells, stream=_RATE)
        first = _LEAST + _SPREAD * noise[:, :1]
        rise = (_MOST - first) / last.clamp_min(1) * noise
        rise[:, 0] = 0.0
        t = (first + rise.cumsum(1)).gather(1, blocks)
        chosen = uniform_noise(batch.seeds, 0, cells, stream=_CELL) < t
        supervised = chosen & maskable
        return States(
            response=torch.arange(B, device=maskable.device),
            hidden=chosen | ~maskable,
            supervised=supervised,
            weight=(supervised / t).float(),
            one_copy=True,
        )


class D2FModule(SFTModule):
    """Cross-entropy of the student to its teacher, over the rate of each target's block.

    Student and teacher see the same noisy responses: the student with its adapter and in blocks,
    the teacher without it and with full attention. The loss is the mean over all targets; a batch
    without any, where the release divides by zero, has none.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``; a block model with ``whole_prompt``,
            as ``spec_overrides`` make of any with full attention.
        num_padding: supervised cells after the answer; ``null`` for all, as in the release.
        optimizer: constructor of the optimiser, given the trainable parameters.
    """

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        num_padding: int | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=1e-5, weight_decay=0.01
        ),
        **common: Any,
    ) -> None:
        super().__init__(
            backbone,
            masking=RisingMasking(),
            num_padding=num_padding,
            optimizer=optimizer,
            **common,
        )
        if backbone.adapter is None:
            wanted = "lora settings or an adapter: the teacher is the backbone without it"
            refuse("D2FModule.backbone", wanted, "none")
        if not backbone.spec.whole_prompt:
            wanted = "whole_prompt: true, with block attention whose blocks count from the response"
            refuse("D2FModule.backbone.spec_overrides", wanted, f"{backbone.spec.attention!r}")

    def score(self, batch: SupervisedBatch, states: States) -> TokenStats:
        """Returns scores whose cross-entropy is that to the teacher, not to the answer."""
        backbone = self.backbone
        rows = lay_out(batch, states, backbone.spec)
        stats, student = backbone.score_with_hidden(rows)
        real = torch.ones_like(rows.ids, dtype=torch.bool)
        if batch.pad_mask is not None:
            real = batch.pad_mask[states.response]
        positions = position_ids_for(real, backbone.spec.positions)
        seeing_all = replace(rows, mask=key_visibility(real), position_ids=positions)
        with torch.no_grad(), backbone.using_adapter(None):
            teacher = backbone.encode_rows(seeing_all)
        # A chunk at a time, computed again in the backward: all logits would take gigabytes.
        size = max(1, CHUNK_ELEMENTS.get(student.device.type, 0) // backbone.vocab_size)
        ce = [
            checkpoint(self._cross_entropy, *chunk, use_reentrant=False)
            for chunk in zip(student.split(size), teacher.split(size), strict=True)
        ]
        return stats._replace(ce=torch.cat(ce))

    def _cross_entropy(self, student: Tensor, teacher: Tensor) -> Tensor:
        """``(n,)`` float32 cross-entropy in nats of ``(n, D)`` rows after the final norm."""
        log_probs = self.backbone.head(student).float().log_softmax(-1)
        probs = self.backbone.head(teacher).float().softmax(-1)
        # Ids that may not be produced have no probability in either: 0, and not 0 times infinity.
        return -(probs * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)
