"""The data that flows through the decode loop, from canvas to result, and observers of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_dlm.backbones.base import BackboneSpec, Denoised
from lit_dlm.decoding.regions import RegionMap
from lit_dlm.system.options import at_least
from lit_dlm.tensors.batches import row_index, shifted

Status = Literal["complete", "eos", "step_limit"]
RUNNING, COMPLETE, EOS, STEP_LIMIT, BROKEN = range(5)
"""What ``DecodeState.status`` says of a row; ``BROKEN``: a probability was not a number."""
STATUS: dict[int, Status] = {COMPLETE: "complete", EOS: "eos", STEP_LIMIT: "step_limit"}
"""How results and records call the end of a row."""


@dataclass(frozen=True)
class Canvas:
    """What a decode starts from: a batch of rows, some of whose cells may be written."""

    ids: Tensor  # (B, L) int64; cells to fill hold the mask id
    editable: Tensor  # (B, L) bool: cells that may change. prompts and prefilled cells are False
    seeds: Tensor  # (B,) int64 sample seeds
    start: int  # first column of the response region, the same in every row
    pad_mask: Tensor | None = None  # (B, L) bool, True on real tokens; None when nothing is padded
    regions: RegionMap | None = None  # the regions of a layout; None without one


def prompt_canvas(
    prompts: Sequence[Sequence[int] | Tensor],
    *,
    response_length: int,
    spec: BackboneSpec,
    seeds: Sequence[int],
    device: torch.device | str = "cpu",
) -> Canvas:
    """Left-pads prompts and appends ``response_length`` masks."""
    at_least(1, response_length=response_length)
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths)
    rows = [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=spec.pad_id, padding_side="left")
    ids = torch.nn.functional.pad(ids, (0, response_length), value=spec.mask_id)
    columns = torch.arange(ids.shape[1])
    # On the left: the response then begins in the same column in every row.
    pad_mask = columns >= (width - torch.tensor(lengths))[:, None]
    return Canvas(
        ids=ids.to(device),
        editable=(columns >= width).expand_as(ids).to(device),
        seeds=torch.tensor(list(seeds), dtype=torch.long, device=device),
        start=width,
        pad_mask=None if min(lengths) == width else pad_mask.to(device),
    )


@dataclass(frozen=True)
class DecodeState:
    """All that steps change, for the ``b`` rows that are decoding; as it is before a step."""

    ids: Tensor  # (b, L) int64 canvas, the input of this step's forward
    editable: Tensor  # (b, L) bool
    masked: Tensor  # (b, L) bool: editable cells that hold the mask id
    # Noise is drawn by sample seed, step and this position, never by slot or column: so neither the
    # batch nor the padding changes what a sample draws.
    # (b, L) int64 position within the sample, 0 at its first real token (and on padding)
    positions: Tensor
    # (b,) int64 ascending: the slot of each row, its place in the batch that the decode started
    # with; a row that replaces an ended one takes over its slot
    rows: Tensor
    seeds: Tensor  # (b,) int64 sample seeds
    step: Tensor  # (b,) int64 number of this step in the row's own decode, from 0
    start: int  # first column of the response region
    mask_id: int
    eos_ids: Tensor  # (E,) int64 ids that end an answer
    pad_mask: Tensor | None  # (b, L) bool or None
    block: Tensor  # (b,) int64 block that the row's window is in
    block_step: Tensor  # (b,) int64 steps that the row has already spent in this block
    block_masks: Tensor  # (b,) int64 candidates in the block when the row entered it
    written: Tensor  # (b, L) bool: cells that the row's previous step wrote
    kept_open: Tensor  # (b, L) bool: one column of each block that stays open even if it is full
    status: Tensor  # (b,) int64: ``RUNNING``, or how the row has ended
    budget: Tensor  # (b,) int64 most steps of the row
    num_wrote: Tensor  # (b,) int64 steps that wrote something
    num_decided: Tensor  # (b,) int64 steps that the policy decided, and not the stall rule
    num_blocks: int = 1  # blocks of the response under the current window
    regions: RegionMap | None = None  # the regions of the decoder's layout; None without one
    # (b, ...) floating point: what the policy remembers of a row's earlier steps, zeros in a new
    # row; None if it remembers nothing
    memory: Tensor | None = None
    window: Tensor | None = None  # (b, K) int64 columns of a step's window; None between steps

    @property
    def inside(self) -> Tensor:
        """``(b, L)`` bool: cells of the window."""
        assert self.window is not None
        return torch.zeros_like(self.masked).scatter_(1, self.window, True)

    @property
    def standing(self) -> Tensor:
        """``(b, L)`` bool: cells of the window that hold a token of this decode."""
        return self.inside & self.editable & ~self.masked

    @property
    def unfinished(self) -> Tensor:
        """``(b, L)`` bool cells by which windows are placed: masked, or one of each open block."""
        return self.masked | self.kept_open

    def take(self, index: Tensor) -> DecodeState:
        """Returns the state of the rows ``index``, ``(n,)`` int64."""
        parts: dict[str, Any] = {
            name: value[index]
            for name in (*BY_ROW, *BY_COLUMN, "memory", "regions")
            if (value := getattr(self, name)) is not None
        }
        # A window is that of a step, which is over.
        return replace(self, window=None, **parts)

    def put(self, index: Tensor, entering: DecodeState) -> DecodeState:
        """Returns the state with the rows ``(n,)`` int64 replaced by others of the same length."""
        parts: dict[str, Any] = {
            # Copies, since records of earlier steps still refer to the old tensors.
            name: old.index_copy(0, index, getattr(entering, name))
            for name in (*BY_ROW, *BY_COLUMN)
            if (old := getattr(self, name)) is not None
        }
        if self.memory is not None:
            new = entering.memory
            if new is None:  # a policy from outside need not say what it begins with
                new = torch.zeros_like(self.memory[index])
            parts["memory"] = self.memory.index_copy(0, index, new)
        if self.regions is not None and entering.regions is not None:
            ids = self.regions.ids.index_copy(0, index, entering.regions.ids)
            parts["regions"] = replace(self.regions, ids=ids)
        return replace(self, window=None, **parts)

    def shifted(self, by: int, *, pad_id: int) -> DecodeState:
        """Returns the same rows with ``by`` more columns of left padding, or fewer if negative."""
        if by == 0:
            return self
        pad_mask = torch.ones_like(self.masked) if self.pad_mask is None else self.pad_mask
        padded = replace(self, pad_mask=pad_mask)
        columns: dict[str, Any] = {
            name: shifted(getattr(padded, name), by, pad_id if name == "ids" else 0)
            for name in BY_COLUMN
        }
        regions = self.regions
        if regions is not None:
            # New columns count as the rest of the response, like those of all prompts.
            regions = replace(regions, ids=shifted(regions.ids, by, len(regions) - 1))
        return replace(self, **columns, regions=regions, start=self.start + by, window=None)

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by name; of the regions, the numbers of their cells."""
        values = {**vars(self), "regions": self.regions and self.regions.ids}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def copied(self, names: Collection[str]) -> DecodeState:
        """Returns the same state with these tensors in memory of their own."""
        copies: dict[str, Any] = {
            name: value.clone() for name, value in self.tensors().items() if name in names
        }
        if self.regions is not None and "regions" in copies:
            copies["regions"] = replace(self.regions, ids=copies["regions"])
        return replace(self, **copies)


