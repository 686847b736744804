"""Batches of training items, and their layout as rows for one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_dlm.backbones import BackboneSpec
from lit_dlm.backbones.visibility import position_ids_for
from lit_dlm.losses.states import NoisyStates
from lit_dlm.modules.rollout_items import RolloutItem, supervised_of
from lit_dlm.modules.supervised_batch import (
    SupervisedBatch,
    TrainingRows,
    collate_supervised,
    lay_out,
    whole_blocks,
)
from lit_dlm.ops.masking import TwoCopyLayout
from lit_dlm.ops.packing import PackedLayout
from lit_dlm.trajectories.record import Trajectory


@dataclass
class RolloutBatch:
    """Items of one optimiser micro-batch: ``S`` responses, ``R`` states, ``M`` units, ``N`` cells.

    Not frozen, so that Lightning can move it between devices.
    """

    responses: SupervisedBatch
    """The distinct responses, ``G`` cells each."""
    sample: Tensor
    """``(R,)`` int64 response of each state."""
    item: Tensor
    """``(R,)`` int64 item of each state, ascending."""
    hidden: Tensor
    """``(R, G)`` bool."""
    supervised: Tensor
    """``(R, G)`` bool, ``N`` cells."""
    weight: Tensor
    """``(M,)`` float32; the sum over a full batch's units is divided by ``num_slots``."""
    kl_weight: Tensor
    """``(M,)`` float32."""
    advantage: Tensor
    """``(M,)`` float32."""
    num_slots: int
    """Items of a full batch."""
    num_rows: float
    """Rows that the weights stand for: in an update as many as it has slots, however they lie."""
    unit: Tensor | None = None
    """``(N,)`` int64, or ``None`` where units are cells."""
    coefficient: Tensor | None = None
    """``(N,)`` float32, with ``unit``."""
    seeds: Tensor | None = None
    """``(R,)`` int64, with ``prompt_rate``."""
    prompt_rate: float = 0.0
    """Chance of prompt tokens to be hidden."""
    old_log_prob: Tensor | None = None
    """``(M,)`` float32; ``None`` where the ratio is to be 1."""
    reference: Tensor | None = None
    """``(M,)`` float32 log-probabilities of the initial policy."""
    returns: Tensor | None = None
    """``(M,)`` float32."""
    old_value: Tensor | None = None
    """``(M,)`` float32."""
    is_empty: bool = False
    """Whether the RL step has nothing to learn from, so that no update may follow."""

    @property
    def num_units(self) -> int:
        """``M``."""
        return len(self.weight)

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
    length = _needed_length([item for item, _ in items], records, spec)
    examples = [
        replace(example, response_ids=example.response_ids[:length], steps=None)
        for example in supervised_of([records[number] for number in numbers])
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
    if first.unit is not None:
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


def training_rows(batch: RolloutBatch, spec: BackboneSpec) -> TrainingRows:
    """Lays a batch out for one forward: a row per state, or per item where states are packed.

    Args:
        batch: the batch.
        spec: of the model.

    Returns:
        The rows; their scored slots are in the order of ``batch.supervised``.
    """
    if len(batch.item) == int(batch.item[-1]) + 1 or spec.attention != "block":
        return lay_out(batch.responses, batch.states(), spec)
    return _packed(batch, spec)


def _packed(batch: RolloutBatch, spec: BackboneSpec) -> TrainingRows:
    responses, device = batch.responses, batch.hidden.device
    num_items = int(batch.item[-1]) + 1
    copies = torch.bincount(batch.item, minlength=num_items)  # (I,)
    K = int(copies.max())
    first = copies.cumsum(0) - copies
    number = torch.arange(len(batch.item), device=device) - first[batch.item]
    sample = batch.sample[first]  # (I,)
    clean = responses.ids[sample]
    pad_mask = None if responses.pad_mask is None else responses.pad_mask[sample]
    assert spec.block_size is not None
    L = clean.shape[1]
    layout = PackedLayout.of(
        TwoCopyLayout.trace(
            responses.start,
            L,
            spec.block_size,
            pad_mask=pad_mask,
            origin=spec.block_origin,
            device=device,
        ),
        K,
    )
    positions = torch.arange(L, device=device).expand(num_items, -1)
    if pad_mask is not None:
        positions = position_ids_for(pad_mask, spec.positions)

    def spread(cells: Tensor) -> Tensor:  # (R, G) to (I, N)
        canvas = torch.zeros(num_items, K + 1, L, dtype=torch.bool, device=device)
        canvas[batch.item, number, responses.start :] = cells
        # The clean copy, number -1, reads the last and empty plane.
        return canvas[:, layout.copy, layout.source]

    targets = clean[:, layout.source]
    return TrainingRows(
        ids=targets.masked_fill(spread(batch.hidden), spec.mask_id),
        targets=targets,
        rows=spread(batch.supervised),
        mask=layout.visibility(copies),
        position_ids=layout.positions(positions),
        response_start=None,
    )
