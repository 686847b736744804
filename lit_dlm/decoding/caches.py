"""Cache schemes: which part of the canvas each step computes, and what it reuses.

Every row has a block ``[s, e)``, the one that its window is in. The step in which a row enters a
block refreshes the row's cache; the steps after it compute only a part of the canvas:

========  ==================  ======================  ==============  ==============
scheme    refresh             step                    attends to      exact
========  ==================  ======================  ==============  ==============
none      -                   ``[0, L)``              ``[0, L)``      yes
prefix    ``[0, L)``          ``[s, L)``              ``[0, L)``      no
horizon   ``[0, L)``          ``[s, min(e + h, L))``  [0, same end)   no
dual      ``[0, L)``          ``[s, e)``              ``[0, L)``      no
block     ``[last s, e)``     ``[s, e)``              ``[0, e)``      yes
part      ``[last s, e)``     a part of ``[s, e)``    ``[0, e)``      no
========  ==================  ======================  ==============  ==============

``last s`` is where the row's previous block begins. Prefix and dual are Fast-dLLM's (arXiv
2505.22618), the horizon is dLLM-RL's, block is for block-causal models (SDAR, arXiv 2510.06303),
and part, for parts of their blocks, is Fast-dLLM v2's (arXiv 2509.26328). A refresh is an ordinary
step and commits. The block scheme makes a finished block final in the forward that enters the next
block; the reference spends a separate forward on it, with the same result. It computes no block
before a row enters it and reads later ones as uniform, so KLASS, which compares a cell with the
step before, may wait one step more in each block.

Rows of a batch may be in different blocks, and one may refresh while another does not. Under the
block scheme both share one forward, two blocks wide at most once the prompt has run. A refresh of
the other schemes is as wide as the canvas; a step then runs two forwards, each over its own rows,
unless the attention takes rows of any lengths. A row's results do not depend on the other rows.

Under the block scheme, responses to the same prompt share its forward: a prompt's cache depends on
nothing after it, so it is copied from any row that has it, however far that row has got.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone, Denoised, Span
from lit_dlm.backbones.cache import MOST_TOKENS, Bucket, CacheableBackbone, CachedCanvas, WindowPlan
from lit_dlm.backbones.visibility import attention_blocks, canvas_positions
from lit_dlm.config.components import Component
from lit_dlm.decoding.state import DecodeState
from lit_dlm.decoding.windows import BlockWindow, Window
from lit_dlm.system.options import at_least
from lit_dlm.tensors.batches import row_index, token_batches
from lit_dlm.tensors.graphs import Graphs

if TYPE_CHECKING:
    from lit_dlm.decoding.policies.base import CommitPolicy

PROMPT_TOKENS = 16_384
"""Most prompt tokens that run in one forward; a longer prompt runs alone."""


class CacheScheme(Component):
    """Decides what a step computes and what it takes from earlier forwards."""

    attention: str = "full"
    """What the model must have."""
    commits_first: bool = True
    """Whether, under a right shift, a refresh commits only the block's first cell, whatever the
    policy selects, as the releases do: later steps do not run the column that predicts it."""
    keeps: bool = True
    """Whether anything is kept; otherwise every step computes the whole canvas."""
    in_parts: bool = False
    """Whether the window goes through parts of the model's blocks."""

    @abstractmethod
    def step_span(self, begin: int, end: int, length: int) -> Span:
        """Returns what a step computes while its row is in the block ``[begin, end)``."""

    def refresh_span(self, begin: int, end: int, final: int, length: int) -> Span:
        """Returns the span of the step that enters a block; nothing left of ``final`` changes."""
        return Span(0, length, length)

    def check(self, backbone: Backbone, window: Window) -> None:
        """Refuses a backbone or a window that it is not for."""
        name, spec = type(self).__name__, backbone.spec
        if not isinstance(backbone, CacheableBackbone):
            raise ValueError(
                f"cache: {name} is for backbones that run parts of a canvas, which "
                f"{type(backbone).__name__} does not"
            )
        # A block model's window goes through its blocks or through parts of them, see check_window.
        own = spec.block_size, spec.block_origin
        is_in_parts = spec.attention == "block" and window.blocks != own
        if spec.attention != self.attention or is_in_parts != self.in_parts:
            place = f", in {'parts of ' * self.in_parts}the model's own blocks"
            place = place if self.attention == "block" else ""
            raise ValueError(
                f"cache: {name} is for {self.attention} attention{place}; got "
                f"{spec.family} with {spec.attention} attention (block_size {spec.block_size}, "
                f"origin {spec.block_origin!r}) and {type(window).__name__}"
            )
        window.bounds(0, start=0, length=1, first=0)  # raises for a window without blocks


