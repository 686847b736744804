"""FSDP2 for training modules: what is sharded, and how to gather the whole weights.

Decoder layers are gathered for their own forward and backward only; embedding, final norm and head
stay whole from a backbone's forward to its backward, since losses read the head in between.
Rollouts gather more: :func:`whole_weights` and :func:`decoding_weights`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import fold, restored
from lit_dlm.system.files import is_finite
from lit_dlm.system.options import refuse
from lit_dlm.training.checkpoint import (
    draft_of,
    local,
    put_in_place,
    remove,
    require_training,
    sound,
    write_digests,
)
from lit_dlm.vision.base import Vision


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's FSDP2 strategy, whose checkpoint folders are replaced as a whole and checked.

    Where an update accumulates batches, small gradients (those of an adapter) stay whole until the
    last batch. Others are reduced after every batch, so that only one layer's are whole at a time;
    only their sums over replicas wait.

    Args:
        replicas: copies of the weights (HSDP); each is split over consecutive processes. With one
            copy per node, only gradients go through the network between nodes.
        whole_gradients_gb: size up to which gradients wait, counted in float32; 0 for none.
        options: those of ``ModelParallelStrategy``; by default all processes are data parallel.
    """

    def __init__(
        self, *, replicas: int = 1, whole_gradients_gb: float = 1.0, **options: Any
    ) -> None:
        super().__init__(**options)
        self._replicas = replicas
        self._most_waiting = whole_gradients_gb * 1e9

    def setup_environment(self) -> None:
        count = self.num_nodes * self.num_processes
        if self._data_parallel_size == "auto":
            self._data_parallel_size, self._tensor_parallel_size = count, 1
        if self._replicas < 1 or count % self._replicas:
            divisor = f"a divisor of the {count} processes"
            refuse("trainer.strategy.replicas", divisor, self._replicas)
        super().setup_environment()
        if self._replicas > 1:
            assert self.lightning_module is not None
            self.lightning_module._device_mesh = init_device_mesh(
                self.root_device.type,
                (self._replicas, count // self._replicas),
                mesh_dim_names=("replicate", "shard"),
            )

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        # Their kernels would write outside of a shard.
        if any(type(one).__module__.startswith("bitsandbytes") for one in self.optimizers):
            wanted = "one of torch for weights that are split"
            refuse("model.optimizer", wanted, "one of bitsandbytes", "; use it with ddp")

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.model is not None
        # Lightning enters this for every batch of an update but the last.
        trained = (value for value in self.model.parameters() if value.requires_grad)
        is_small = 4 * sum(value.numel() for value in trained) <= self._most_waiting
        switch = "set_requires_gradient_sync" if is_small else "set_requires_all_reduce"
        parts = [part for part in self.model.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            getattr(part, switch)(False, recurse=False)
        yield
        for part in parts:
            getattr(part, switch)(True, recurse=False)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        # Lightning writes into an existing folder, so an interrupted save would mix two training
        # steps. Here the former checkpoint keeps its name until the new one is complete.
        self._require_finite(f"{filepath}: not written, since")
        if not self._save_distributed_checkpoint:  # one file, which Lightning replaces as a whole
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        draft = draft_of(path)
        if self.is_global_zero:
            remove(draft)
        self.barrier("no former draft")
        super().save_checkpoint(checkpoint, draft, storage_options)
        if self.is_global_zero:  # its part of the save ends after those of the others
            write_digests(draft)
            put_in_place(draft, path)
        self.barrier("checkpoint in place")

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint that the first process has checked; nothing in it is code."""
        found: Path | ValueError | OSError
        try:
            path = local(checkpoint_path)
            found = sound(path) if self.is_global_zero else path
        except (ValueError, OSError) as error:  # raised by all processes, or the others would wait
            found = error
        found = self.broadcast(found)
        if not isinstance(found, Path):
            raise found
        checkpoint = super().load_checkpoint(found, weights_only=True)
        require_training(found, checkpoint)
        self._require_finite(f"{found}:")
        return checkpoint

    def _require_finite(self, beginning: str) -> None:
        """Checks what is trained, each process its own part; all of them raise together."""
        assert self.lightning_module is not None
        broken = [
            name
            for name, value in self.lightning_module.named_parameters()
            if value.requires_grad and not is_finite(_local(value.detach()))
        ]
        if not self.reduce_boolean_decision(not broken, all=True):
            name = broken[0] if broken else "a weight"
            raise ValueError(f"{beginning} {name} has numbers that are not finite")


def shard_trained(module: nn.Module, mesh: DeviceMesh, *, precision: str = "32-true") -> None:
    """Shards every child of a module that has something to train; a second call does nothing.

    Adapters must be in place. With ``precision`` ``bf16-mixed``, decoders compute with bfloat16
    copies of their shards and sum gradients in float32; heads are left to autocast. ``mesh`` has
    the data-parallel processes; with replicas in two dimensions, replicas and shards.
    """
    trained = [child for child in module.children() if _is_trained(child.parameters())]
    if not trained or _is_trained(module.parameters(recurse=False)):
        raise ValueError(
            "trainer.strategy: ModelParallelStrategy shards the children that are trained, got "
            f"{'parameters of the module itself' if trained else 'nothing to train'}; use ddp"
        )
    mixed = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        # Autocast alone would gather float32 weights and keep bfloat16 copies beside them.
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for child in trained:
        _shard(child, mesh, mixed)


def _shard(child: nn.Module, mesh: DeviceMesh, mixed: MixedPrecisionPolicy) -> None:
    # Frozen tower weights stay whole, so that no process waits for another's pictures.
    towers = [part for part in child.modules() if isinstance(part, Vision)]
    whole = {value for part in towers for value in part.parameters() if not value.requires_grad}
    parts = [part for part in child.modules() if not whole.issuperset(part.parameters())]
    layers = _layers(parts)
    # Inner parts before the outer ones that hold them: each shards what is left.
    outer = [part for part in reversed(parts) if hasattr(part, "forward_methods")]
    for part in dict.fromkeys((*layers, *outer, child)):
        if isinstance(part, FSDPModule):
            continue
        methods = getattr(part, "forward_methods", ())
        fully_shard(
            part,
            mesh=mesh,
            ignored_params=whole,
            # A head is read after the method that runs the rest.
            reshard_after_forward=False if methods else None,
            mp_policy=mixed if methods or part in layers else MixedPrecisionPolicy(),
        )
        # By itself FSDP gathers weights before ``forward`` only; these are called in its place.
        for method in methods:
            register_fsdp_forward_method(part, method)


def _layers(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Finds layers by the name of their class, which works through any adapter wrapping."""
    models = [part for part in parts if isinstance(part, PreTrainedModel)]
    names = {name for model in models for name in model._no_split_modules or ()}
    return [part for part in parts if type(part).__name__ in names]


def _is_trained(parameters: Iterable[nn.Parameter]) -> bool:
    return any(value.requires_grad for value in parameters)


@contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Gathers all sharded weights while the context is open; every process must enter.

    Inside, a forward needs no other process: processes may decode different numbers of steps, and
    one of them alone may write the weights to disk. Do not train inside.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    inner = {part for outer in sharded for part in outer.modules() if part is not outer}
    # Only these release their weights after a forward.
    layers = [part for part in sharded if part in inner and not hasattr(part, "forward_methods")]
    for layer in layers:
        layer.set_reshard_after_forward(False, recurse=False)
    for part in sharded:
        part.unshard()
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()
        for layer in layers:
            layer.set_reshard_after_forward(True, recurse=False)


@contextmanager
def decoding_weights(backbone: HFBackbone) -> Iterator[None]:
    """:func:`whole_weights` with the adapter merged into them, while a policy decodes.

    Merged weights are rounded to the dtype of the base, unlike those of the training forward:
    log-probabilities of the two differ by that rounding. Afterwards the weights are restored bit
    for bit. Matrices in 4 bits are left alone: the adapter runs beside them as in training. Every
    process must enter; do not run the backbone with another adapter inside.
    """
    if backbone.adapter is None or backbone.is_4bit:
        with whole_weights(backbone):
            yield
        return
    with restored(backbone.model, backbone.source.mapped), whole_weights(backbone):
        fold(backbone.model)
        with backbone.using_adapter(None):
            yield


def drop_frozen_decoders(
    module: nn.Module, state: dict[str, Any], prefix: str, _metadata: dict[str, Any]
) -> None:
    """State-dict hook that drops frozen weights of decoders, which come from their own files."""
    # Not in ``on_save_checkpoint``: under FSDP2 the keys of a module's state are also those that
    # are looked up in a distributed checkpoint.
    frozen = {
        f"{prefix}{path}.{name}"
        for path, part in module.named_modules()
        if isinstance(part, PreTrainedModel | Vision)
        for name, value in part.named_parameters(remove_duplicate=False)
        if not value.requires_grad
    }
    for key in list(state):
        # bitsandbytes adds the constants of a matrix in 4 bits, such as ``weight.absmax``.
        if key in frozen or f"{key.partition('.weight.')[0]}.weight" in frozen:
            del state[key]


def miss_no_frozen_decoders(module: nn.Module, keys: Any) -> None:
    """Hook of loading, for callbacks that load strictly: only trained weights can be missing."""
    trained = tuple(name for name, value in module.named_parameters() if value.requires_grad)
    keys.missing_keys[:] = [key for key in keys.missing_keys if key.endswith(trained)]


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
