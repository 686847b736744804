"""Turns scored rollouts into training items, batches of items, and the rows of one forward.

An item is what is scored together: one state of a response, several packed in a row, or the views
of one estimate. All items of an RL step are in one table, :class:`Items`; a batch selects some of
them (:class:`RolloutBatch`), and :func:`training_rows` lays a batch out for the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.base import Rows
from lit_dlm.tensors.batches import TensorBatch
from lit_dlm.training.batch import SupervisedBatch, SupervisedExample, collate, whole_blocks
from lit_dlm.training.bounds import BoundViews
from lit_dlm.training.layout import lay_out
from lit_dlm.training.masking import Autoregressive
from lit_dlm.training.states import NEVER, Masking, States, step_groups
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.vision.base import prompt_pictures

Normalise = Literal["group_mean", "response_length", "max_gen_length", "reference"]
"""What the sum over a state's tokens is divided by. ``group_mean``: the number of tokens that one
step wrote (the objective of arXiv:2509.06949; in a block model each block has its own step).
``response_length``: the number of tokens of the answer. ``max_gen_length``: the number of cells of
a response, a constant. ``reference``: as in dLLM-RL, the longest answer of the RL step for block
models, else the number of targets of a state, with the divergence left undivided."""

# Signal that holds the sampler's own log-probability of every token.
SAMPLED = "commit_log_prob"

# Records whose states are drawn at a time: a masking's tensors are much larger than the items.
_CHUNK = 64


@dataclass(eq=False, kw_only=True)
class Units:
    """States that are scored, and what is known about their tokens.

    There are ``K`` states of ``G`` cells, ``N`` scored cells (state by state) and ``M`` units, each
    with one log-probability. A unit is a scored cell or, with views, the token or the response that
    several scored cells share.
    """

    item: Tensor  # (K,) int64 item of each state, ascending from 0
    hidden: Tensor  # (K, G) bool
    supervised: Tensor  # (K, G) bool, N cells in all
    weight: Tensor  # (M,) float32 weight of each unit in the loss
    kl_weight: Tensor  # (M,) float32 weight of its divergence
    unit: Tensor | None = None  # (N,) int64 unit of each scored cell; None: each is a unit
    coefficient: Tensor | None = None  # (N,) float32 factor of each score in the sum of its unit
    prompt_rate: float = 0.0  # probability that a prompt token is hidden
    seeds: Tensor | None = None  # (K,) int64 seeds of that noise
    # Filled in before training; (M,) floating point each.
    advantage: Tensor | None = None
    returns: Tensor | None = None
    old_log_prob: Tensor | None = None
    old_value: Tensor | None = None
    reference: Tensor | None = None  # log-probability under the initial policy

    def per_unit(self, values: Tensor) -> Tensor:
        """Sums ``(N,)`` values of scored cells, times their coefficients, to ``(M,)`` of units."""
        if self.unit is None or self.coefficient is None:
            return values
        weighted = values * self.coefficient.to(values.dtype)
        return values.new_zeros(len(self.weight)).index_add(0, self.unit, weighted)


_FILLED = ("advantage", "returns", "old_log_prob", "old_value", "reference")


@dataclass(eq=False, kw_only=True)
class Items(Units):
    """All ``I`` items of an RL step, on the CPU.

    They follow from the records and a seed, so all processes build the same items and differ only
    in which of them their batches hold.
    """

    records: Sequence[Trajectory]
    spec: BackboneSpec  # of training rows
    record: Tensor  # (M,) int64 number of the record that each unit belongs to
    cell: Tensor  # (M,) int64 response cell of each unit
    unit_item: Tensor  # (M,) int64 item of each unit, ascending
    # (I,) float64 rows that each item counts for in a mean over rows: its states, scaled up for
    # those that a cap left out; the views of one estimate count as one row.
    size: Tensor

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(I,)`` int64 counts of states, units and scored cells up to the end of each item."""
        cells = self.unit_item if self.unit is None else self.unit_item[self.unit]
        owners = (self.item, self.unit_item, cells)
        return tuple(one.bincount(minlength=len(self)).cumsum(0) for one in owners)  # type: ignore[return-value]

    @property
    def item_record(self) -> Tensor:
        """``(I,)`` int64 record of each item."""
        return self.record[self._ends[1] - 1]

    def sampled_log_prob(self) -> Tensor:
        """Returns the ``(M,)`` float32 log-probabilities with which the sampler drew the units.

        NaN for cells that the end-of-text fill wrote, and for units of views, which the sampler
        never saw.
        """
        table = torch.full((len(self.records), self.hidden.shape[1]), torch.nan)
        if self.unit is None:
            for number, record in enumerate(self.records):
                if SAMPLED in record.signals:
                    table[number, : record.num_generated] = torch.tensor(record.signals[SAMPLED])
        return table[self.record, self.cell]

    def units(self, numbers: Tensor) -> Tensor:
        """Returns the numbers of the units of some items, item by item."""
        return _ranges(self._ends[1], numbers)[0]

    def batch(
        self,
        numbers: Tensor,
        *,
        factor: float = 1.0,
        num_slots: int | None = None,
        is_empty: bool = False,
    ) -> RolloutBatch:
        """Returns the items with ``(n,)`` int64 numbers, on the CPU, weights times ``factor``.

        For a block model, cells that no target can see are cut off.
        """
        states, per_item = _ranges(self._ends[0], numbers)
        units, _ = _ranges(self._ends[1], numbers)
        length = self._needed_length(units)
        used, sample = self.item_record[numbers].unique(return_inverse=True)
        # Without steps: the states are drawn already, so only the tokens are needed.
        examples = [
            replace(one, response_ids=one.response_ids[:length], steps=None)
            for one in _examples([self.records[number] for number in used.tolist()])
        ]
        found: dict[str, Tensor] = {
            name: value[units] for name in _FILLED if (value := getattr(self, name)) is not None
        }
        if self.unit is not None and self.coefficient is not None:
            cells, _ = _ranges(self._ends[2], numbers)
            # Units are renumbered by their position in the batch.
            number = torch.empty(len(self.cell), dtype=torch.long)
            number[units] = torch.arange(len(units))
            found |= {"unit": number[self.unit[cells]], "coefficient": self.coefficient[cells]}
        if self.seeds is not None:
            found["seeds"] = self.seeds[states]
        return RolloutBatch(
            responses=collate(
                examples, response_length=length, spec=self.spec, seed=0, num_padding=0
            ),
            sample=sample.repeat_interleave(per_item),
            item=torch.arange(len(numbers)).repeat_interleave(per_item),
            weight=self.weight[units] * factor,
            kl_weight=self.kl_weight[units] * factor,
            hidden=self.hidden[states, :length],
            supervised=self.supervised[states, :length],
            prompt_rate=self.prompt_rate,
            num_slots=num_slots or len(numbers),
            num_rows=float(self.size[numbers].sum()) * factor,
            is_empty=is_empty,
            **found,
        )

    def _needed_length(self, units: Tensor) -> int:
        """Returns how many response cells the predictions of some units depend on."""
        whole = self.hidden.shape[1]
        if self.spec.attention != "block":
            return whole
        # Where blocks end depends on the prompt's length, so each record is handled separately.
        last = torch.full((len(self.records),), -1)
        last.scatter_reduce_(0, self.record[units], self.cell[units], "amax")
        needed = [
            whole_blocks(int(last[number]) + 1, self.records[number].num_prompt, self.spec)
            for number in (last >= 0).nonzero()[:, 0].tolist()
        ]
        return min(max(needed), whole)


