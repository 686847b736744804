"""D2F's pipeline of blocks (arXiv 2508.09192): later blocks begin before earlier ones are full."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_dlm.backbones.visibility import first_column
from lit_dlm.decoding.state import DecodeState
from lit_dlm.decoding.windows import BlockWindow, WindowView
from lit_dlm.system.options import within
from lit_dlm.tensors.batches import reads_are_free
from lit_dlm.tensors.sampling import top_quota


class PipelineWindow(BlockWindow):
    """Blocks of which the next one begins once enough of the last one is written.

    A block is added when ``add_at`` of the one before is written. It commits what the policy is
    sure of, perhaps nothing; once ``full_at`` of the one before is written, it is fully active: in
    each step it commits at least its best cell (``stall_rule: top1``). With ``ThresholdPolicy``
    this is the decode of the D2F release, which commits only *above* its threshold. The release
    adds no block after an end of text, and fills those that it has. Here ``eos_rule`` ends the row
    when no mask precedes the end of text: the same text in fewer steps, as no block sees a later
    one. A last block may be cut short; the release leaves it out.

    Args:
        block_length: in tokens, as in the model's attention.
        add_at: share of the last block, above 0 (``block_add_threshold``; 0.1 to 0.9 in the
            release's evaluations).
        full_at: share of the block before (``decoded_token_threshold``).
    """

    slides = True
    pipelined = True

    def __init__(
        self, block_length: int = 32, *, add_at: float = 0.1, full_at: float = 0.95
    ) -> None:
        super().__init__(block_length)
        within("(0, 1]", add_at=add_at)  # at 0 the release adds a block in each step
        within("[0, 1]", full_at=full_at)
        self.add_at = add_at
        self.full_at = full_at

    def view(self, state: DecodeState) -> WindowView:
        L = state.ids.shape[1]
        columns = torch.arange(L, device=state.ids.device)
        begin = self._begin(first_column(state.unfinished), state.start)[:, None]
        end = self.reach(state)[:, None]
        # Of the longest pipeline, or of the whole response where asking means waiting.
        width = int((end - begin).max()) if reads_are_free(columns.device) else L
        return WindowView(
            candidates=state.masked & (columns < end),
            # A shorter pipeline repeats its last column. A row without masks may begin anywhere.
            columns=(begin + columns[: min(width, L - state.start)]).minimum(end - 1).clamp_min(0),
            block=(begin[:, 0] - state.start) // self.block_length,
            num_blocks=-(-(L - state.start) // self.block_length),
        )

    def reach(self, state: DecodeState) -> Tensor:
        # Blocks enter one after the other: a block that has just been added holds nothing yet.
        is_enough = self._written(state) >= self.add_at
        added = 1 + is_enough.long().cumprod(1).sum(1)
        return (state.start + added * self.block_length).clamp_max(state.ids.shape[1])

    def stalled(
        self, state: DecodeState, candidates: Tensor, commit: Tensor, scores: Tensor
    ) -> Tensor:
        # Here each fully active block must commit, and not only each row.
        before = F.pad(self._written(state)[:, :-1], (1, 0), value=1.0)  # the prompt is written
        is_stalled = (before >= self.full_at) & ~self._in_blocks(commit, state).any(2)
        among = self._in_blocks(candidates, state) & is_stalled[..., None]
        ranked = self._in_blocks(scores, state).flatten(0, 1)
        best = top_quota(ranked, among.flatten(0, 1), 1).view(len(commit), -1)
        return F.pad(best[:, : commit.shape[1] - state.start], (state.start, 0))

    def _written(self, state: DecodeState) -> Tensor:
        """``(b, N)`` float64: share of each block's cells that hold a token of the decode."""
        masked = self._in_blocks(state.masked, state).sum(2)
        cells = self._in_blocks(state.editable, state).sum(2)
        return torch.where(masked == 0, 1.0, (cells - masked).double() / cells)

    def _in_blocks(self, values: Tensor, state: DecodeState) -> Tensor:
        """``(b, N, block_length)``: the response of ``(b, L)`` values, zeros behind its end."""
        response = values[:, state.start :]
        missing = -response.shape[1] % self.block_length
        return F.pad(response, (0, missing)).unflatten(1, (-1, self.block_length))

    def describe(self) -> dict[str, Any]:
        names = ("block_length", "add_at", "full_at")
        return {name: getattr(self, name) for name in names}
