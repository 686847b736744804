"""Policies that take tokens back, against loops over one row after their sources' pseudo-code."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import lit_dlm.decoding as d
from lit_dlm.backbones.base import Denoised
from lit_dlm.decoding import BlockWindow, Decoder, EvenQuota, FixedQuota, NoQuota
from tests.decoding.models import tiny_backbone
from tests.decoding.states import Recorder, as_rows_alone, decoded
from tests.fakes import EOS, MASK, PAD, TableBackbone, fake_spec, logits_for

LENGTH = 8
PROMPTS = [[4, 5, 6], [7], [8, 9], [3] * 5, [10, 4], [6, 6, 7, 5]]


class Summed(TableBackbone):
    """Logits by position and by the sum of the tokens that a cell sees, weighed by position."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(torch.zeros(1, 12))
        self.spec = fake_spec(edits_tokens=True, **spec)

    def denoise(
        self,
        ids: Tensor,
        *,
        pad_mask=None,
        columns=None,
        hidden_layers=(),
        response_start=None,
        position_ids=None,
    ) -> Denoised:
        if pad_mask is None:
            pad_mask = torch.ones_like(ids, dtype=torch.bool)
        if pad_mask.ndim == 2:
            position_ids = (pad_mask.long().cumsum(1) - 1).clamp_min(0)
            pad_mask = pad_mask[:, None, None].expand(-1, 1, ids.shape[1], -1)
        self.canvases.append(ids.clone())
        weighed = ids * (ids > PAD) * (position_ids + 1)
        total = (pad_mask[:, 0] * weighed[:, None]).sum(-1)  # (B, L)
        places = 1.3 * position_ids[..., None] + 2.1 * torch.arange(12)
        logits = 3.0 * torch.sin(0.7 * total[..., None] + places)
        logits = logits.gather(1, columns[..., None].expand(-1, -1, 12))
        logits[..., [MASK, PAD]] = -torch.inf
        return Denoised(logits=logits, columns=columns)


def probs(canvas: list[int], column: int) -> dict[int, float]:
    """The distribution of a cell by token."""
    total = sum(id_ * (place + 1) for place, id_ in enumerate(canvas) if id_ > PAD)
    at = 0.7 * total + 1.3 * column
    exps = {token: math.exp(3.0 * math.sin(at + 2.1 * token)) for token in range(2, 12)}
    return {token: exp / sum(exps.values()) for token, exp in exps.items()}


def best(canvas: list[int], column: int) -> tuple[float, int]:
    """Probability and id of the most probable token of a cell."""
    return max((prob, token) for token, prob in probs(canvas, column).items())


def blocks(prompt: list[int], size: int) -> list[range]:
    begins = range(0, LENGTH, size)
    return [range(len(prompt) + begin, len(prompt) + min(begin + size, LENGTH)) for begin in begins]


def slow_wino(prompt: list[int], size: int, low: float, high: float) -> list[list[int]]:
    """The canvas after every step; a cell is verified on the canvas without it."""
    canvas, states = [*prompt, *[MASK] * LENGTH], []
    for cells in blocks(prompt, size):
        last = 30
        while masked := [cell for cell in cells if canvas[cell] == MASK]:
            most = min(max(int(len(masked) * 0.7), 5), 20)
            guesses = {cell: best(canvas, cell) for cell in masked}
            ranked = sorted(masked, key=lambda cell: -guesses[cell][0])
            taken = [cell for cell in ranked if guesses[cell][0] > low][:most] or ranked[:1]
            backing = {
                cell: probs([*canvas[:cell], MASK, *canvas[cell + 1 :]], cell)[canvas[cell]]
                for cell in cells
                if cell not in masked
            }
            doubted = sorted((c for c in backing if backing[c] < high), key=backing.__getitem__)
            for cell in doubted[: last - 1] if len(taken) > 1 else []:
                canvas[cell] = MASK
            for cell in taken:
                canvas[cell] = guesses[cell][1]
            last = len(taken)
            states.append(list(canvas))
    return states


