"""A batch whose steps are CUDA graphs: the host launches one thing where it launched a thousand.

Graphs read and write fixed memory. So a step changes the state in place, and a row that has ended
keeps its slot, frozen, until another takes it over. The host plans a forward as ever, pads it to
one of a few sizes, and uploads it to one place. Each size has a graph, recorded at its third use;
before, the same step runs eagerly. Results are those of :class:`Batch`, on a GPU up to rounding:
padding changes the sizes of matrix products.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lit_dlm.backbones.base import Backbone
from lit_dlm.backbones.cache import CacheableBackbone
from lit_dlm.decoding.batch import Batch
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.state import BY_STEP, RUNNING, Canvas, DecodeState, StepRecord
from lit_dlm.decoding.step import advance
from lit_dlm.tensors.graphs import Graphs, explain_eager


def runs_graphed(backbone: Backbone, decoder: Decoder) -> bool:
    """Whether graphs can be recorded: of steps, or of forwards where a part is not graph-safe."""
    if not backbone.graph_safe or (decoder.policy.denoise and not decoder.graph_safe):
        return False
    least = backbone.sequences_from if isinstance(backbone, CacheableBackbone) else None
    if decoder.cache.keeps and least != 0:
        explain_eager("attention has no kernel here for sequences of any lengths")
        return False
    return True


class GraphedBatch(Batch):
    """Rows that keep their slots, and memory that keeps its place; see the module."""

    def __init__(
        self, backbone: Backbone, canvas: Canvas, decoder: Decoder, hidden_layers: tuple[int, ...]
    ) -> None:
        parts = (decoder.policy, decoder.window, decoder.quota)
        self._graphs = Graphs(", ".join(type(part).__name__ for part in parts))
        super().__init__(backbone, canvas, decoder, hidden_layers)
        self._is_whole = decoder.graph_safe
        self._forwards.graphs = None if self._is_whole else self._graphs
        # Nothing can be timed inside of a graph.
        self._policy_timer.is_on = not self._is_whole

    def _kept(self, state: DecodeState) -> DecodeState:
        """Moves a state to where the graphs read it, or makes room and forgets the graphs."""
        memory: DecodeState | None = getattr(self, "state", None)  # none yet at the start
        new = state.tensors()
        if memory is None or _layout(memory) != _layout(state):
            self._graphs.forget()
            return state.copied(new)
        for name, value in memory.tensors().items():
            value.copy_(new[name])
        return memory

    def step(self, requires: frozenset[str]) -> StepRecord:
        key = self._forwards.key
        with self._own_precision():
            if key is None or not self._is_whole:
                return self._step(requires)
            return self._graphs.run((key, requires), lambda: self._step(requires))

    def _step(self, requires: frozenset[str]) -> StepRecord:
        # Observers see the state as it was before the step, which the writes below overwrite.
        before = self.state.copied(BY_STEP)
        decision = self._decide(before, requires)
        after = advance(decision)
        if after.memory is not None and self.state.memory is None:
            # A policy from outside need not say what it begins with.
            self.state = replace(self.state, memory=torch.zeros_like(after.memory))
        is_running = before.status == RUNNING
        for name, new in after.tensors().items():
            if name in (*BY_STEP, "memory"):
                old = getattr(self.state, name)
                rows = is_running.view(-1, *[1] * (old.ndim - 1))
                old.copy_(torch.where(rows, new, old))  # a frozen row stays as it ended
        return decision.record

    def _with_room(self, ended: list[int], number: int) -> list[int]:
        # A size is worth its graphs only if it lasts: the batch doubles, and shrinks by halves.
        spare = max(len(self.rows) - number, 0) if number > len(self.frozen) else 0
        places = super()._with_room(ended, number + spare)
        places, unused = places[: len(places) - spare], places[len(places) - spare :]
        self.abandon([self.rows[row].slot for row in unused])
        self.frozen.update(unused)
        return places

    def drop(self, ended: list[int]) -> None:
        self.frozen.update(ended)
        # Half of the slots are worth new graphs: a frozen row still costs its share of the head.
        if 2 * len(self.running) <= len(self.rows):
            gone, self.frozen = sorted(self.frozen), set()
            super().drop(gone)


def _layout(state: DecodeState) -> object:
    """What must be equal for one state to take the place of another in memory."""
    return state.start, {name: value.shape for name, value in state.tensors().items()}
