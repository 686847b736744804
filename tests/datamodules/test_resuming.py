"""Batches and updates, which any number of processes shares and a resumed run keeps."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn

from lit_dlm.datamodules.resuming import EpochPlan, FixedPlan
from lit_dlm.datamodules.supervised import SupervisedDataModule
from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from tests.finetuning.runs import Unread


def fitting(kind: str, processes: int, *rest: int) -> Any:
    """Data in a fit on so many processes; of rows with accumulation and batch size."""
    data: Any = TrajectoryDataModule("shards", num_workers=rest[0])
    if kind == "rows":
        data = SupervisedDataModule([Unread()], batch_size=rest[1])
    data.trainer = SimpleNamespace(
        world_size=processes,
        accumulate_grad_batches=rest[0] if kind == "rows" else 1,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
    )
    return data


@pytest.mark.parametrize(
    ("kind", "before", "now", "message"),
    [
        ("rows", (2, 3, 4), (2, 3, 4), None),
        ("rows", (2, 3, 4), (1, 6, 4), "processes 2, .* got processes 1,"),
        ("rows", (2, 3, 4), (2, 4, 4), "accumulate_grad_batches 3, .* got .*_grad_batches 4,"),
        ("rows", (2, 3, 4), (2, 3, 8), "batch_size 4, got .* batch_size 8"),
        ("states", (2, 3), (2, 3), None),
        ("states", (2, 3), (1, 3), "processes 2, .* got processes 1,"),
        ("states", (2, 3), (2, 0), "num_workers 3, got .* num_workers 0"),
    ],
)
def test_a_fit_goes_on_with_the_processes_and_batches_it_began_with(
    kind: str, before: tuple[int, ...], now: tuple[int, ...], message: str | None
) -> None:
    data, state = fitting(kind, *now), fitting(kind, *before).state_dict()
    if message is None:
        data.load_state_dict(state)
        return
    with pytest.raises(ValueError, match=f"ckpt_path: expected the same run .*{message}"):
        data.load_state_dict(state)


def test_an_accumulation_that_changes_is_refused() -> None:
    """Which examples come next follows from the number of updates times one accumulation."""
    data = fitting("rows", 1, 1, 4)
    data.trainer.callbacks = [GradientAccumulationScheduler({0: 1, 2: 4})]
    with pytest.raises(ValueError, match=r"trainer\.callbacks: expected one accumulate_grad_batch"):
        data.planned_training(list, np.arange(8), np.arange(8))


def plan(num: int = 40, **changes: object) -> EpochPlan:
    values: dict[str, object] = {"batch_size": 4, "seed": 0, "numbers": np.arange(num)}
    return EpochPlan(np.arange(num) // 5, **{**values, **changes})  # type: ignore[arg-type]


def indices(batches: object) -> list[list[int]]:
    return [[ref.number for ref in batch] for batch in batches]  # type: ignore[attr-defined]


def test_a_pass_shows_every_example_once_and_few_blocks_at_a_time() -> None:
    """Eight blocks of five in groups of two: every ten examples come from two blocks."""
    order = np.concatenate(plan(blocks_per_group=2).batches(0))
    assert sorted(order.tolist()) == list(range(40))
    for start in range(0, 40, 10):
        assert len({index // 5 for index in order[start : start + 10].tolist()}) == 2


@pytest.mark.parametrize("done", [0, 3, 10, 17, 25])
@pytest.mark.parametrize("lengths", [None, np.arange(40) * 7 % 40], ids=["plain", "grouped"])
def test_a_resumed_plan_continues_where_it_stopped(done: int, lengths: Any) -> None:
    """Ten batches a pass: the stream of forty, cut anywhere, goes on with the next batch."""
    whole = plan(lengths=lengths)
    stream = [whole.batch(number) for number in range(40)]
    resumed = list(plan(lengths=lengths, batches_done=lambda: done))
    assert resumed == stream[done : done + 10]


def test_passes_differ_and_are_reproducible() -> None:
    """Ten batches a pass; random parts of an example are told which one it is. Examples may have
    numbers of their own: the same order, with ``100 + 3 i`` for ``i``."""
    stream, again, other = (
        [one.batch(n) for n in range(20)] for one in (plan(), plan(), plan(seed=1))
    )
    orders = [indices(part) for part in (stream[:10], stream[10:], again[:10], other[:10])]
    assert orders[0] == orders[2]
    assert orders[1] != orders[0] != orders[3]
    assert [{ref.epoch for ref in batch} for batch in stream] == [{0}] * 10 + [{1}] * 10
    renamed = indices(plan(numbers=100 + 3 * np.arange(40)))
    assert renamed == [[100 + 3 * i for i in batch] for batch in orders[0]]


@pytest.mark.parametrize("kind", ["plain", "grouped", "few"])
def test_updates_are_the_same_for_any_number_of_processes(kind: str) -> None:
    """Six batches an update, 16 updates a pass; where there are fewer, examples are repeated."""
    lengths = np.random.default_rng(0).integers(1, 9, 400) if kind == "grouped" else None

    def made(world_size: int) -> list[list[list[int]]]:
        options: dict[str, Any] = {"world_size": world_size, "accumulate": 6 // world_size}
        num = 11 if kind == "few" else 400
        ranks = [plan(num, lengths=lengths, rank=rank, **options) for rank in range(world_size)]
        count = 2 * len(ranks[0]) * world_size
        stream = [
            [ref.number for ref in ranks[number % world_size].batch(number // world_size)]
            for number in range(count)
        ]
        return [stream[first : first + 6] for first in range(0, count, 6)]

    alone = made(1)
    assert len(alone) > 20 or (kind == "few" and len(alone) == 2)
    assert made(2) == made(3) == alone
    assert {len(batch) for batch in chain.from_iterable(alone)} == {4}
    seen = sorted(chain.from_iterable(chain.from_iterable(alone[: len(alone) // 2])))
    assert set(seen) == set(range(11)) if kind == "few" else len(set(seen)) == len(seen) > 370


@pytest.mark.parametrize(("num", "world_size"), [(10, 1), (10, 2), (7, 3), (2, 4)])
def test_fixed_plan_shows_everything_once_and_marks_the_copies(num: int, world_size: int) -> None:
    chosen = [100 + i for i in range(num)]
    options = {"batch_size": 3, "world_size": world_size}
    plans = [list(FixedPlan(chosen, rank=rank, **options)) for rank in range(world_size)]
    real = [ref.number for part in plans for batch in part for ref in batch if ref.is_real]
    assert sorted(real) == chosen
    assert len({tuple(len(batch) for batch in part) for part in plans}) == 1


def test_batches_of_similar_length_hold_what_a_pass_holds_without_them() -> None:
    """202 lengths in batches of 2: a run of 100 and one of 2 examples is sorted on its own."""
    lengths = np.random.default_rng(0).permutation(202)
    plain = plan(202, batch_size=2, seed=3)
    grouped = plan(202, batch_size=2, seed=3, lengths=lengths)
    for epoch in (0, 1):
        first, second = np.concatenate(plain.batches(epoch)), np.concatenate(grouped.batches(epoch))
        for begin in (0, 100):  # the same examples in every run
            assert sorted(first[begin : begin + 100]) == sorted(second[begin : begin + 100])
            run = np.sort(lengths[first[begin : begin + 100]]).reshape(-1, 2).tolist()
            batches = lengths[second[begin : begin + 100]].reshape(-1, 2)
            assert sorted(np.sort(batches).tolist()) == run  # neighbours in length
            assert np.any(np.diff(batches[:, 0]) < 0)  # short and long ones in turn
    assert not np.array_equal(grouped.batches(0), grouped.batches(1))
