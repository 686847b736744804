"""From scored rollouts to training items and batches.

An item is what is scored together: states of a response with their targets, weights and
advantages. Items are a function of the records and a seed, on the host, so that every process
builds the same ones from the same records and only their order in batches differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dlm.backbones import BackboneSpec
from lit_dlm.losses.corruption import Autoregressive
from lit_dlm.losses.grouping import NEVER, step_groups
from lit_dlm.losses.states import Corruption, NoisyStates, Responses
from lit_dlm.losses.views import CoupledMasking, MaskedPrompt
from lit_dlm.modules.state_batch import prompt_pictures
from lit_dlm.modules.supervised_batch import (
    SupervisedBatch,
    SupervisedExample,
    TrainingRows,
    collate_supervised,
    lay_out,
    responses_of,
    row_tokens,
    whole_blocks,
)
from lit_dlm.ops.batches import TensorBatch
from lit_dlm.ops.options import one_of
from lit_dlm.trajectories.record import Trajectory

Normalise = Literal["group_mean", "response_length", "max_gen_length", "reference"]
"""What the sum over a state's tokens is divided by. ``group_mean``: the tokens that one step wrote
(the objective of arXiv:2509.06949; of a block model each block has its own step).
``response_length``: the tokens of the answer. ``max_gen_length``: the cells of a response, a
constant. ``reference``: what dLLM-RL does, the longest answer of the RL step for block models, else
the targets of a state, where it leaves the divergence undivided."""

_CHUNK = 64
"""Records whose states are drawn together: their tensors are much larger than the items."""


@dataclass(eq=False, kw_only=True)
class Units:
    """States that are scored, and what is known of their units.

    ``K`` states of ``G`` cells; ``N`` scored cells, state by state; ``M`` units, each a token with
    one log-probability: the scored cells themselves, or of views the tokens they share.
    """

    hidden: Tensor
    """``(K, G)`` bool."""
    supervised: Tensor
    """``(K, G)`` bool, ``N`` cells in all."""
    weight: Tensor
    """``(M,)`` float32 weight of each unit in the loss."""
    kl_weight: Tensor
    """``(M,)`` float32 weight of its divergence."""
    unit: Tensor | None = None
    """``(N,)`` int64 unit that each scored cell belongs to; ``None``: its own."""
    coefficient: Tensor | None = None
    """``(N,)`` float32 factor of each log-probability in the sum of its unit; with ``unit``."""
    prompt_rate: float = 0.0
    """Chance of prompt tokens to be hidden."""
    seeds: Tensor | None = None
    """``(K,)`` int64 seeds of that."""
    # What is filled in before training; (M,) floating point each.
    advantage: Tensor | None = None
    returns: Tensor | None = None
    old_log_prob: Tensor | None = None  # where there is none the ratio is 1
    old_value: Tensor | None = None
    reference: Tensor | None = None  # of the initial policy

    @property
    def num_units(self) -> int:
        """``M``."""
        return len(self.weight)


@dataclass(eq=False, kw_only=True)
class RolloutItem(Units):
    """What is scored together: one state, several packed in a row, or the views of one estimate."""

    record: int
    """Number of the record."""
    cells: Tensor
    """``(M,)`` int64 response cell of each unit."""
    size: float = 1.0
    """Rows that it stands for in a mean over rows: its states, each for those that a cap left out
    as well; the views of one estimate are one."""
    behaviour: Tensor | None = None
    """``(M,)`` log-probabilities under which the sampler drew them."""


def _supervised_of(records: Sequence[Trajectory], *, epoch: int = 0) -> list[SupervisedExample]:
    """Records as examples of a pass over them: token ids and steps."""
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
            pictures=prompt_pictures(record),
            given=record.given,
            epoch=epoch,
        )
        for record in records
    ]


class RowBuilder:
    """Turns records into items with any corruption; the trainer does not know which.

    Args:
        corruption: which states a response gives.
        spec: of the model; its block origin decides the blocks of the training rows.
        seed: base seed of the states' noise.
        num_padding: cells of fill behind an answer that may be targets; ``None`` for all
            (``post_num`` in dLLM-RL).
        normalise: see :data:`Normalise`; by default ``max_gen_length`` for block models and
            ``group_mean`` for full attention.
        copies: states of one response in one row, for block models; 1 keeps them apart.
    """

    def __init__(
        self,
        corruption: Corruption,
        spec: BackboneSpec,
        *,
        seed: int = 0,
        num_padding: int | None = 0,
        normalise: Normalise | None = None,
        copies: int = 1,
    ) -> None:
        is_block = spec.attention == "block"
        normalise = normalise or ("max_gen_length" if is_block else "group_mean")
        one_of(*get_args(Normalise), normalise=normalise)
        if copies < 1 or (copies > 1 and not is_block):
            raise ValueError(
                "packing: expected at least 1, and more than 1 only for a model with block "
                f"attention (a state with full attention is a row of its own), got {copies} for "
                f"{spec.attention} attention"
            )
        _check_corruption(corruption, spec)
        self.corruption = corruption
        self.spec = spec
        self.seed = seed
        self.num_padding = num_padding
        self.normalise = normalise
        self.copies = copies

    def batch_of(
        self, records: Sequence[Trajectory], *, epoch: int = 0
    ) -> tuple[SupervisedBatch, Responses]:
        """Records as one batch of responses, and what corruptions see of it.

        Args:
            records: at least one; responses of one length.
            epoch: pass over the records.
        """
        batch = collate_supervised(
            _supervised_of(records, epoch=epoch),
            response_length=max(record.num_generated for record in records),
            spec=self.spec,
        )
        responses = responses_of(batch, self.spec, seed=self.seed, num_padding=self.num_padding)
        return batch, responses

    def items(self, records: Sequence[Trajectory], *, epoch: int = 0) -> list[RolloutItem]:
        """All training items, record by record; states without a target are left out.

        Args:
            records: the rollouts of one RL step.
            epoch: pass over them.

        Returns:
            The items, without advantages and old log-probabilities.
        """
        longest = 1
        found: list[RolloutItem] = []
        for first in range(0, len(records), _CHUNK):
            _, responses = self.batch_of(records[first : first + _CHUNK], epoch=epoch)
            longest = max(longest, int(responses.maskable.sum(1).max()))
            states = self.corruption.states(responses)
            found += self._items(states, responses, first)
        if self.normalise == "reference" and self.spec.attention == "block":
            for item in found:  # known only now
                item.weight /= longest
                item.kl_weight /= longest
        return found

    def _items(self, states: NoisyStates, responses: Responses, first: int) -> list[RolloutItem]:
        weight, kl_weight = self._weights(states, responses)
        taken = states.supervised.any(1)
        share = states.share
        if share is None:
            share = torch.ones(len(taken), dtype=torch.float32)
        if states.view_of is not None:
            kind = states.view_of
        elif self.copies > 1:
            # Runs of at most ``copies`` states of one sample.
            kind = states.sample * len(taken) + _rank_within(states.sample, taken) // self.copies
        else:
            kind = torch.arange(len(taken))
        rows = taken.nonzero()[:, 0]
        cuts = (kind[rows].diff() != 0).nonzero()[:, 0] + 1
        items = []
        for chosen in rows.tensor_split(cuts) if len(rows) else ():
            supervised = states.supervised[chosen]
            state, cell = supervised.nonzero(as_tuple=True)
            unit, coefficient = None, None
            size = share[chosen].sum()
            cells, units = cell, (chosen[state], cell)
            if states.view_of is not None:
                assert states.coefficient is not None
                cells = supervised.any(0).nonzero()[:, 0]
                unit = torch.searchsorted(cells, cell)
                coefficient = states.coefficient[chosen][supervised]
                # The first view, which hides all, stands for the unit.
                units = (chosen[:1].expand(len(cells)), cells)
                size = share[chosen[0]]
            items.append(
                RolloutItem(
                    record=first + int(states.sample[chosen[0]]),
                    hidden=states.hidden[chosen],
                    supervised=supervised,
                    cells=cells,
                    weight=weight[units].float(),
                    kl_weight=kl_weight[units].float(),
                    size=float(size),
                    unit=unit,
                    coefficient=coefficient,
                    prompt_rate=states.prompt_rate,
                    seeds=None if states.seeds is None else states.seeds[chosen],
                )
            )
        return items

    def _weights(self, states: NoisyStates, responses: Responses) -> tuple[Tensor, Tensor]:
        """``(R, G)`` weights of policy and divergence terms."""
        supervised = states.supervised
        maskable = responses.maskable[states.sample]
        R, G = supervised.shape
        one = torch.ones(R, G, dtype=torch.float32)
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
            blocks = responses.blocks[states.sample]
            place = blocks - blocks.amin(1, keepdim=True)
            count = torch.zeros(R, int(place.max()) + 1, dtype=torch.float32)
            count.scatter_add_(1, place, supervised.float())
            weight = one / count.gather(1, place).clamp_min(1)
        undivided = self.normalise == "reference" and responses.blocks is None
        return weight, one if undivided else weight


def _check_corruption(corruption: Corruption, spec: BackboneSpec) -> None:
    if isinstance(corruption, Autoregressive):
        raise ValueError(
            "corruption: Autoregressive hides nothing, so a rollout's tokens would be scored where "
            "they can be seen; expected states with masks, such as TraceMasking"
        )
    if isinstance(corruption, MaskedPrompt) and spec.attention == "block":
        raise ValueError(
            "corruption: MaskedPrompt changes the prompt of every state, which rows of a block "
            "model share; expected a model with full attention"
        )
    noise = corruption.noise if isinstance(corruption, CoupledMasking) else corruption
    if getattr(noise, "level", "row") == "block" and spec.attention != "block":
        raise ValueError(
            "corruption.level: 'block' needs a model with block attention, got "
            f"{spec.attention} attention"
        )
    weight = inspect.signature(type(corruption).__init__).parameters.get("weight")
    if weight is not None and getattr(corruption, "weight", weight.default) != weight.default:
        raise ValueError(
            "corruption.weight: has no part in training on rollouts, whose terms "
            "objective.normalise weighs; leave it out"
        )


def _rank_within(sample: Tensor, taken: Tensor) -> Tensor:
    """Number of each taken state among those of its sample, which lie next to each other."""
    count = taken.long().cumsum(0)
    starts = torch.ones_like(taken)
    starts[1:] = sample[1:] != sample[:-1]
    before = torch.where(starts, count - taken.long(), 0).cummax(0).values
    return (count - 1 - before).clamp_min(0)


def order_of_writing(responses: Responses, *, shrink: int = 1) -> tuple[Tensor, Tensor]:
    """The distinct shrunk steps of responses in their order, over all blocks.

    Args:
        responses: steps and blocks.
        shrink: consecutive distinct steps that form one; within a block for block models. Steps
            that wrote nothing but padding count, as in the states of a decode that is replayed.

    Returns:
        ``(B, G)`` int64 numbers from 0 and ``(B, G)`` bool, the trained cells that have one.
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


