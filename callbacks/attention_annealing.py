"""Turns attention from causal to bidirectional while an autoregressive model is adapted."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_dlm.backbones import HFBackbone
from lit_dlm.system.options import at_least
from lit_dlm.tensors.sampling import sample_seed


class AttentionAnnealing(Callback):
    """Shows each later token with a probability that rises from 0 to 1 (arXiv 2410.17891, 3.3).

    For a backbone with ``from_ar``. Earlier tokens are always visible. Visible later tokens are
    drawn for every pair of columns at every optimiser step, seeded by the step's number, so that
    resumed runs and all processes draw the same. In validation everything is visible.

    Args:
        steps: optimiser steps until everything is visible.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        at_least(1, steps=steps)
        self.steps = steps
        self._handle: RemovableHandle | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        backbone = pl_module.backbone
        if not isinstance(backbone, HFBackbone) or backbone.source.mask_token is None:
            raise ValueError("AttentionAnnealing: expected a backbone with from_ar")

        def limit(
            decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # Per step and not per micro-batch: an accumulated update is of one mask.
            share = trainer.global_step / self.steps
            if not decoder.training or share >= 1.0:
                return args, kwargs
            # Rows with pictures come as embeddings.
            inputs = kwargs.get("input_ids")
            inputs = kwargs["inputs_embeds"] if inputs is None else inputs
            seen = self.visible(inputs.shape[1], trainer.global_step).to(inputs.device)
            mask = kwargs["attention_mask"]
            if mask is None:
                mask = seen
            elif isinstance(mask, Tensor) and mask.dtype == torch.bool:
                mask = mask & seen
            else:
                raise ValueError(
                    "AttentionAnnealing: expected rows of one sample each and another "
                    "attn_implementation than eager"
                )
            return args, kwargs | {"attention_mask": mask}

        # A hook on the decoder below the head, where the mask is an argument: the model itself
        # stays as its family wrote it, and inference without the callback sees everything.
        self._handle = backbone.model.model.register_forward_pre_hook(limit, with_kwargs=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._handle.remove()  # type: ignore[union-attr]

    def visible(self, length: int, step: int) -> Tensor:
        """Returns ``(1, 1, L, L)`` bool, ``True`` where the query (third axis) sees the key."""
        generator = torch.Generator().manual_seed(sample_seed(0, f"annealing:{step}"))
        # On the CPU, whose generator draws the same everywhere.
        drawn = torch.rand(length, length, generator=generator) < step / self.steps
        return (drawn | torch.ones(length, length, dtype=torch.bool).tril())[None, None]
