"""What a training step asks of a GPU: forward and backward at released sizes, on meta tensors.

Part of ``launches.py``. What the host reads of a batch is made up: how many cells are supervised,
and which row is the last. Steps run as shipped, in bf16-mixed: the casts of autocast count, those
of weights once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from launches import DREAM, Counts, LaunchCounter, meta_backbone
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.backbones.projection import Projector, ProjectorConfig
from lit_dlm.decoding import ConfidencePolicy, Decoder
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.finetuning.tabom import TABOMModule
from lit_dlm.rl.items import RolloutBatch
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import ValueObjective
from lit_dlm.tensors import fused_head, precision
from lit_dlm.tracelock.module import TraceLockModule
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.states import StateBatch
from lit_dlm.training.batch import SupervisedBatch

ROWS, PROMPT, RESPONSE = 8, 256, 256
SUPERVISED = ROWS * RESPONSE // 2
"""Supervised cells of a batch."""


def _empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _responses() -> SupervisedBatch:
    return SupervisedBatch(
        ids=_empty(ROWS, PROMPT + RESPONSE),
        pad_mask=_empty(ROWS, PROMPT + RESPONSE, dtype=torch.bool),
        start=PROMPT,
        num_prompt=_empty(ROWS),
        maskable=_empty(ROWS, RESPONSE, dtype=torch.bool),
        steps=_empty(ROWS, RESPONSE),
        seeds=_empty(ROWS),
        uids=[str(row) for row in range(ROWS)],
    )


def _adapted() -> Any:
    return meta_backbone(DREAM, lora=LoRASettings(rank=16, alpha=16.0, targets="all")).train()


def _fine_tuning(kind: type[SFTModule]) -> Callable[[], Tensor]:
    module: Any = kind(_adapted(), tokenizer="tiny")
    batch = _responses()
    return lambda: module.training_step(batch)


def _tracerl() -> Callable[[], Tensor]:
    module = TraceRLModule(
        _adapted(),
        tokenizer="tiny",
        decoders={"rollout": Decoder(policy=ConfidencePolicy())},
        value=ValueObjective(backbone="lora"),
    ).to("meta")
    cells = {"dtype": torch.float32}
    batch = RolloutBatch(
        responses=_responses(),
        sample=_empty(ROWS),
        item=_empty(ROWS),
        hidden=_empty(ROWS, RESPONSE, dtype=torch.bool),
        supervised=_empty(ROWS, RESPONSE, dtype=torch.bool),
        weight=_empty(SUPERVISED, **cells),
        kl_weight=_empty(SUPERVISED, **cells),
        advantage=_empty(SUPERVISED, **cells),
        num_slots=ROWS,
        num_rows=float(ROWS),
        old_log_prob=_empty(SUPERVISED, **cells),
        returns=_empty(SUPERVISED, **cells),
        old_value=_empty(SUPERVISED, **cells),
    )
    return lambda: module.training_step(batch)


def _tracelock() -> Callable[[], Tensor]:
    backbone = meta_backbone(DREAM)
    config = ProjectorConfig(hidden_size=backbone.hidden_size)
    module = TraceLockModule(
        backbone, tokenizer="tiny", projector=Projector(config), head=AcceptanceConfig()
    )
    module.to("meta").train()
    module._trainer = SimpleNamespace(  # type: ignore[assignment]
        accumulate_grad_batches=1, world_size=1, global_rank=0, global_step=0
    )
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *args, **kwargs: None)
    rows, length = 64, RESPONSE
    batch = StateBatch(
        ids=_empty(rows, PROMPT + length),
        target=_empty(rows, PROMPT + length),
        masked=_empty(rows, PROMPT + length, dtype=torch.bool),
        pad_mask=_empty(rows, PROMPT + length, dtype=torch.bool),
        is_real=_empty(rows, dtype=torch.bool),
        start=PROMPT,
        mask_id=backbone.spec.mask_id,
        features=_empty(rows, length, module.scorer.head.num_features, dtype=torch.bfloat16),
        proposals=_empty(rows, length),
    )
    return lambda: module.training_step(batch, 0)


CASES: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "sft": lambda: _fine_tuning(SFTModule),
    "tabom": lambda: _fine_tuning(TABOMModule),
    "tracelock": _tracelock,
    "tracerl": _tracerl,
}
"""Adapters of rank 16 on Dream-7B with 8 rows of 512, half of each response supervised; TraceLock's
network on stored features of 64 states; TraceRL with a value model on an adapter of its own."""


class MixedPrecision(TorchFunctionMode):
    """Casts meta tensors, which autocast ignores, as autocast to bfloat16 casts on a GPU.

    The lists are those of torch's ``ATen/autocast_mode.h``, as far as models and losses need them.
    """

    HALF = (
        "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum",
        "scaled_dot_product_attention",
    )  # fmt: skip
    FULL = (
        "exp", "log", "pow", "__pow__", "rsqrt", "reciprocal", "softplus", "layer_norm", "rms_norm",
        "logsumexp", "softmax", "log_softmax", "sum", "cumsum", "prod", "nll_loss", "mse_loss",
        "binary_cross_entropy_with_logits",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self._weights: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.is_enabled and name in self.HALF + self.FULL:
            to = torch.bfloat16 if name in self.HALF else torch.float32
            args = [self._cast(value, to) for value in args]
            kwargs = {key: self._cast(value, to) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.bfloat16):
            return value
        if not (value.is_leaf and value.requires_grad and value.dtype != dtype):
            return value.to(dtype)
        if id(value) not in self._weights:
            self._weights[id(value)] = value.to(dtype)
        return self._weights[id(value)]

    @contextmanager
    def switched(self, _kind: str, *_: Any, enabled: bool = True) -> Iterator[None]:
        """Takes the place of ``torch.autocast``."""
        before, self.is_enabled = self.is_enabled, enabled
        try:
            yield
        finally:
            self.is_enabled = before


def training_counts(case: str) -> Counts:
    """Returns the counts of one step of a case."""
    step = CASES[case]()
    counter = LaunchCounter(_answer, num_true=SUPERVISED)
    mixed = MixedPrecision()
    # Meta takes the place of a GPU, which has tensor cores.
    with (
        patch.object(fused_head, "_has_tensor_cores", return_value=True),
        patch.object(torch, "autocast", mixed.switched),
        patch.object(precision, "is_autocast", lambda _: mixed.is_enabled),
        counter,
    ):
        with mixed:
            loss = step()
        loss.backward()
    return counter.counts


def _answer(tensor: Tensor) -> Any:
    """Answers the host: nothing is broken, the last item is the last row, lists are zeros."""
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        return False
    return ROWS - 1 if tensor.ndim == 0 else [0] * len(tensor)


def report() -> dict[str, float]:
    """Returns launches, roofline, gigabytes and waits of every case."""
    told: dict[str, float] = {}
    for name in CASES:
        counts = training_counts(name)
        told[f"{name}_launches"] = counts.launches
        told[f"{name}_roofline_ms"] = 1e3 * counts.seconds
        told[f"{name}_gigabytes"] = counts.bytes / 1e9
        told[f"{name}_host_waits"] = counts.waits.total()
        told[f"{name}_mixed_devices"] = counts.mixed.total()
    return told
