"""Rows that end are replaced: what each gets does not depend on the slots or on its neighbours."""

from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import lit_dlm.decoding as d
from lit_dlm.backbones import attention
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import Decoder
from lit_dlm.decoding.api import Occupancy, WorkQueue, length_buckets
from tests.backbones.reference import slow_varlen_attn
from tests.decoding.cases import CASES
from tests.decoding.models import tiny_backbone
from tests.decoding.states import Arrivals, Recorder, streamed

RESPONSE = 12
LENGTHS = [9, 8, 30, 2, 1, 7, 3, 31, 2, 1, 5, 6, 12, 1, 1]
"""Prompts grow and shrink by more than an eighth of the canvas, so it must follow them."""
PROMPTS = [[5 + (7 * row + i) % 80 for i in range(length)] for row, length in enumerate(LENGTHS)]


def built(case: str) -> tuple[HFBackbone, Decoder]:
    changes, components = CASES[case]
    return tiny_backbone(**changes), Decoder(**components)


def rows(
    backbone: HFBackbone,
    decoder: Decoder,
    num_slots: int,
    *observers: Any,
    prompts: list[list[int]] = PROMPTS,
    queue: WorkQueue | None = None,
) -> dict[int, tuple]:
    """All that a prompt gets, by its number."""
    found: dict[int, tuple] = {}
    options = {"queue": queue}
    for ended in streamed(decoder, backbone, prompts, RESPONSE, num_slots, *observers, **options):
        result = ended.result
        for row, number in enumerate(ended.numbers):
            assert number not in found
            found[number] = (
                result.ids[row, result.start - len(prompts[number]) :].tolist(),
                int(result.num_steps[row]),
                int(result.stalled_steps[row]),
                result.status[row],
                int(result.seeds[row]),
            )
    return found


@cache
def alone(case: str) -> dict[int, tuple]:
    return rows(*built(case), 1)


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_places_gives_the_rows_that_one_place_gives(case):
    """Whether or not somebody looks on."""
    found = alone(case)
    assert sorted(found) == list(range(len(PROMPTS)))
    assert [ids[: len(PROMPTS[n])] for n, (ids, *_) in sorted(found.items())] == PROMPTS
    is_even = case in ("random", "scheduled", "entropy", "remdm")
    assert len({row[1] for row in found.values()}) > 1 or is_even
    assert rows(*built(case), 3) == found
    assert rows(*built(case), 64, Recorder("hidden", "region", "entropy")) == found


@pytest.mark.parametrize("case", CASES)
def test_rows_that_enter_while_others_decode_are_those_of_one_place(case):
    """The batch grows and shrinks; a prompt that is given up takes no more steps."""
    queue, found = Arrivals(len(PROMPTS), 4, abandoned=[2, 5]), {}
    while not queue.is_over:
        found |= rows(*built(case), 4, queue=queue)
    expected = alone(case)
    assert found.keys() == expected.keys()
    given_up = {number for number, row in found.items() if row != expected[number]}
    assert given_up <= {2, 5}
    assert all(found[number][1] < expected[number][1] for number in given_up)
    assert len(set(queue.at_work)) > 2