def _ranges(ends: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the indices in some of the ranges that end at ``ends``, and the ranges' lengths."""
    lengths = ends.diff(prepend=ends.new_zeros(1))[numbers]
    shift = ends[numbers] - lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths), lengths


def joined(parts: Sequence[Items]) -> Items:
    """Concatenates items whose responses have equally many cells."""
    num_items = num_units = 0
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        before = {"item": num_items, "unit_item": num_items, "unit": num_units}
        for name in (one.name for one in fields(part)):
            if isinstance(value := getattr(part, name), Tensor):
                value = value + before[name] if name in before else value
                found.setdefault(name, []).append(value)
        num_items, num_units = num_items + len(part), num_units + len(part.cell)
    whole: dict[str, Any] = {name: torch.cat(values) for name, values in found.items()}
    return replace(parts[0], **whole)


def _examples(records: Sequence[Trajectory], *, epoch: int = 0) -> list[SupervisedExample]:
    """Returns records as training examples of one pass over them."""
    for record in records:
        if record.superseded is not None:
            raise ValueError(
                f"{record.uid}: expected a decode that writes every token once, got one with "
                "rewritten tokens; use a policy without re-masking"
            )
    return [
        SupervisedExample(
            uid=record.uid,
            prompt_ids=record.prompt_ids,
            response_ids=record.tokens,
            steps=record.commit_step,
            pictures=prompt_pictures(record.meta, record.vocab_size),
            given=record.given,
            epoch=epoch,
        )
        for record in records
    ]