def pick(values: NDArray[np.float32] | Tensor, item: RolloutItem) -> Tensor:
    """The entries of an item's units in a table of all records.

    Args:
        values: ``(num_records, G)``.
        item: the item.

    Returns:
        ``(M,)`` float32.
    """
    return torch.as_tensor(values)[item.record, item.cells].float()


@dataclass(eq=False, kw_only=True)
class RolloutBatch(Units, TensorBatch):
    """Items of one micro-batch. The loss is the sum over a full one, divided by ``num_slots``."""

    responses: SupervisedBatch
    """The distinct responses, ``G`` cells each."""
    sample: Tensor
    """``(K,)`` int64 response of each state."""
    item: Tensor
    """``(K,)`` int64 item of each state, ascending."""
    num_slots: int
    """Items of a full batch."""
    num_rows: float
    """Rows that the weights stand for: in an update as many as it has slots, however they lie."""
    is_empty: bool = False
    """Whether the RL step has nothing to learn from, so that no update may follow."""

    def states(self) -> NoisyStates:
        """The states of the batch."""
        return NoisyStates(
            sample=self.sample,
            hidden=self.hidden,
            supervised=self.supervised,
            weight=self.supervised.float(),
            per_row=False,
            prompt_rate=self.prompt_rate,
            seeds=self.seeds,
        )

    def per_unit(self, values: Tensor) -> Tensor:
        """Adds up what the scored cells of each unit say.

        Args:
            values: ``(N,)`` floating point.

        Returns:
            ``(M,)``.
        """
        if self.unit is None or self.coefficient is None:
            return values
        weighted = values * self.coefficient.to(values.dtype)
        return values.new_zeros(self.num_units).index_add(0, self.unit, weighted)