def count_windows(backbone: HFBackbone, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward over a window, from now on."""
    sizes: list[int] = []
    encode = backbone.encode

    def counted(ids, *others, **options):
        sizes.append(ids.numel())
        return encode(ids, *others, **options)

    monkeypatch.setattr(backbone, "encode", counted)
    return sizes


@pytest.mark.parametrize("case", ["prefix", "dual"])
def test_rows_that_refresh_share_a_forward_with_others_where_attention_takes_sequences(
    case, monkeypatch
):
    expected = alone(case)
    monkeypatch.setattr(attention, "_MANY_KEYS", 1)
    backbone, decoder = built(case)
    sizes, seen = count_windows(backbone, monkeypatch), Recorder()
    assert rows(backbone, decoder, 4, seen) == expected
    assert len(sizes) == len(seen.records)


@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_responses_to_one_prompt_share_its_forward(origin, monkeypatch):
    """Four prompts, four responses each; few prompts fit into one forward.

    Two of them have the same whole blocks, but not in the same columns.
    """
    monkeypatch.setattr(d.caches, "PROMPT_TOKENS", 24)
    changes, components = CASES[f"blocks of the {origin}"]
    backbone = tiny_backbone(**changes)
    decoder = Decoder(**components, sampler=d.Sampler(temperature=1.0))
    several = [prompt for prompt in PROMPTS if len(prompt) in (9, 31, 12)]
    prompts = [prompt for prompt in [*several, [*several[0], 7]] for _ in range(4)]
    sizes = count_windows(backbone, monkeypatch)
    expected = rows(backbone, decoder, 1, prompts=prompts)
    num_tokens = sum(sizes)
    assert len({tuple(ids[-RESPONSE:]) for ids, *_ in expected.values()}) > 12
    for num_slots, many_keys in ((3, 1), (8, 1), (3, 999), (8, 999)):
        # Sequences go one by one, or under a mask.
        monkeypatch.setattr(attention, "_MANY_KEYS", many_keys)
        sizes.clear()
        assert rows(backbone, decoder, num_slots, prompts=prompts) == expected
        # Of 9, 31, 12 and 10 tokens so many are in whole blocks at least.
        assert num_tokens - sum(sizes) >= 2 * (8 + 28 + 12 + 8)


@pytest.mark.parametrize("case", [name for name in CASES if "cache" in CASES[name][1]])
def test_the_kernel_for_sequences_gives_the_same_rows(case, monkeypatch: pytest.MonkeyPatch):
    """Rows drift apart, end, leave and are replaced; query heads that share keys go together."""
    monkeypatch.setattr(attention, "varlen_attn", slow_varlen_attn)
    changes, components = CASES[case]
    changes = {**changes, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    expected = rows(tiny_backbone(**changes), Decoder(**components), 3)
    assert rows(tiny_backbone("varlen", **changes), Decoder(**components), 3) == expected


def test_a_place_is_filled_as_soon_as_its_row_ends():
    """30 rows of 1 to 12 steps in 4 slots: all are at work until no prompt is left."""
    occupancy, seen = Occupancy(), Recorder()
    found = rows(*built("plain"), 4, occupancy, seen, prompts=PROMPTS * 2)
    counts = [len(record.state.rows) for record in seen.records]
    steps = sum(row[1] for row in found.values())
    assert occupancy.row_steps == steps == sum(counts)
    assert occupancy.share == pytest.approx(steps / (4 * len(counts)))
    assert counts == sorted(counts, reverse=True)
    assert counts.count(4) > 0.8 * len(counts)
    widths = [record.state.start for record in seen.records]  # the canvas follows both ways
    assert any(a < b for a, b in pairwise(widths))
    assert any(a > b for a, b in pairwise(widths))
    for record in seen.records:
        assert record.state.rows.tolist() == sorted(record.state.rows.tolist())


class EndAt(Recorder):
    """Ends the decode at a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_step(self, record: d.StepRecord) -> bool:
        super().on_step(record)
        return len(self.records) == self.step


@pytest.mark.parametrize(("case", "last"), [("plain", 6), ("dual", 20)])
def test_a_decode_that_is_ended_gives_the_rows_that_have_ended(case, last):
    """All prompts at once end at their own steps; in few slots some have been replaced by then."""
    expected = alone(case)
    for step in range(1, max(row[1] for row in expected.values())):
        found = rows(*built(case), 64, EndAt(step))
        assert found == {n: row for n, row in expected.items() if row[1] <= step}
    assert not rows(*built(case), 3, EndAt(1)).keys() - {n for n in (0, 1, 2) if expected[n][1] < 2}
    found = rows(*built(case), 3, EndAt(last))
    assert 3 < len(found) < len(PROMPTS)
    assert found.items() <= expected.items()


def test_a_prompt_with_nothing_to_fill_ends_at_once():
    """Every third canvas comes full: it takes no step and its slot goes on to the next."""
    backbone, decoder = built("plain")
    taken = iter(range(9))

    def source(count):
        numbers = list(islice(taken, count))
        if not numbers:
            return None
        canvas = d.prompt_canvas(
            [PROMPTS[0]] * len(numbers), response_length=4, spec=backbone.spec, seeds=numbers
        )
        full = torch.tensor([number % 3 == 0 for number in numbers])[:, None]
        ids = torch.where(full & canvas.editable, 7, canvas.ids)
        return replace(canvas, ids=ids, editable=canvas.editable & ~full)

    results = list(d.decode_queue(backbone, decoder, source, num_slots=2))
    steps = {
        int(seed): int(count)
        for result in results
        for seed, count in zip(result.seeds, result.num_steps, strict=True)
    }
    assert sorted(steps) == list(range(9))
    assert [steps[number] == 0 for number in range(9)] == [True, False, False] * 3


def test_a_queue_hands_out_each_number_once():
    queue = WorkQueue(5)
    assert [queue.take(2), queue.take(2), queue.take(2), queue.take(2)] == [[0, 1], [2, 3], [4], []]


def test_neighbours_in_length_share_a_bucket():
    """Sorted: 2 (index 1), 3 (3), 3 (4), 9 (0), 12 (2); at most two."""
    lengths = [9, 2, 12, 3, 3]
    assert length_buckets(lengths, batch_size=2) == [[1, 3], [4, 0], [2]]


@given(st.lists(st.integers(1, 50)), st.integers(1, 5))
def test_every_sample_is_in_one_bucket_within_the_limit(lengths, batch_size):
    buckets = length_buckets(lengths, batch_size=batch_size)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    assert all(1 <= len(bucket) <= batch_size for bucket in buckets)
