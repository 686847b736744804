"""Rows that end are replaced: what each gets does not depend on the slots or on its neighbours."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
import torch

from lit_dlm.backbones import attention
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    ConfidencePolicy,
    Decoder,
    DecodeSettings,
    DualCache,
    DynamicPolicy,
    EvenQuota,
    FixedQuota,
    NoQuota,
    PrefixCache,
    RandomPolicy,
    Sampler,
    ScheduleQuota,
    ThresholdPolicy,
    caches,
    prompt_canvas,
)
from lit_dlm.decoding.stream import DecodePrompt, Occupancy, WorkQueue, decode_stream
from tests.backbones.conftest import tiny_architecture
from tests.backbones.reference import slow_varlen_attn
from tests.decoding.states import Recorder

RESPONSE = 12
LENGTHS = [9, 8, 30, 2, 1, 7, 7, 3, 3, 31, 2, 1, 5, 4, 6, 1, 2, 12, 1, 1]
"""Prompts grow and shrink by more than an eighth of the canvas, so it must follow them."""
PROMPTS = [[5 + (7 * row + i) % 80 for i in range(length)] for row, length in enumerate(LENGTHS)]


def _backbone(options: dict[str, Any] | None = None, **changes: object) -> HFBackbone:
    torch.manual_seed(3)
    values = {"vocab_size": 97, "num_layers": 2, "num_kv_heads": 1, **changes}
    return HFBackbone(architecture=tiny_architecture(**values), **(options or {})).eval()


FULL = {"policy": ThresholdPolicy(0.15), "quota": NoQuota()}
BLOCK = {"policy": DynamicPolicy(0.15), "quota": EvenQuota(steps_per_block=4)}
CASES = {
    "plain": ({}, FULL),
    "shifted": ({"shift": 1}, FULL),
    "arange": ({"positions": "arange"}, FULL),
    "warm": ({}, {**FULL, "sampler": Sampler(temperature=1.0, top_k=9)}),
    "random": ({}, {"policy": RandomPolicy(), "quota": FixedQuota(5)}),
    "scheduled": ({}, {"policy": ConfidencePolicy(), "quota": ScheduleQuota(5)}),
    "stopped": ({}, {**FULL, "settings": DecodeSettings(eos_rule="stop", max_steps=4)}),
    "prefix": ({}, {**FULL, "window": BlockWindow(5), "cache": PrefixCache()}),
    "dual": ({"shift": 1}, {**FULL, "window": BlockWindow(5), "cache": DualCache()}),
    **{
        f"blocks of the {origin}": (
            {
                "decoder": "qwen3",
                "attention": "block",
                "block_size": 4,
                "block_origin": origin,
            },
            {**BLOCK, "window": BlockWindow(4, origin=origin), "cache": BlockCache()},
        )
        for origin in ("sequence", "response")
    },
}


def _decoded(backbone, decoder, num_slots: int, observers=()) -> dict[int, tuple]:
    found = {}
    for rows in decode_stream(
        backbone,
        decoder,
        WorkQueue(len(PROMPTS)),
        lambda number: DecodePrompt(str(number), PROMPTS[number], 100 + number),
        response_length=RESPONSE,
        batch_size=num_slots,
        observers=observers,
    ):
        result = rows.result
        for row, number in enumerate(rows.numbers):
            assert number not in found
            found[number] = (
                result.ids[row, result.start - len(PROMPTS[number]) :].tolist(),
                int(result.num_steps[row]),
                int(result.stalled_steps[row]),
                result.status[row],
                None if result.num_refreshes is None else int(result.num_refreshes[row]),
                int(result.seeds[row]),
            )
    return found


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_places_gives_the_rows_that_one_place_gives(case):
    changes, plugs = CASES[case]
    backbone, decoder = _backbone(**changes), Decoder(**plugs)
    alone = _decoded(backbone, decoder, 1)
    assert sorted(alone) == list(range(len(PROMPTS)))
    assert [ids[: len(PROMPTS[n])] for n, (ids, *_) in sorted(alone.items())] == PROMPTS
    assert len({row[1] for row in alone.values()}) > 1 or case in ("random", "scheduled")
    for num_slots in (3, 8, 64):
        assert _decoded(backbone, decoder, num_slots) == alone


@pytest.mark.parametrize("case", ["prefix", "dual"])
def test_rows_that_refresh_share_a_forward_with_others_where_attention_takes_sequences(
    case, monkeypatch
):
    changes, plugs = CASES[case]
    backbone, decoder = _backbone(**changes), Decoder(**plugs)
    expected = _decoded(backbone, decoder, 8)
    monkeypatch.setattr(attention, "_MANY_KEYS", 1)
    calls = []
    encode = backbone.encode_window

    def counted(*args, **options):
        calls.append(1)
        return encode(*args, **options)

    monkeypatch.setattr(backbone, "encode_window", counted)
    seen = Recorder()
    assert _decoded(backbone, decoder, 4, [seen]) == expected
    assert len(calls) == len(seen.records)


@pytest.mark.parametrize("many_keys", [1, 999])
@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_responses_to_one_prompt_share_its_forward(origin, many_keys, monkeypatch):
    """Four prompts, four responses each; few prompts fit into one forward.

    Two of them have the same whole blocks, but not in the same columns.
    """
    monkeypatch.setattr(attention, "_MANY_KEYS", many_keys)  # of sequences one by one, or a mask
    monkeypatch.setattr(caches, "PROMPT_TOKENS", 24)
    changes, plugs = CASES[f"blocks of the {origin}"]
    backbone = _backbone(**changes)
    plugs = {**plugs, "sampler": Sampler(temperature=1.0)}
    prompts = [prompt for prompt in PROMPTS if len(prompt) in (9, 31, 12)]
    prompts.append([*prompts[0], 7])
    tokens = []
    encode = backbone.encode_window

    def counted(ids, **options):
        tokens.append(ids.numel())
        return encode(ids, **options)

    def decoded(num_slots: int) -> dict[int, list[int]]:
        tokens.clear()
        rows = decode_stream(
            backbone,
            Decoder(**plugs),
            WorkQueue(16),
            lambda number: DecodePrompt(str(number), prompts[number // 4], number),
            response_length=RESPONSE,
            batch_size=num_slots,
        )
        return {
            number: one.result.ids[row, one.result.start :].tolist()
            for one in rows
            for row, number in enumerate(one.numbers)
        }

    monkeypatch.setattr(backbone, "encode_window", counted)
    alone = decoded(1)
    num_tokens = sum(tokens)
    assert len(set(map(tuple, alone.values()))) > 12
    for num_slots in (3, 8):
        assert decoded(num_slots) == alone
        # Of 9, 31, 12 and 10 tokens so many are in whole blocks at least.
        assert num_tokens - sum(tokens) >= 2 * (8 + 28 + 12 + 8)


@pytest.mark.parametrize("case", [name for name in CASES if "cache" in CASES[name][1]])
def test_the_kernel_for_sequences_gives_the_same_rows(case, monkeypatch: pytest.MonkeyPatch):
    """Rows drift apart, end, leave and are replaced; query heads that share keys go together."""
    monkeypatch.setattr(attention, "varlen_attn", slow_varlen_attn)
    changes, plugs = CASES[case]
    changes = {**changes, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    expected = _decoded(_backbone(**changes), Decoder(**plugs), 3)
    packed = _backbone({"attn_implementation": "varlen"}, **changes)
    assert _decoded(packed, Decoder(**plugs), 3) == expected


def test_a_place_is_filled_as_soon_as_its_row_ends():
    """20 rows of 1 to 12 steps in 4 slots: all are at work until no prompt is left."""
    backbone, occupancy, seen = _backbone(), Occupancy(), Recorder()
    found = _decoded(backbone, Decoder(**FULL), 4, [occupancy, seen])
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


def test_a_prompt_with_nothing_to_fill_ends_at_once():
    """Every third canvas comes full: it takes no step and its slot goes on to the next."""
    backbone = _backbone()
    decoder = Decoder(**FULL)
    taken = iter(range(9))

    def source(count):
        numbers = list(islice(taken, count))
        if not numbers:
            return None
        canvas = prompt_canvas(
            [PROMPTS[0]] * len(numbers), response_length=4, spec=backbone.spec, seeds=numbers
        )
        full = torch.tensor([number % 3 == 0 for number in numbers])[:, None]
        ids = torch.where(full & canvas.editable, 7, canvas.ids)
        return replace(canvas, ids=ids, editable=canvas.editable & ~full)

    results = list(decoder.queue(backbone, source, num_slots=2))
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
