"""Small models, examples and runs for tests of fine-tuning."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn

from lit_dlm.backbones import Architecture, HFBackbone
from lit_dlm.backbones.experts import Experts
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.datamodules.supervised import SupervisedDataModule
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.training.batch import SupervisedBatch, SupervisedExample
from lit_dlm.training.states import States

VOCAB, G = 24, 8
MASK, PAD, EOS = 2, 0, 1


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2,
    "num_heads": 2, "initializer_range": 0.3, "mask_id": MASK, "pad_id": PAD, "eos_ids": (EOS,),
}  # fmt: skip


EXPERTS: dict[str, Any] = {
    "decoder": "glm4_moe",
    "attention": "block",
    "block_size": 3,
    "experts": Experts(
        number=8, per_token=3, width=8, groups=4, groups_per_token=2, shared=1, first_dense=1
    ),
}
"""Changes of a model that make it a small LLaDA2."""


def small(
    *,
    lora: bool = True,
    dropout: float = 0.0,
    dtype: Any = "float32",
    is_double: bool = False,
    **changes: Any,
) -> HFBackbone:
    """Two layers; the adapter is not the identity, so that nothing hides behind zeros."""
    torch.manual_seed(0)
    model = HFBackbone(
        architecture=Architecture(**{**SIZES, **changes}),
        dtype=dtype,
        trainable=not lora,
        lora=LoRASettings(rank=2, alpha=4.0, dropout=dropout, targets="all") if lora else None,
    )
    if is_double:
        model.double()
        if "experts" in changes:  # grouped products know no float64
            model.model.set_experts_implementation("batched_mm")
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.2)
    return model


def examples(count: int = 8, *, never: tuple[int, ...] = ()) -> list[SupervisedExample]:
    """Decodes of ``G`` random tokens in random order; those numbered in ``never`` have no step."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        steps = rng.permutation(G).astype(np.int32)
        found.append(
            SupervisedExample(
                uid=f"fake/train/{number:05d}",
                prompt_ids=rng.integers(3, VOCAB, 1 + number % 4).astype(np.int32),
                response_ids=rng.integers(3, VOCAB, G).astype(np.int32),
                steps=np.full(G, -1, np.int32) if number in never else steps,
                decode_entropy=rng.random(G).astype(np.float32),
            )
        )
    return found


class Unread:
    """A source that nobody asks."""

    def examples(self, model):
        raise AssertionError


class Data(SupervisedDataModule):
    """A data module over given examples, without any source."""

    def __init__(self, given: list[SupervisedExample], **options: Any) -> None:
        super().__init__([Unread()], response_length=G, **options)
        self.given = given

    def setup(self, stage: str | None = None) -> None:
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        self.set_examples(
            self.given,
            module.backbone.spec,
            num_padding=module.num_padding,
            noise_seed=module.seed,
        )


class Watch(Callback):
    """Notes uids, seeds and cuts of every training batch, and its loss."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], list[int], list[int]]] = []
        self.losses: list[float] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        draw = pl_module.masking.states
        self.cuts: list[int] = []

        def watched(responses: Any) -> States:
            states = draw(responses)
            self.cuts = [] if states.cut is None else states.cut.tolist()
            return states

        pl_module.masking.states = watched

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: SupervisedBatch, batch_idx: int
    ) -> None:
        self.batches.append((batch.uids, batch.seeds.tolist(), self.cuts))
        self.losses.append(float(outputs["loss"]))


def quiet(folder: Path, **options: Any) -> Trainer:
    """A trainer on one CPU process that says and saves nothing."""
    no = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    settings: dict[str, Any] = dict.fromkeys(no, False)
    settings |= {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    return Trainer(default_root_dir=folder, **{**settings, **options})


def run(
    module: SFTModule,
    data: SupervisedDataModule,
    folder: Path,
    *,
    steps: int,
    total: int = 6,
    resume: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    **options: Any,
) -> Trainer:
    """Trains up to ``steps`` of a run of ``total`` and saves a checkpoint ``run.ckpt``."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            trainer.should_stop = trainer.global_step >= steps

    trainer = quiet(folder, max_steps=total, callbacks=[*callbacks, Stop()], **options)
    trainer.fit(module, data, ckpt_path=resume, weights_only=True if resume else None)
    trainer.save_checkpoint(folder / "run.ckpt")
    return trainer


def trained(module: nn.Module) -> dict[str, Tensor]:
    """What a run may change."""
    return {
        name: value.detach().clone()
        for name, value in module.named_parameters()
        if value.requires_grad
    }


def two_processes(kind: str) -> Strategy:
    """``ddp`` or ``fsdp`` on two CPU processes."""
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    return ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        save_distributed_checkpoint=False,
    )