def collate_items(
    items: Sequence[tuple[RolloutItem, float]],
    records: Sequence[Trajectory],
    spec: BackboneSpec,
    *,
    num_slots: int | None = None,
    is_empty: bool = False,
) -> RolloutBatch:
    """Puts items into a batch.

    Args:
        items: at least one item, each with a factor on its weights (0 on copies that only fill a
            batch).
        records: the rollouts that items number.
        spec: of the model.
        num_slots: items of a full batch; those given by default.
        is_empty: whether the RL step has nothing to learn from.

    Returns:
        The batch, on the CPU. Of a block model, cells that no target can see are cut off.
    """
    numbers = sorted({item.record for item, _ in items})
    place = {number: at for at, number in enumerate(numbers)}
    # Without steps: the items know their states, so only the tokens are needed.
    length = _needed_length([item for item, _ in items], records, spec)
    examples = [
        replace(example, response_ids=example.response_ids[:length], steps=None)
        for example in _supervised_of([records[number] for number in numbers])
    ]
    responses = collate_supervised(examples, response_length=length, spec=spec)
    states = [len(item.hidden) for item, _ in items]
    sizes = [item.num_units for item, _ in items]
    offsets = [0, *torch.tensor(sizes).cumsum(0).tolist()]

    def joined(name: str) -> Tensor | None:
        parts = [getattr(item, name) for item, _ in items]
        return None if any(part is None for part in parts) else torch.cat(parts)

    advantage = joined("advantage")
    first = items[0][0]
    unit = None
    if first.unit is not None:  # units are numbered within an item: move each behind the one before
        pairs = zip(items, offsets[:-1], strict=True)
        unit = torch.cat([item.unit + at for (item, _), at in pairs if item.unit is not None])
    factors = torch.tensor([factor for _, factor in items]).repeat_interleave(torch.tensor(sizes))
    return RolloutBatch(
        responses=responses,
        sample=torch.tensor([place[item.record] for item, _ in items]).repeat_interleave(
            torch.tensor(states)
        ),
        item=torch.arange(len(items)).repeat_interleave(torch.tensor(states)),
        hidden=torch.cat([item.hidden[:, :length] for item, _ in items]),
        supervised=torch.cat([item.supervised[:, :length] for item, _ in items]),
        weight=torch.cat([item.weight for item, _ in items]) * factors,
        kl_weight=torch.cat([item.kl_weight for item, _ in items]) * factors,
        advantage=torch.zeros(offsets[-1], dtype=torch.float32) if advantage is None else advantage,
        num_slots=num_slots or len(items),
        num_rows=sum(item.size * factor for item, factor in items),
        unit=unit,
        coefficient=joined("coefficient"),
        seeds=joined("seeds"),
        prompt_rate=first.prompt_rate,
        old_log_prob=joined("old_log_prob"),
        reference=joined("reference"),
        returns=joined("returns"),
        old_value=joined("old_value"),
        is_empty=is_empty,
    )