BY_ROW = (
    *("rows", "seeds", "step", "budget", "status", "block", "block_step", "block_masks"),
    *("num_wrote", "num_decided"),
)
"""Fields of a state with one number for each row, ``(b,)``."""
BY_COLUMN = ("ids", "editable", "masked", "positions", "written", "kept_open", "pad_mask")
"""Fields of a state with a value for each column of each row, ``(b, L)``."""
BY_STEP = (
    *("ids", "masked", "written", "kept_open", "step", "status", "num_wrote", "num_decided"),
    *("block", "block_step", "block_masks"),
)
"""Fields that every step changes; a policy may change ``memory``, too."""


def initial_state(spec: BackboneSpec, canvas: Canvas) -> DecodeState:
    """Returns the state before step 0, for a policy that needs a step for each mask at most."""
    ids, device = canvas.ids, canvas.ids.device
    # The model would see a mask there in every step, and no step would fill it.
    stray = (ids == spec.mask_id) & ~canvas.editable
    if bool(stray.any()):
        row, column = stray.nonzero()[0].tolist()
        raise ValueError(
            f"canvas: row {row}, column {column} holds the mask id {spec.mask_id} but may not be "
            "written; a prompt must not contain the mask token"
        )
    # Counted from the first real token. Without padding there is no mask at all, since attention
    # without one takes faster kernels.
    if canvas.pad_mask is None:
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
    else:
        positions = (canvas.pad_mask.long().cumsum(1) - 1).clamp_min(0)
    masked = canvas.editable & (ids == spec.mask_id)
    # Every field has its value from the start, so that new rows and those of a running batch can be
    # joined field by field.
    zeros = torch.zeros(len(ids), dtype=torch.long, device=device)
    return DecodeState(
        ids=ids,
        editable=canvas.editable,
        masked=masked,
        positions=positions,
        rows=torch.arange(len(ids), device=device),
        seeds=canvas.seeds,
        step=zeros,
        start=canvas.start,
        mask_id=spec.mask_id,
        eos_ids=torch.tensor(spec.eos_ids, device=device),
        pad_mask=canvas.pad_mask,
        block=zeros - 1,
        block_step=zeros,
        block_masks=zeros,
        written=torch.zeros_like(masked),
        kept_open=torch.zeros_like(masked),
        status=(~masked.any(1)).long() * COMPLETE,
        budget=masked.sum(1),
        num_wrote=zeros,
        num_decided=zeros,
        regions=canvas.regions,
    )


