"""Supervised fine-tuning of masked diffusion models, with any corruption."""

from __future__ import annotations

import torch
from lightning.pytorch.cli import OptimizerCallable

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import Decoder
from lit_dlm.losses.corruption import RandomMasking
from lit_dlm.losses.states import Corruption
from lit_dlm.modules.finetune import FinetuneModule, LossNorm


class SFTModule(FinetuneModule):
    """Cross-entropy of hidden response tokens.

    Model families need no setting here: a backbone with block attention is trained on all blocks
    of a state in one row, one with full attention on the state itself. Autoregressive checkpoints
    are adapted by giving the backbone ``from_ar``.

    Args:
        backbone: with a ``lora`` or trainable ``adapter``, or wholly ``trainable``.
        tokenizer: folder, embedded name or hub id of the tokenizer.
        corruption: which states are trained on; random masking by default.
        decoders: decoding methods by name.
        seed: base seed of noise and decoding.
        num_padding: supervised cells behind the answer, ``null`` for all (``post_num`` in dLLM-RL).
        loss_norm: ``local`` or ``global``, see :class:`~lit_dlm.modules.finetune.FinetuneModule`.
        optimizer: constructor of the optimiser.
        warmup_steps: optimiser steps of the warm-up.
        lr_floor: factor on the learning rate at the end.
        export_dir: where the last weights are written.
    """

    def __init__(
        self,
        backbone: HFBackbone,
        *,
        tokenizer: str,
        corruption: Corruption | None = None,
        decoders: dict[str, Decoder] | None = None,
        seed: int = 0,
        num_padding: int | None = 0,
        loss_norm: LossNorm = "local",
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=1e-5, weight_decay=0.01
        ),
        warmup_steps: int = 50,
        lr_floor: float = 0.0,
        export_dir: str | None = None,
    ) -> None:
        super().__init__(
            backbone,
            corruption=corruption or RandomMasking(),
            tokenizer=tokenizer,
            decoders=decoders,
            seed=seed,
            num_padding=num_padding,
            loss_norm=loss_norm,
            optimizer=optimizer,
            warmup_steps=warmup_steps,
            lr_floor=lr_floor,
            export_dir=export_dir,
        )