def _needed_length(
    items: Sequence[RolloutItem], records: Sequence[Trajectory], spec: BackboneSpec
) -> int:
    """Response cells that take part in any prediction of a batch."""
    whole = max(records[item.record].num_generated for item in items)
    if spec.attention != "block":
        return whole
    needed = 1
    for item in items:
        last = int(item.cells[-1]) if item.unit is not None else int(item.cells.max())
        needed = max(needed, whole_blocks(last + 1, records[item.record].num_prompt, spec))
    return min(needed, whole)


def item_tokens(
    item: RolloutItem, records: Sequence[Trajectory], spec: BackboneSpec
) -> tuple[int, int]:
    """Tokens of an item's training rows by part, prompts and responses.

    Args:
        item: the item.
        records: the rollouts that items number.
        spec: of the model.
    """
    num_prompt, states = records[item.record].num_prompt, len(item.hidden)
    cells = _needed_length([item], records, spec)
    if spec.attention == "block":  # all states of an item in one row
        return row_tokens(num_prompt, cells, spec, copies=states)
    return states * num_prompt, states * cells


def training_rows(batch: RolloutBatch, spec: BackboneSpec) -> TrainingRows:
    """Lays a batch out for one forward: a row per state, or per item where states are packed.

    Args:
        batch: the batch.
        spec: of the model.

    Returns:
        The rows; their scored slots are in the order of ``batch.supervised``.
    """
    is_packed = spec.attention == "block" and len(batch.item) > int(batch.item[-1]) + 1
    item = batch.item if is_packed else None
    return lay_out(batch.responses, batch.states(), spec, item=item)
