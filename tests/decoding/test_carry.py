"""What 20 ragged rows get over 5 slots, step by step: whatever carries them must not change it."""

import hashlib
import json
from dataclasses import fields, replace

import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.decoding.state import BY_COLUMN, BY_ROW
from tests.decoding.cases import CASES
from tests.decoding.models import tiny_backbone
from tests.decoding.ragged import MORE, PROMPTS, everything_of
from tests.decoding.states import streamed

DIGESTS = {
    "plain": "cbc34f87429c",
    "shifted": "dd7e1cd7b9cc",
    "arange": "cbc34f87429c",
    "warm": "c2f76c25bcb0",
    "random": "6759eacb8dd3",
    "scheduled": "afe6619e60fa",
    "entropy": "82df1a977356",
    "sliding": "e9ea62c03f99",
    "stopped": "cbc34f87429c",
    "klass": "3a280163d0e5",
    "klass, cached": "8258aeead2a9",
    "wino": "5d5ad613ae1a",
    "wino, stepped": "f9e2a33fdb43",
    "remdm": "f4be961abe2d",
    "edited": "a4376c0869c7",
    "parts of blocks": "ad8c11117bd1",
    "pipeline": "0e25bd39d26b",
    "credit": "0419a2dc25b3",
    "prefix": "6b7ce97dbffe",
    "dual": "2470cb19a8c7",
    "blocks of the sequence": "6f4bb7d50b47",
    "blocks of the response": "03d31c0cc60d",
    "fill gate cap": "7b2054743226",
    "idle": "336796ae14a8",
    "drawn 64": "17a153f67b55",
    "remdm 64": "c95563cfb664",
    "edited full": "eb8c3c3e166b",
    "guided": "7e4b5f0c3d78",
    "horizon": "c0de2d978648",
    "filled blocks": "a00f746014ba",
    "budget": "0c7ab130563d",
    "tracelock": "f3bc4f05a61a",
}


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_rows_get_what_they_always_got(case):
    found = json.dumps(everything_of(case), sort_keys=True)
    assert hashlib.sha256(found.encode()).hexdigest()[:12] == DIGESTS[case]


def test_every_field_of_a_state_that_follows_its_rows_is_listed():
    backbone, decoder = tiny_backbone(), d.Decoder(policy=d.TokenEditingPolicy())
    prompts = PROMPTS[:3]
    canvas = d.prompt_canvas(prompts, response_length=4, spec=backbone.spec, seeds=range(3))
    state = decoder.begin(backbone, canvas)
    tensors = {one.name: getattr(state, one.name) for one in fields(state)}
    shapes = {name: value.shape for name, value in tensors.items() if torch.is_tensor(value)}
    assert {name for name, shape in shapes.items() if shape == (3,)} == set(BY_ROW)
    assert {name for name, shape in shapes.items() if shape == (3, 34)} == set(BY_COLUMN)
    assert shapes.keys() - {*BY_ROW, *BY_COLUMN} == {"eos_ids", "memory"}


def test_a_row_in_a_used_slot_begins_like_one_in_a_new_slot():
    """Four of six cells stand before the first step, so WINO may take several of them back."""
    backbone = tiny_backbone()
    decoder = d.Decoder(policy=d.WINOPolicy(0.01), quota=d.NoQuota())

    def canvas_of(numbers: list[int]) -> d.Canvas:
        prompts = [PROMPTS[0]] * len(numbers)
        canvas = d.prompt_canvas(prompts, response_length=6, spec=backbone.spec, seeds=numbers)
        stand = torch.arange(canvas.ids.shape[1]) >= canvas.start + 2
        return replace(canvas, ids=torch.where(stand, 7, canvas.ids))

    taken = iter([[0], [1], [2]])
    results = list(
        d.decode_queue(backbone, decoder, lambda _: next(map(canvas_of, taken), None), num_slots=1)
    )
    alone = d.decode(backbone, decoder, canvas_of([0]))
    assert int(alone.num_steps) > 1
    assert [int(result.num_steps) for result in results] == [int(alone.num_steps)] * 3


class Counting(d.ConfidencePolicy):
    """Remembers how many steps a row has taken, and does not say what it begins with."""

    def select(self, state, candidates, proposal, quota):
        before = torch.zeros(len(state.ids), 1) if state.memory is None else state.memory
        assert torch.equal(before[:, 0], state.step.float())
        return replace(super().select(state, candidates, proposal, quota), memory=before + 1)


def test_a_policy_that_does_not_say_what_it_begins_with_finds_zeros_in_a_used_slot():
    decoder = d.Decoder(policy=Counting(), quota=d.FixedQuota(5))
    ended = streamed(decoder, tiny_backbone(), PROMPTS[:3], 12, 1)
    assert [rows.result.num_steps.tolist() for rows in ended] == [[3]] * 3