@dataclass(eq=False)
class RowBuilder:
    """Turns records into items with any masking; the trainer need not know which."""

    masking: Masking  # which states of a response are trained on
    spec: BackboneSpec  # its block origin decides where blocks of training rows begin
    _: KW_ONLY
    seed: int = 0  # of the states' noise
    num_padding: int | None = 0  # cells of fill after an answer that may be targets; None for all
    normalise: Normalise | None = None  # None: max_gen_length for block models, else group_mean
    copies: int = 1  # states of one response in one row, for block models

    def __post_init__(self) -> None:
        is_block = self.spec.attention == "block"
        if isinstance(self.masking, BoundViews) and self.normalise is not None:
            raise ValueError(
                "objective.normalise: expected null with BoundViews, whose score of a response is "
                f"a mean over its tokens, got {self.normalise!r}"
            )
        self.normalise = self.normalise or ("max_gen_length" if is_block else "group_mean")
        _check(self.masking, self.spec, self.copies)

    def responses(
        self, records: Sequence[Trajectory], *, epoch: int = 0, length: int | None = None
    ) -> SupervisedBatch:
        """Returns records as a masking sees them, with ``length`` cells (default: the most)."""
        return collate(
            _examples(records, epoch=epoch),
            response_length=length or max(record.num_generated for record in records),
            spec=self.spec,
            seed=self.seed,
            num_padding=self.num_padding,
        )

    def items(self, records: Sequence[Trajectory], *, epoch: int = 0) -> Items:
        """Returns all items of a pass over records, record by record.

        States without a target are left out; advantages and old scores are filled in later.
        """
        length = max((record.num_generated for record in records), default=0)
        longest, parts = 1, []
        for first in range(0, len(records), _CHUNK):
            chunk = records[first : first + _CHUNK]
            responses = self.responses(chunk, epoch=epoch, length=length)
            longest = max(longest, int(responses.maskable.sum(1).max()))
            states = self.masking.states(responses)
            parts.append(self._items(states, responses, records, first))
        found = joined(parts)
        if self.normalise == "reference" and self.spec.attention == "block":
            found.weight /= longest  # over all chunks, so known only now
            found.kl_weight /= longest
        return found

    def _items(
        self,
        states: States,
        responses: SupervisedBatch,
        records: Sequence[Trajectory],
        first: int,
    ) -> Items:
        """Returns the items of a chunk of records that begins at number ``first``."""
        weight, kl_weight = self._weights(states, responses)
        taken = states.supervised.any(1).nonzero()[:, 0]
        response, supervised = states.response[taken], states.supervised[taken]
        share = torch.ones(len(taken)) if states.share is None else states.share[taken]
        item = self._item_of(states, taken)
        state, cell = supervised.nonzero(as_tuple=True)
        unit_item, unit, coefficient = item[state], None, None
        size = torch.zeros(len(item.unique()), dtype=torch.float64)
        size.index_add_(0, item, share.double())
        if states.coefficient is not None:
            G = supervised.shape[1]
            if states.whole:  # the last cell represents the response
                last = torch.zeros_like(item).scatter_reduce(0, unit_item, cell, "amax")
                cell = last[unit_item]
            shared, unit = (unit_item * G + cell).unique(return_inverse=True)
            unit_item, cell = shared // G, shared % G
            coefficient = states.coefficient[taken][supervised]
            # The first view represents an item: it hides all, or all views have equal weights.
            lead = torch.searchsorted(item, torch.arange(len(size)))
            size, state = share[lead].double(), lead[unit_item]
        return Items(
            records=records,
            spec=self.spec,
            item=item,
            hidden=states.hidden[taken],
            supervised=supervised,
            record=first + response[state],
            cell=cell,
            unit_item=unit_item,
            weight=weight[taken[state], cell].float(),
            kl_weight=kl_weight[taken[state], cell].float(),
            size=size,
            unit=unit,
            coefficient=coefficient,
            prompt_rate=states.prompt_rate,
            seeds=None if states.prompt_seeds is None else states.prompt_seeds[taken],
        )

    def _item_of(self, states: States, taken: Tensor) -> Tensor:
        """Returns the ``(K,)`` int64 item of each state that is taken."""
        if states.coefficient is not None:
            kind = states.response[taken]
        elif self.copies == 1:
            return torch.arange(len(taken))
        else:  # runs of at most ``copies`` states of one sample, which lie next to each other
            _, run, lengths = states.response[taken].unique_consecutive(
                return_inverse=True, return_counts=True
            )
            number = torch.arange(len(taken)) - (lengths.cumsum(0) - lengths)[run]
            kind = run * len(taken) + number // self.copies
        return kind.unique_consecutive(return_inverse=True)[1]

    def _weights(self, states: States, responses: SupervisedBatch) -> tuple[Tensor, Tensor]:
        """Returns ``(R, G)`` weights of the policy terms and of the divergence terms."""
        supervised = states.supervised
        maskable = responses.maskable[states.response]
        R, G = supervised.shape
        one = torch.ones(R, G, dtype=torch.float32)
        if states.whole:  # policy terms are in nats per token, divergences in nats
            return one, maskable.sum(1, keepdim=True).float().expand(R, G)
        if states.share is not None:
            one = one * states.share[:, None]
        if self.normalise == "max_gen_length":
            weight = one / G
        elif self.normalise == "response_length":
            weight = one / maskable.sum(1, keepdim=True).clamp_min(1)
        elif self.normalise == "reference" and responses.blocks is not None:
            weight = one
        elif responses.blocks is None:
            weight = one / supervised.sum(1, keepdim=True).clamp_min(1)
        else:
            blocks = responses.blocks[states.response]
            number = blocks - blocks.amin(1, keepdim=True)
            count = torch.zeros(R, int(number.max()) + 1, dtype=torch.float32)
            count.scatter_add_(1, number, supervised.float())
            weight = one / count.gather(1, number).clamp_min(1)
        undivided = self.normalise == "reference" and responses.blocks is None
        return weight, one if undivided else weight