@dataclass(frozen=True)
class Proposal:
    """What the model would write, for the columns that were denoised (0 elsewhere)."""

    ids: Tensor  # (b, L) int64 proposed tokens
    prob: Tensor  # (b, L) floating point: probability of the proposed token (confidence)
    entropy: Tensor | None = None  # (b, L) nats, if required
    # (b, L) gap between the two largest probabilities, if required
    margin: Tensor | None = None
    # (b, L, H, D) aligned hidden snapshots, if required
    hidden: Tensor | None = None
    # (b, L) probability with which the token was drawn: after temperature and filters, whatever
    # prob is read from; if required
    drawn: Tensor | None = None
    # (b, L), like raw_entropy and raw_margin: the score under the model's own distribution, at
    # temperature 1 and unfiltered, whatever prob, entropy and margin are read from; if required.
    # Learned heads see these. A policy's ``remember`` (CreditPolicy) may have changed the logits
    raw_prob: Tensor | None = None
    raw_entropy: Tensor | None = None
    raw_margin: Tensor | None = None


@dataclass(frozen=True)
class Selection:
    """A policy's answer: which candidates become final, and how it ranks them."""

    commit: Tensor  # (b, L) bool, a subset of the candidates
    # (b, L) floating point, higher is surer: for the cap and the stall rule. For a written token
    # that may be taken back, the signed distance to the boundary, positive where it is kept
    scores: Tensor
    # (b, L) int64: what the written cells of the window hold after the step, the mask id where a
    # token is taken back. None in a policy that keeps what it wrote; otherwise the policy itself
    # must ensure progress, as the stall rule does not apply
    rewritten: Tensor | None = None
    # (b,) bool: rows that stay in their block even if it is full; None: no row does
    keep_block_open: Tensor | None = None
    memory: Tensor | None = None  # new memory of the state; None changes nothing


@dataclass(frozen=True)
class StepRecord:
    """One finished step, as observers see it."""

    state: DecodeState
    proposal: Proposal
    candidates: Tensor  # (b, L) bool
    commit: Tensor  # (b, L) bool: cells written with the proposal in this step
    scores: Tensor  # (b, L) the policy's scores
    new_ids: Tensor  # (b, L) int64 canvas after the step (an end-of-text fill included)
    denoised: Denoised | None = None  # the forward of the step, if logits are required

    def take(self, index: Tensor) -> StepRecord:
        """Returns the step of the rows ``index``, ``(n,)`` int64."""
        # What a policy remembers may be large, and observers have no use for it.
        window, before = self.state.window, replace(self.state, memory=None)
        state = replace(before.take(index), window=None if window is None else window[index])
        return replace(_taken(self, index), state=state)


