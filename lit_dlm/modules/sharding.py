"""FSDP2 for every training module: what is sharded, and how to have the weights whole again.

Lightning's ``ModelParallelStrategy`` gives a device mesh and leaves the sharding to the module's
``configure_model``. Parameters are split one by one, so frozen weights and adapters mix freely.
Decoder layers are gathered for their own forward and backward only; embedding, final norm and head
stay whole from a backbone's forward to its backward, since losses read the head there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel


def shard_trained(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards every child of a module that has something to train; a second call does nothing.

    In each such child the decoder layers are split first, found by their class through any
    adapter wrapping, then the parts that are run by methods other than ``forward`` (those with
    ``forward_methods``, such as backbones), then the child itself. Adapters must be in place.

    Children without trainable parameters stay whole on every process.

    Args:
        module: the LightningModule.
        mesh: one-dimensional mesh of the data-parallel processes.

    Raises:
        ValueError: nothing is trainable, or a trainable parameter belongs to the module itself,
            where nobody would reduce its gradient.
    """
    trained = {
        name: child
        for name, child in module.named_children()
        if any(parameter.requires_grad for parameter in child.parameters())
    }
    own = [name for name, value in module.named_parameters(recurse=False) if value.requires_grad]
    if own or not trained:
        found = f"parameter {own[0]} of the module itself" if own else "nothing to train"
        raise ValueError(
            "trainer.strategy: ModelParallelStrategy shards the children that are trained, "
            f"got {found}; use ddp"
        )
    for child in trained.values():
        _shard(child, mesh)


def _shard(child: nn.Module, mesh: DeviceMesh) -> None:
    layer_names = {
        name
        for part in child.modules()
        if isinstance(part, PreTrainedModel)
        for name in part._no_split_modules or ()
    }
    parts = list(child.modules())
    layers = [part for part in parts if type(part).__name__ in layer_names]
    # Inner parts before the outer ones that hold them: each takes what is left.
    units = [part for part in reversed(parts[1:]) if hasattr(part, "forward_methods")]
    for part in (*layers, *units, child):
        if isinstance(part, FSDPModule):
            continue
        fully_shard(part, mesh=mesh)
        for method in getattr(part, "forward_methods", ()):
            register_fsdp_forward_method(part, method)


@contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Gathers all sharded weights for as long as the context is open; every process must enter.

    Inside, a forward is a local matter: processes may decode different numbers of steps, and one
    of them alone may write the weights to disk. Do not train inside. Each process holds the full
    weights meanwhile. Without sharding this does nothing.

    Args:
        module: anything that holds sharded parts.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    held: list[FSDPModule] = []
    for part in sharded:
        # The outermost parts keep their weights after a forward anyway.
        if any(part is not other and _holds(other, part) for other in sharded):
            part.set_reshard_after_forward(False, recurse=False)
            held.append(part)
        part.unshard()
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()
        for layer in held:
            layer.set_reshard_after_forward(True, recurse=False)


def drop_frozen_decoders(
    module: nn.Module, state: dict[str, Any], prefix: str, _metadata: dict[str, Any]
) -> None:
    """A state-dict hook: frozen weights of decoders come from their own files, not checkpoints.

    A hook rather than ``on_save_checkpoint``: under FSDP2 the keys of a module's state are also
    what is looked for in a distributed checkpoint.

    Args:
        module: the module whose state was collected.
        state: its state, changed in place.
        prefix: what the keys of ``module`` start with.
    """
    for path, part in module.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        for name, value in part.named_parameters(remove_duplicate=False):
            if not value.requires_grad:
                state.pop(f"{prefix}{path}.{name}", None)


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(part is inner for part in outer.modules())