def slow_remdm(
    prompt: list[int], size: int, number: int, loop: int, begin: float, count: int
) -> list[list[int]]:
    """The canvas that every forward but the first one sees, and the last one."""
    canvas, states = [*prompt, *[MASK] * LENGTH], []
    for cells in blocks(prompt, size):
        kept: dict[int, float] = {}
        first, step = -(-int(len(cells) * begin) // count), 0
        while step < first + loop or any(canvas[cell] == MASK for cell in cells):
            is_in = first <= step < first + loop
            if is_in:
                for cell in sorted(kept, key=kept.__getitem__)[:number]:
                    canvas[cell] = MASK
                    del kept[cell]
            states.append(list(canvas))
            guesses = {cell: best(canvas, cell) for cell in cells if canvas[cell] == MASK}
            ranked = sorted(guesses, key=lambda cell: -guesses[cell][0])
            for cell in ranked[: number if is_in else count]:
                kept[cell], canvas[cell] = guesses[cell]
            step += 1
    return [*states[1:], canvas]


def slow_editing(
    prompt: list[int], size: int, low: float, edit: float, most: int
) -> list[list[int]]:
    """The canvas after every forward."""
    canvas, states = [*prompt, *[MASK] * LENGTH], []
    for cells in blocks(prompt, size):
        post = 0
        while True:
            masked = [cell for cell in cells if canvas[cell] == MASK]
            post += not masked
            if post > most:
                break
            guesses = {cell: best(canvas, cell) for cell in cells}
            sure = [cell for cell in masked if guesses[cell][0] > low]
            if masked and not sure:
                sure = [max(masked, key=lambda cell: guesses[cell][0])]
            edits = [
                cell
                for cell in cells
                if cell not in masked
                and guesses[cell][0] > edit
                and guesses[cell][1] != canvas[cell]
            ]
            for cell in sure + edits:
                canvas[cell] = guesses[cell][1]
            states.append(list(canvas))
            if not masked and not edits:
                break
    return states


@pytest.mark.parametrize(
    ("policy", "quota", "slow"),
    [
        (d.WINOPolicy(0.15, threshold_back=0.6), NoQuota(), lambda *r: slow_wino(*r, 0.15, 0.6)),
        (d.WINOPolicy(0.1, threshold_back=1.0), NoQuota(), lambda *r: slow_wino(*r, 0.1, 1.0)),
        (
            d.ReMDMPolicy(loop_steps=6),
            FixedQuota(),
            lambda *r: slow_remdm(*r, 1, 6, 0.875, 1),
        ),
        (
            d.ReMDMPolicy(3, loop_steps=4, loop_from=0.75),
            FixedQuota(2),
            lambda *r: slow_remdm(*r, 3, 4, 0.75, 2),
        ),
        (
            d.TokenEditingPolicy(0.3, edit_threshold=0.25),
            NoQuota(),
            lambda *r: slow_editing(*r, 0.3, 0.25, 16),
        ),
        (
            d.TokenEditingPolicy(0.2, edit_threshold=0.0, max_post_steps=3),
            NoQuota(),
            lambda *r: slow_editing(*r, 0.2, 0.0, 3),
        ),
        (
            d.TokenEditingPolicy(0.2, edit_threshold=0.25, max_post_steps=0),
            NoQuota(),
            lambda *r: slow_editing(*r, 0.2, 0.25, 0),
        ),
    ],
)
@pytest.mark.parametrize("asks", [(), ("region",)])
def test_a_padded_batch_equals_slow_loops_over_its_rows(policy, quota, slow, asks):
    """Whether or not an observer asks for the columns of later blocks."""
    num_back = 0
    for size in (2, 3, 4, LENGTH):
        recorder = Recorder(*asks)
        decoder = Decoder(policy=policy, quota=quota, window=BlockWindow(size))
        result = decoded(decoder, Summed(), PROMPTS, LENGTH, recorder)
        for row, prompt in enumerate(PROMPTS):
            states = [
                ids[result.start - len(prompt) :].tolist()
                for record in recorder.records
                for ids in record.new_ids[record.state.rows == row]
            ]
            assert states == slow(prompt, size)
            assert result.num_steps[row] == len(states) <= policy.budget(LENGTH)
            num_back += sum(
                before not in (MASK, after)
                for old, new in pairwise(states)
                for before, after in zip(old, new, strict=True)
            )
        assert result.status == ["complete"] * len(PROMPTS)
        assert not result.stalled_steps.any()
    assert num_back > 0


def test_shadows_see_the_canvas_without_their_own_cell_and_each_other():
    """A model of random weights, whose attention is written out query by query."""
    backbone, prompt = tiny_backbone(), 3
    recorder = Recorder("logits", "hidden")
    decoder = Decoder(
        policy=d.WINOPolicy(0.0, threshold_back=1.0), quota=NoQuota(), window=BlockWindow(5)
    )
    decoded(decoder, backbone, [[7, 8, 9]], LENGTH, recorder)
    spec, L = backbone.spec, prompt + LENGTH
    for record in recorder.records:
        begin = prompt + 5 * int(record.state.block)
        window = list(range(begin, min(begin + 5, L)))
        ids = torch.cat([record.state.ids, torch.full((1, len(window)), spec.mask_id)], 1)
        positions = torch.tensor([[*range(L), *window]])
        visible = torch.zeros(1, 1, L + len(window), L + len(window), dtype=torch.bool)
        for query in range(L + len(window)):
            for key in range(L + len(window)):
                is_own = query >= L and key == window[query - L]
                visible[0, 0, query, key] = not is_own if key < L else query >= L
        expected = backbone(ids, visible, positions)[0]
        columns = record.denoised.columns[0].tolist()
        for place, column in enumerate(columns):
            row = column if record.state.masked[0, column] else L + window.index(column)
            real = record.denoised.logits[0, place].isfinite()
            torch.testing.assert_close(
                record.denoised.logits[0, place][real], expected[row][real], rtol=1e-4, atol=1e-5
            )
        plain = backbone.denoise(record.state.ids, hidden_layers=(-1,))
        torch.testing.assert_close(record.proposal.hidden, plain.hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("eos_rule", ["stop", "fill"])
def test_an_answer_ends_where_its_block_is_edited_no_more(eos_rule):
    """The first step ends the text, the second one edits: without the block held it never would."""

    def table(ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, 8)
        logits[:, 2, 5] = logits[:, 3, EOS] = 9.0
        logits[:, 2, 6] = 20.0 * (ids[:, 3] == EOS)
        return logits

    backbone = TableBackbone(table, 8)
    backbone.spec = fake_spec(edits_tokens=True)
    decoder = Decoder(
        policy=d.TokenEditingPolicy(),
        quota=NoQuota(),
        window=BlockWindow(2),
        settings=d.DecodeSettings(eos_rule=eos_rule),
    )
    result = decoded(decoder, backbone, [[4, 4]], 4)
    rest = [EOS, EOS] if eos_rule == "fill" else [MASK, MASK]
    assert result.ids[0, 2:].tolist() == [6, EOS, *rest]
    status = "complete" if eos_rule == "fill" else "eos"
    assert (result.status, result.num_steps.tolist()) == ([status], [3])
    assert result.idle_steps.tolist() == [int(eos_rule == "stop")]


def test_edits_under_a_block_cache_are_those_without_it():
    changes = {"decoder": "qwen3", "attention": "block", "block_size": 4, "edits_tokens": True}
    backbone = tiny_backbone(**changes)
    policy = d.TokenEditingPolicy(0.02, edit_threshold=0.0, max_post_steps=4)
    window = BlockWindow(4, origin="sequence")
    plain, cached = (
        as_rows_alone(
            Decoder(policy=policy, quota=NoQuota(), window=window, cache=cache),
            backbone,
            [[4, 5, 6], [7], [8, 9], [10, 4, 9, 9, 9]],
            LENGTH,
        )
        for cache in (d.NoCache(), d.BlockCache())
    )
    assert torch.equal(plain.ids, cached.ids)
    assert (plain.num_steps > LENGTH // 4).any()


@pytest.mark.parametrize(
    ("spec", "components", "told"),
    [
        ({}, {"policy": d.WINOPolicy(), "cache": d.DualCache()}, "cache: .*WINOPolicy"),
        (
            {},
            {"policy": d.WINOPolicy(), "guidance": d.Guidance(1.0, [5])},
            "guidance: .*WINOPolicy",
        ),
        ({"shift": 1}, {"policy": d.WINOPolicy()}, "policy: WINOPolicy .*shift 1"),
        ({"shift": 1}, {"policy": d.ReMDMPolicy(), "cache": d.PrefixCache()}, "cache: PrefixCache"),
        (
            {"edits_tokens": False},
            {"policy": d.TokenEditingPolicy()},
            "policy: .*spec.edits_tokens",
        ),
        (
            {},
            {"policy": d.WINOPolicy(), "quota": d.BudgetQuota(4)},
            "quota: WINOPolicy .* got BudgetQuota",
        ),
    ],
)
def test_what_a_method_cannot_have_is_refused_by_name(spec, components, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        Decoder(**components).check(tiny_backbone(**spec))


def test_a_loop_outlasts_the_steps_of_a_schedule():
    """Four cells stand before the loop, whose steps are more than the schedule has."""
    policy = d.ReMDMPolicy(loop_steps=6, loop_from=0.5)
    for steps in (LENGTH, 2 * LENGTH):
        result = decoded(Decoder(policy=policy, quota=EvenQuota(steps)), Summed(), [[4, 5]], LENGTH)
        assert MASK not in result.ids
        assert result.num_steps.tolist() == [LENGTH + 6]


def test_a_gate_does_not_begin_the_loop():
    """Six of eight cells propose an end of text, which is held back until the two others stand."""
    table = logits_for([4, *[EOS] * 6, 5, 6], [0.5, *[0.9] * 6, 0.5, 0.6])
    recorder = Recorder()
    decoder = Decoder(
        policy=d.ReMDMPolicy(loop_steps=2, loop_from=0.5), settings=d.DecodeSettings(eos_gate=True)
    )
    decoded(decoder, TableBackbone(table), [[4]], LENGTH, recorder)
    written = [LENGTH - int(record.state.masked.sum()) for record in recorder.records]
    assert written == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7]


class Silent(d.CommitPolicy):
    """Rewrites without saying so."""

    def select(self, state, candidates, proposal, quota):
        return d.Selection(candidates, proposal.prob, rewritten=state.ids)


class Misspelt(d.SequentialPolicy):
    requires = frozenset({"windows"})


class Maskful(d.CommitPolicy):
    def select(self, state, candidates, proposal, quota):
        return candidates


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (Maskful(), "policy.select: expected Selection, got Tensor"),
        (Silent(), "policy: Silent .* expected takes_back = True"),
        (Misspelt(), "requires: expected some of .* got 'windows'"),
    ],
)
def test_what_a_policy_of_ones_own_says_wrongly_is_named(policy, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        decoded(Decoder(policy=policy), tiny_backbone(), [[4, 4]], 4)
