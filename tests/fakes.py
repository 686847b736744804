"""Small stand-ins for models and tokenizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_dlm.backbones.base import Backbone, BackboneSpec, Denoised

MASK, PAD, EOS = 0, 1, 2


def fake_spec(**changes: object) -> BackboneSpec:
    ids = {"mask_id": MASK, "pad_id": PAD, "eos_ids": (EOS,), "forbidden_ids": (MASK, PAD)}
    return BackboneSpec(**{"family": "fake", **ids, **changes})  # type: ignore[arg-type]


class TableBackbone(Backbone):
    """Logits from a function of the canvas ``(B, L) -> (B, L, V)``, or one fixed table ``(L, V)``.

    ``forwards`` counts the calls and ``canvases`` keeps every input.
    """

    hidden_size = 4
    num_layers = 2
    device = torch.device("cpu")

    def __init__(self, table: Tensor | Callable[[Tensor], Tensor], vocab_size: int = 0) -> None:
        self.spec = fake_spec()
        self.table = table
        self.vocab_size = table.shape[-1] if isinstance(table, Tensor) else vocab_size
        self.canvases: list[Tensor] = []

    @property
    def forwards(self) -> int:
        return len(self.canvases)

    def denoise(
        self,
        ids: Tensor,
        *,
        pad_mask: Tensor | None = None,
        columns: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
        response_start: int | None = None,
        position_ids: Tensor | None = None,
    ) -> Denoised:
        self.canvases.append(ids.clone())
        if isinstance(self.table, Tensor):
            logits = self.table.expand(len(ids), -1, -1)
        else:
            logits = self.table(ids)
        if columns is None:
            columns = torch.arange(ids.shape[1]).expand_as(ids)
        logits = logits.gather(1, columns[..., None].expand(-1, -1, logits.shape[-1])).clone()
        logits[..., [MASK, PAD]] = -torch.inf
        hidden = None
        if hidden_layers:
            row = ids.float()[..., None].expand(-1, -1, 4)
            hidden = torch.stack([row * (layer + 10) for layer in hidden_layers], dim=2)
        return Denoised(logits=logits, columns=columns, hidden=hidden)


def logits_for(tokens: Sequence[int], probs: Sequence[float], vocab_size: int = 8) -> Tensor:
    """A table ``(L, V)`` that proposes ``tokens`` with exactly these probabilities.

    The rest is spread evenly over the tokens that may be proposed (ids 2 and up).
    """
    table = torch.zeros(len(tokens), vocab_size)
    for row, (token, prob) in enumerate(zip(tokens, probs, strict=True)):
        table[row, 2:] = (1.0 - prob) / (vocab_size - 3)
        table[row, token] = prob
    return table.clamp_min(1e-30).log()


class PeakMemory(TorchDispatchMode):
    """Most bytes that tensors made inside the context held at a time, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id_of(leaf) not in self._known | given:
                storage = leaf.untyped_storage()
                self._known.add(id_of(leaf))
                self._held += storage.nbytes()
                weakref.finalize(storage, self._drop, id_of(leaf), storage.nbytes())
        self.peak = max(self.peak, self._held)
        return result

    def _drop(self, name: int, nbytes: int) -> None:
        self._known.discard(name)
        self._held -= nbytes


def id_of(tensor: Tensor) -> int:
    """Which memory a tensor is a view of."""
    return tensor.untyped_storage()._cdata
