"""Emulates CUDA graphs on a CPU: what is recorded runs again without the Python that made it.

A host branch, a number that Python computed, an input that moved or a result that is read too late
shows up as a wrong value, what a graph cannot hold raises :class:`HostReadError`, and
memory that a replay reads although it has been freed :class:`FreedMemoryError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lit_dlm.backbones.attention import Sequences
from lit_dlm.tensors import graphs

T = TypeVar("T")

_READS = {
    "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2",
    "unique_dim", "unique_consecutive", "repeat_interleave", "lift_fresh",
}  # fmt: skip
"""Operations for which the host waits, or that upload what the host has (``torch.tensor``)."""


class HostReadError(RuntimeError):
    """What a CUDA graph refuses to record."""


class FreedMemoryError(AssertionError):
    """What a CUDA graph reads without complaint: memory that belongs to something else by now."""


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class NoHostReads(TorchDispatchMode):
    """Raises :class:`HostReadError` where a GPU's host would wait, read or upload."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        is_search = name in ("index", "index_put", "index_put_") and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1])
        )
        if name in _READS or is_search:
            raise HostReadError(f"operation not permitted when stream is capturing: {name}")
        return func(*args, **(kwargs or {}))


class _Recorder(NoHostReads):
    """Notes the operations that it runs, and what they overwrite of memory from before."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Sequence[Any], dict[str, Any], Any]] = []
        self.overwritten: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, Tensor] = {}
        """New memory, kept: as in a graph's pool, no address is used for something else."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = {_memory(tensor): tensor for tensor in _tensors((args, kwargs))}
        if func._schema.is_mutable:
            for place, tensor in inputs.items():
                if place not in self.own and place not in self.overwritten:
                    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                    self.overwritten[place] = whole, whole.clone()
        results = super().__torch_dispatch__(func, types, args, kwargs)
        fresh = [tensor for tensor in _tensors(results) if _memory(tensor) not in inputs]
        self.own |= {_memory(tensor): tensor for tensor in fresh}
        if fresh or func._schema.is_mutable:
            self.steps.append((func, args, kwargs, results if fresh else None))
        return results


class EmulatedGraph:
    """Stands in for :class:`lit_dlm.tensors.graphs.CudaGraph`."""

    made: ClassVar[list[EmulatedGraph]] = []
    alive: ClassVar[WeakSet[EmulatedGraph]] = WeakSet()

    def __init__(self, pool: WeakSet[EmulatedGraph] | None = None) -> None:
        self.pool, self.num_replays = WeakSet() if pool is None else pool, 0
        self.pool.add(self)
        self.made.append(self)

    def record(self, call: Callable[[], T]) -> T:
        recorder = _Recorder()
        try:
            with recorder:
                results = call()
        except HostReadError as error:  # as CUDA tells it
            raise RuntimeError("operation failed due to a previous error during capture") from error
        finally:
            with torch.no_grad():  # recording runs nothing
                for memory, before in recorder.overwritten.values():
                    memory.copy_(before)
        self._own, self.holds = list(recorder.own.values()), type(results)
        aliases: dict[int, Tensor] = {}

        def alias(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or _memory(leaf) in recorder.own:
                return leaf
            return aliases.setdefault(id(leaf), leaf.detach())

        # Of what was there before, aliases are kept, which are counted apart from others' tensors.
        self._steps = [
            (func, *tree_map(alias, (args, kwargs)), made)
            for func, args, kwargs, made in recorder.steps
        ]
        self._read = Counter(_memory(tensor) for tensor in aliases.values())
        self.alive.add(self)
        return results

    @property
    def num_launches(self) -> int:
        return len(self._steps)

    def replay(self) -> None:
        self.num_replays += 1
        for memory in self._read:
            num_aliases = sum(graph._read[memory] for graph in self.alive)
            if torch._C._storage_Use_Count(memory) - 1 <= num_aliases:  # one counts itself
                raise FreedMemoryError
        # Graphs share their memory: results of the others are gone.
        for other in self.pool:
            for tensor in other._own if other is not self else ():
                tensor.fill_(True if tensor.dtype == torch.bool else 77)
        for func, args, kwargs, results in self._steps:
            again = func(*args, **kwargs)
            if results is not None:
                for old, new in zip(_tensors(results), _tensors(again), strict=True):
                    old.copy_(new)


def attend(rows: Tensor, keys: Tensor, values: Tensor, of: Sequences, scale: float) -> Tensor:
    """The kernel for sequences of any lengths, with a mask: ``(T, h, d)``, nothing read."""
    queries = torch.arange(len(rows))[:, None]
    sequence = (of.query_starts[None, 1:] <= queries).sum(1).clamp_max(len(of.num_keys) - 1)
    first = of.key_starts[sequence].long()[:, None]
    at = torch.arange(len(keys))
    seen = (at >= first) & (at < first + of.num_keys[sequence][:, None])
    query, key, value = (part.transpose(0, 1)[None] for part in (rows, keys, values))
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    return output[0].transpose(0, 1)


@contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch, *, is_on: bool = True) -> Iterator[None]:
    """Lets a CPU pass for a GPU: with its attention, without free reads and, if on, with graphs."""
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "CudaGraph", EmulatedGraph)
        patch.setattr(graphs, "RECORDED_USE", 2)
        patch.setattr(graphs, "runs_graphs", lambda _device: is_on)
        patch.setattr("lit_dlm.backbones.hf.runs_graphs", lambda _device: is_on)
        patch.setattr("lit_dlm.backbones.hf.sequences_from", lambda *_args, **_options: 0)
        patch.setattr("lit_dlm.backbones.attention.one_by_one", attend)
        patch.setattr("lit_dlm.tensors.batches.FREE_READS", frozenset(), raising=False)
        EmulatedGraph.made.clear()
        yield