def _check(masking: Masking, spec: BackboneSpec, copies: int) -> None:
    """Refuses states that cannot be trained on with rollouts of a model."""
    weight = inspect.signature(type(masking).__init__).parameters.get("weight")
    if isinstance(masking, Autoregressive):
        raise ValueError(
            "masking: Autoregressive hides nothing, so a rollout's tokens would be scored where "
            "they can be seen; expected states with masks, such as TraceMasking"
        )
    if weight is not None and getattr(masking, "weight", weight.default) != weight.default:
        raise ValueError(
            "masking.weight: has no part in training on rollouts, whose terms "
            "objective.normalise weighs; leave it out"
        )
    if copies < 1 or (copies > 1 and spec.attention != "block"):
        raise ValueError(
            "packing: expected at least 1, and 1 with full attention (a state is a row of its "
            f"own), got {copies}"
        )


def order_of_writing(responses: SupervisedBatch, *, shrink: int = 1) -> tuple[Tensor, Tensor]:
    """Numbers the steps of each response in the order of writing, over all blocks.

    Returns ``(B, G)`` int64 numbers from 0 and ``(B, G)`` bool, the trained cells that have one.
    ``shrink`` consecutive steps (within a block, for block models) count as one; steps that wrote
    only padding are among them, as when a decode is replayed.
    """
    steps = responses.steps
    members = responses.maskable & (steps >= 0)
    key = step_groups(steps, torch.ones_like(members), shrink=shrink, segments=responses.blocks)
    key = torch.where(members, key, 0)
    if responses.blocks is not None:
        # Blocks are written one after the other.
        low = responses.blocks.amin(1, keepdim=True)
        key = key + (responses.blocks - low) * key.shape[1]
    groups = step_groups(key, members)
    return torch.where(groups == NEVER, 0, groups), members


@dataclass(eq=False, kw_only=True)
class RolloutBatch(Units, TensorBatch):
    """Items of one micro-batch. The loss is their sum divided by ``num_slots``."""

    responses: SupervisedBatch  # the distinct responses, G cells each
    sample: Tensor  # (K,) int64 response of each state
    num_slots: int  # items of a full batch
    # Rows that the weights count for; over an update they add up to the number of its slots.
    num_rows: float
    is_empty: bool = False  # the RL step has nothing to learn from, so no update may follow


def training_rows(batch: RolloutBatch, spec: BackboneSpec) -> Rows:
    """Lays out a row per state, or per item where states are packed; slots follow the states."""
    states = States(
        response=batch.sample,
        hidden=batch.hidden,
        supervised=batch.supervised,
        sample=batch.item,
        prompt_rate=batch.prompt_rate,
        prompt_seeds=batch.seeds,
    )
    return lay_out(batch.responses, states, spec)