class NoCache(CacheScheme):
    """Every step runs the whole canvas."""

    commits_first = False
    keeps = False

    def step_span(self, begin: int, end: int, length: int) -> Span:
        return Span(0, length, length)


class PrefixCache(CacheScheme):
    """Keeps the columns before the block; computes the block and everything after it.

    Args:
        horizon: cells after the block that steps compute and see (``further_horizon`` in dLLM-RL);
            ``None``: all.
    """

    def __init__(self, *, horizon: int | None = None) -> None:
        at_least(0, horizon=horizon)
        self.horizon = horizon

    def step_span(self, begin: int, end: int, length: int) -> Span:
        # What follows the block is computed anew in every step; stale are only the keys before it.
        last = length if self.horizon is None else min(end + self.horizon, length)
        return Span(begin, last, last)


class DualCache(CacheScheme):
    """Keeps the columns before and after the block; computes only the block."""

    def step_span(self, begin: int, end: int, length: int) -> Span:
        # Keys behind the block stay those of its refresh: they were computed from masks, and know
        # nothing of what the block has gained since.
        return Span(begin, end, length)


class BlockCache(CacheScheme):
    """Keeps finished blocks of a block-causal model: exact, since they never see later ones."""

    attention = "block"
    commits_first = False

    def refresh_span(self, begin: int, end: int, final: int, length: int) -> Span:
        # The last tokens of the previous block were written after its last forward, which saw masks
        # there. It is computed once more, now final, together with the new block.
        return Span(final, end, end)

    def step_span(self, begin: int, end: int, length: int) -> Span:
        return Span(begin, end, end)


class SubBlockCache(BlockCache):
    """Computes only a part of a block, and keeps earlier results for the rest of the block.

    This is how Fast-dLLM v2 samples (arXiv:2509.26328): the window goes through parts of the
    model's blocks. Steps compute the whole block until the part's first cell is known, then only
    the part. Under a right shift, a block's first cell is committed before the others.
    """

    commits_first = True
    in_parts = True

    def step_span(self, begin: int, end: int, length: int) -> Span:
        return Span(begin, end, length)


class Forwards:
    """The forwards of one decode; here over the whole canvas, with nothing planned or kept."""

    def __init__(
        self, backbone: Backbone, policy: CommitPolicy, hidden_layers: tuple[int, ...]
    ) -> None:
        self.backbone = backbone
        self.num_forwards = 0
        """Calls of the backbone so far."""
        self.key: Hashable = None
        """What the shapes of the prepared forward depend on; ``None`` if they may not recur."""
        self.graphs: Graphs | None = None
        """Graphs of forwards, where a step as a whole cannot be one."""
        self._policy, self._hidden_layers = policy, hidden_layers
        self._inputs: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._logits: dict[Hashable, Tensor] = {}
        # (b,) int64 first cell of a block that a row enters and must commit, -1 elsewhere, or None
        self._first_cells: Tensor | None = None

    def prepare(self, state: DecodeState, first_mask: Sequence[int]) -> None:
        """Does on the host what the next step needs: plans it, and runs the prompts of new rows.

        ``first_mask`` are the leftmost unfinished columns of the rows, negative in rows that have
        ended.
        """
        self.num_forwards += 1
        self.key = "whole" if state.ids.numel() <= MOST_TOKENS else None

    def denoise(self, state: DecodeState, columns: Tensor) -> tuple[Denoised, Tensor | None]:
        """Runs the forward of a prepared step, for ``(b, K)`` int64 columns.

        Also returns the ``(b, L)`` bool cells that this step must commit, as the only commit of
        their row; ``None`` if no row has one.
        """
        if self._policy.denoise is not None:
            own = self._policy.denoise(self.backbone, state, columns, self._hidden_layers)
            return own, None
        if self.graphs is None or self.key is None:
            return self._forward(state, state.ids, columns), self._forced(state)
        # A graph reads where it was recorded. Columns differ by what a step requires.
        shapes = state.ids.shape, columns.shape
        if shapes not in self._inputs:
            self._inputs[shapes] = state.ids.clone(), columns.clone()
        ids, places = self._inputs[shapes]
        ids.copy_(state.ids)
        places.copy_(columns)

        def forward() -> Denoised:
            denoised = self._forward(state, ids, places)
            # A graph keeps its results: large ones, logits, lie in one place for all graphs.
            logits = self._logits.setdefault(shapes, denoised.logits)
            if logits is not denoised.logits:
                logits.copy_(denoised.logits)
            return replace(denoised, logits=logits)

        return self.graphs.run((self.key, shapes), forward), self._forced(state)

    def _forward(self, state: DecodeState, ids: Tensor, columns: Tensor) -> Denoised:
        """Runs the prepared forward on ``(b, L)`` int64 ids."""
        return self.backbone.denoise(
            ids,
            pad_mask=state.pad_mask,
            columns=columns,
            hidden_layers=self._hidden_layers,
            response_start=state.start,
        )

    def _forced(self, state: DecodeState) -> Tensor | None:
        """Returns the first cell of each block that a row has just entered, where it is masked."""
        if self._first_cells is None:
            return None
        columns = torch.arange(state.ids.shape[1], device=state.ids.device)
        return (columns == self._first_cells[:, None]) & state.masked

    def take(self, kept: Sequence[int], index: Tensor) -> None:
        """Keeps the rows ``kept``, some perhaps twice; ``index`` is ``kept`` on the device."""

    def put(self, replaced: Sequence[int], state: DecodeState, *, by: int) -> None:
        """Puts new rows in slots; the canvas has grown by ``by`` columns on the left."""