def _taken(values: Any, index: Tensor) -> Any:
    """Returns a data class of tensors, and of others such, with the rows ``(n,)`` of each."""
    parts: dict[str, Any] = {
        name: value[index] if isinstance(value, Tensor) else _taken(value, index)
        for name, value in vars(values).items()
        if isinstance(value, Tensor | Proposal | Denoised)
    }
    return replace(values, **parts)


@dataclass(frozen=True)
class DecodeResult:
    """The outcome of rows that have ended."""

    ids: Tensor  # (B, L) int64 final canvas; cells never written hold the mask id
    rows: list[int]  # the slot of each row in the batch
    start: int  # first column of the response region
    seeds: Tensor  # (B,) int64
    num_steps: Tensor  # (B,) int64 forwards of the backbone in which the row took part (its NFE)
    idle_steps: Tensor  # (B,) int64 of these steps that wrote nothing
    stalled_steps: Tensor  # (B,) int64 steps in which the stall rule had to commit for the policy
    policy_forwards: Tensor  # (B,) int64 forwards of a learned policy head
    # (B,) float64 on the CPU, wall time: each step's time is shared equally by its rows
    seconds: Tensor
    status: list[Status]  # complete: no mask left; eos: stopped at an end of text; step_limit
    prefilled: Tensor  # (B, L) bool: cells that could not be written
    # Calls of the backbone for the batch so far. A step is one, or two if some rows of a batch
    # refresh a prefix or dual cache and others do not; no row takes part in both. Prompts may add
    # some under a block cache
    num_forwards: int
    # (B,) float64 on the CPU: the part of seconds that the policy took to select; 0 where steps are
    # CUDA graphs, inside of which nothing can be timed
    policy_seconds: Tensor

    @staticmethod
    def joined(results: Sequence[DecodeResult], *, pad_id: int) -> DecodeResult:
        """Joins results one after the other, left-padded to the longest prompts among them."""
        # Padding at the front, as on a canvas, so that responses stay in one place.
        start = max(one.start for one in results)
        parts: dict[str, Any] = {
            name: torch.cat([getattr(one, name) for one in results]) for name in _COUNTS
        }
        for name, fill in (("ids", pad_id), ("prefilled", 1)):
            parts[name] = torch.cat(
                [shifted(getattr(one, name), start - one.start, fill) for one in results]
            )
        rows = [row for one in results for row in one.rows]
        status = [status for one in results for status in one.status]
        return replace(results[-1], start=start, rows=rows, status=status, **parts)

    def by_slot(self) -> DecodeResult:
        """Returns the same rows in the order of their slots."""
        order = sorted(range(len(self.rows)), key=self.rows.__getitem__)
        parts: dict[str, Any] = {}
        for name in (*_COUNTS, "ids", "prefilled"):
            value = getattr(self, name)
            parts[name] = value[row_index(order, value.device)]
        rows, status = [self.rows[row] for row in order], [self.status[row] for row in order]
        return replace(self, rows=rows, status=status, **parts)


_COUNTS = (
    *("seeds", "num_steps", "idle_steps", "stalled_steps", "policy_forwards"),
    *("seconds", "policy_seconds"),
)


class Observer(Protocol):
    """Something that watches every step: capture, metrics, animation."""

    requires: frozenset[str]
    """What the loop must provide, see :class:`~lit_dlm.decoding.policies.base.CommitPolicy`. Read
    before every step, so it may change from step to step; only ``hidden`` must be in it from the
    start. ``logits`` keeps the forward of a step in its record."""

    def on_start(self, state: DecodeState) -> None:
        """Called once, with the state before the first step, whose tensors are the steps' own."""
        ...

    def on_step(self, record: StepRecord) -> bool | None:
        """Called after each step. Must not synchronise with the device.

        The tensors of a record are valid until the next step: whoever keeps some copies them.
        Returning True ends the decode: rows that have not ended are dropped.
        """
        ...

    def on_end(self, result: DecodeResult) -> None:
        """Called once, with the result of the rows that have not been replaced."""
        return  # most observers have nothing to do here


class QueueObserver(Observer, Protocol):
    """Observer that can follow a decode whose rows are replaced as they end."""

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        """Called when rows that have ended are replaced by others, before the next step.

        Args:
            state: the rows that take over the slots ``state.rows``, before their first step. The
                slots of ``result`` that are not among them stay empty.
        """
        return  # most observers have nothing to do here