@dataclass(kw_only=True)
class CachedRow:
    """What the host knows of a row whose surroundings are in the cache."""

    first: int
    """Column of its first real token."""
    begin: int | None = None
    """First column of the part that its last step computed; ``None``: it has taken no step."""
    is_open: bool = False
    """Whether it has just entered a block whose first cell was still masked."""
    prompt: tuple[int, ...] = ()
    """Where its prompt stands and its tokens before the first block, to find equal ones."""


class CacheSession(Forwards):
    """The cache of one decode, for the rows that are still in it."""

    def __init__(
        self,
        backbone: Backbone,
        state: DecodeState,
        scheme: CacheScheme,
        window: Window,
        policy: CommitPolicy,
        hidden_layers: tuple[int, ...],
    ) -> None:
        super().__init__(backbone, policy, hidden_layers)
        assert isinstance(backbone, CacheableBackbone)  # see Decoder.check
        self._spec = spec = backbone.spec
        self._block_causal = spec.attention == "block"
        self._canvas = CachedCanvas(
            backbone,
            pad_mask=state.pad_mask,
            positions=canvas_positions(spec, state.ids, state.pad_mask).contiguous(),  # no view
            blocks=self._blocks(state),
            hidden_layers=hidden_layers,
            # For graphs of a few shapes. Masks would change theirs with the part that is seen.
            is_padded=backbone.graph_safe and backbone.sequences_from == 0,
        )
        self._window, self._scheme = window, scheme
        # The blocks that are refreshed: the model's own where the window goes through their parts.
        self._blocks_of: Window = window
        if scheme.in_parts:
            assert spec.block_size is not None
            self._blocks_of = BlockWindow(spec.block_size, origin=spec.block_origin)
        self._commits_first = spec.shift == 1 and scheme.commits_first
        self._rows = [CachedRow(first=first) for first in self._first_columns(state)]
        self._plans: list[WindowPlan] = []  # the forwards of the coming step, unless bucketed
        self._numbers = self._room(len(self._rows), state.ids.device)

    def _room(self, num_rows: int, device: torch.device) -> Tensor:
        """For the plan of a bucket, then first cells; as large as any, as graphs read it there."""
        size = 8 * (MOST_TOKENS + num_rows) * self._canvas.is_padded
        return torch.empty(size, dtype=torch.long, device=device)

    def prepare(self, state: DecodeState, first_mask: Sequence[int]) -> None:
        # What a step computes depends on where its rows are. The host knows that since the look, so
        # it plans before the step, and the step itself waits for nothing.
        running = [row for row, column in enumerate(first_mask) if column >= 0]
        new = [row for row in running if self._rows[row].begin is None]
        spans: dict[int, Span] = {}
        refreshed: list[int] = []
        first_cells = [-1] * len(first_mask)
        # The host waits for the ends of pipelines here, where the device has nothing to do anyway.
        ends = self._window.reach(state).tolist() if self._window.pipelined else None
        for row in running:
            end = None if ends is None else ends[row]
            found = self._span(row, first_mask[row], state, end)
            spans[row], is_refreshed, first_cells[row] = found
            refreshed += [row] * is_refreshed
        if self._spec.causal_context and refreshed:
            self._canvas.blocks = self._blocks(state)  # what has been finished is now causal
        if self._block_causal and new:
            self._run_prompts(state, new, spans)
        self.key = self._bucketed(spans, refreshed, first_cells)
        if self.key is None:
            self._plans = self._planned(spans, refreshed)
            is_forced = max(first_cells) >= 0
            self._first_cells = row_index(first_cells, state.ids.device) if is_forced else None
        self.num_forwards += 1 if self.key else len(self._plans)

    def _bucketed(
        self, spans: Mapping[int, Span], refreshed: list[int], first_cells: list[int]
    ) -> Bucket | None:
        """Plans one forward in a bucket; its numbers go to the device, to one place, together."""
        several_blocks = self._in_several_blocks(refreshed)
        found = self._canvas.is_padded and self._canvas.bucketed(
            [*spans.values()], rows=[*spans], block_causal=several_blocks
        )
        if not found:
            return None
        bucket, numbers = found
        total = len(numbers)
        part = self._numbers[: total + len(first_cells)]
        part.copy_(torch.tensor([*numbers, *first_cells]), non_blocking=True)
        self._first_cells = part[total:] if self._commits_first else None
        return bucket

    def _forward(self, state: DecodeState, ids: Tensor, columns: Tensor) -> Denoised:
        plans = self._plans
        if isinstance(self.key, Bucket):
            plans = [self._canvas.plan_of(self.key, self._numbers)]
        # Columns outside these spans keep keys, values and rows of an earlier forward.
        for plan in plans:
            self._canvas.run(ids, plan, columns=columns)
        return self._canvas.read(columns)

    def take(self, kept: Sequence[int], index: Tensor) -> None:
        self._canvas.take(index)
        if len(kept) > len(self._rows):
            self._numbers = self._room(len(kept), index.device)
        # Copies: a row that was taken twice makes room for another.
        self._rows = [replace(self._rows[row]) for row in kept]

    def put(self, replaced: Sequence[int], state: DecodeState, *, by: int) -> None:
        self._canvas.shift(by)
        self._canvas.put(
            row_index(replaced, state.ids.device),
            pad_mask=state.pad_mask,
            positions=canvas_positions(self._spec, state.ids, state.pad_mask),
            blocks=self._blocks(state),
        )
        for cached, first in zip(self._rows, self._first_columns(state), strict=True):
            cached.first = first
            if cached.begin is not None:
                cached.begin += by
        # Without a begin, the row's next step counts as entering a block, which refreshes it.
        for row in replaced:
            self._rows[row] = CachedRow(first=self._rows[row].first)

    # -- what a step computes --------------------------------------------------------------------

    def _in_several_blocks(self, refreshed: list[int]) -> bool:
        return self._block_causal and (bool(refreshed) or self._window.pipelined)

    def _span(
        self, row: int, column: int, state: DecodeState, pipeline_end: int | None
    ) -> tuple[Span, bool, int]:
        """Returns the span that a row computes, by its leftmost mask, and whether that refreshes.

        Also the first cell of a block that it enters, if the step must commit that cell, else -1.
        """
        scheme, length, cached = self._scheme, state.ids.shape[1], self._rows[row]
        begin, end = self._bounds(self._window, cached, column, state)
        block, block_end = self._bounds(self._blocks_of, cached, column, state)
        if pipeline_end is not None:
            end = block_end = pipeline_end
        # A part is computed alone only once its first cell is known.
        is_open = scheme.in_parts and (column == begin or cached.is_open)
        # If the row is still in the part of its last step, the surroundings are in the cache.
        if begin == cached.begin and not is_open:
            # A part attends to nothing after its block.
            span = scheme.step_span(begin, end, block_end if scheme.in_parts else length)
            return span, False, -1
        # Columns left of the row's previous block are final in the cache.
        final, is_new = cached.first if self._block_causal else 0, True
        if cached.begin is not None:
            final, _ = self._bounds(self._blocks_of, cached, cached.begin, state)
            is_new = block != final
        cached.begin, cached.is_open = begin, is_new and column == block
        span = scheme.refresh_span(block, block_end, final, length)
        return span, True, begin if is_new and self._commits_first else -1

    def _bounds(
        self, window: Window, cached: CachedRow, column: int, state: DecodeState
    ) -> tuple[int, int]:
        """Returns the block of a window that contains a column of a row."""
        length = state.ids.shape[1]
        return window.bounds(column, start=state.start, length=length, first=cached.first)

    def _planned(self, spans: Mapping[int, Span], refreshed: list[int]) -> list[WindowPlan]:
        """Plans the forwards of a step, of which ``refreshed`` are the rows that refresh."""
        # Rows that refresh and rows that step have spans of different widths: one forward would
        # pad all rows to the widest. Block-causal refreshes are two blocks wide at most.
        is_alike = self._block_causal or len(refreshed) in (0, len(spans))
        together = [*spans.values()]
        if is_alike or self._canvas.takes_sequences(together):
            several_blocks = self._in_several_blocks(refreshed)
            rows = None if len(spans) == len(self._rows) else [*spans]
            return [self._canvas.plan(together, rows=rows, block_causal=several_blocks)]
        others = [row for row in spans if row not in refreshed]
        return [
            self._canvas.plan([spans[row] for row in rows], rows=rows)
            for rows in (refreshed, others)
        ]

    # -- prompts ---------------------------------------------------------------------------------

    def _run_prompts(self, state: DecodeState, new: list[int], spans: dict[int, Span]) -> None:
        """Runs what comes before the first block of new rows, each distinct prompt once.

        In one forward with the others, every row would get as many queries as a prompt has tokens,
        and many prompts at once would need more memory than the rest of the decode. The spans of
        the new rows are shortened by what has run.
        """
        begins = {row: self._first_block(self._rows[row], state) for row in new}
        sources = self._sources(state, begins)
        prompts = [
            (row, Span(first, begin, begin))
            for row, begin in begins.items()
            if row not in sources and begin > (first := self._rows[row].first)
        ]
        # Prompts of similar lengths run together, since each batch of them pads to its longest.
        sizes = np.array([[span.end - span.begin, 0] for _, span in prompts]).reshape(-1, 2)
        is_first = len(new) == len(spans) and not sources and sizes.sum() <= PROMPT_TOKENS
        if is_first and not self._canvas.takes_sequences([*spans.values()]):
            return  # the forward of the step runs them
        for together in token_batches(sizes, PROMPT_TOKENS) if prompts else ():
            rows, windows = zip(*(prompts[index] for index in sorted(together)), strict=True)
            several = not self._spec.whole_prompt
            self._canvas.run(state.ids, self._canvas.plan(windows, rows=rows, block_causal=several))
            self.num_forwards += 1
        # Copied after all prompts have run: a source may itself be a new row.
        for end in {begins[row] for row in sources}:
            alike = {row: source for row, source in sources.items() if begins[row] == end}
            self._canvas.copy(alike, end)
        for row, begin in begins.items():
            spans[row] = spans[row]._replace(begin=begin)

    def _first_block(self, cached: CachedRow, state: DecodeState) -> int:
        """Where the block begins that a row's first step is in."""
        assert cached.begin is not None
        begin, _ = self._bounds(self._blocks_of, cached, cached.begin, state)
        # A prompt that is one block sees none of the response's, which may be prefilled.
        return min(begin, state.start) if self._spec.whole_prompt else begin

    def _sources(self, state: DecodeState, begins: Mapping[int, int]) -> dict[int, int]:
        """Maps each new row whose prompt another row also has to the row to copy it from."""
        ids = state.ids[row_index(list(begins), state.ids.device)].tolist()
        for (row, begin), tokens in zip(begins.items(), ids, strict=True):
            cached = self._rows[row]
            cached.prompt = (state.start - cached.first, *tokens[cached.first : begin])
        # Keys are rotated by their positions: equal tokens have equal keys only at equal positions.
        if self._spec.positions != "cumsum":  # rows may count positions otherwise
            return {}
        known: dict[tuple[int, ...], int] = {}
        for row in sorted(range(len(self._rows)), key=begins.__contains__):
            # Old rows first: their prompts are in the cache already.
            known.setdefault(self._rows[row].prompt, row)
        return {
            row: source
            for row, begin in begins.items()
            if (source := known[self._rows[row].prompt]) != row and begin > self._rows[row].first
        }

    # -- what a canvas needs to know of its rows -------------------------------------------------

    @staticmethod
    def _first_columns(state: DecodeState) -> list[int]:
        """The column of every row's first real token."""
        firsts: list[int] = (state.ids.shape[1] - 1 - state.positions[:, -1]).tolist()
        return firsts

    def _blocks(self, state: DecodeState) -> Tensor | None:
        """``(b, L)`` int64 block of every column; ``None`` if the model is not block-causal."""
        if not self._block_causal:
            return None
        blocks = attention_blocks(self._spec, state.ids, state.pad_mask, state.start)
        return blocks.expand_as(state.ids).contiguous()
