"""The pipeline of D2F against its algorithm, told slowly on whole canvases."""

import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.decoding import Decoder, PipelineWindow
from tests.decoding.models import in_blocks, tiny_backbone
from tests.decoding.slow_cache import slow_visibility
from tests.decoding.states import as_rows_alone, decoded, state_with_masks
from tests.fakes import EOS, TableBackbone, fake_spec, logits_for

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13, 14, 15, 16, 17]]
D2F = {**in_blocks("response"), "whole_prompt": True, "vocab_size": 40}
"""A model of 40 words: among them, probabilities are between 0.03 and 0.5."""
SURE = 0.4


@torch.no_grad()
def slow_pipeline(
    backbone: HFBackbone, prompt: list[int], *, blocks: int, add_at: float, full_at: float
) -> tuple[list[int], int, int]:
    """Response, number of forwards, and how many of them came before the text had its end.

    As the release decodes one prompt: the canvas holds the prompt and the blocks begun so far.
    """
    size = backbone.spec.block_size
    assert size is not None
    mask, ids = backbone.spec.mask_id, list(prompt)
    begun: list[int] = []  # first column of each block
    forwards, until_end = 0, None

    def share(number: int) -> float:
        cells = ids[begun[number] : begun[number] + size]
        return (size - cells.count(mask)) / size

    while True:
        has_end = any(one in backbone.spec.eos_ids for one in ids[len(prompt) :])
        is_next = not begun or share(len(begun) - 1) >= add_at
        if len(begun) < blocks and not has_end and is_next:
            begun.append(len(ids))
            ids += [mask] * size
        if mask not in ids:
            response = ids[len(prompt) :]
            return response, forwards, forwards if until_end is None else until_end
        visible = slow_visibility(len(prompt), len(ids), size)
        logits = backbone(torch.tensor([ids]), visible)[0]
        logits[:, list(backbone.spec.forbidden_ids)] = -torch.inf
        prob, token = logits.softmax(-1).max(-1)
        forwards += 1
        full = [number == 0 or share(number - 1) >= full_at for number in range(len(begun))]
        for number, begin in enumerate(begun):
            open_cells = [j for j in range(begin, begin + size) if ids[j] == mask]
            chosen = [j for j in open_cells if prob[j] > SURE]
            if full[number] and open_cells and not chosen:
                chosen = [max(open_cells, key=lambda j: float(prob[j]))]
            for j in chosen:
                ids[j] = int(token[j])
        text = ids[len(prompt) :]
        ends = [text.index(one) for one in backbone.spec.eos_ids if one in text]
        if until_end is None and ends and mask not in text[: min(ends)]:
            until_end = forwards


def pipeline(add_at: float, full_at: float, **parts: object) -> Decoder:
    window = PipelineWindow(4, add_at=add_at, full_at=full_at)
    return Decoder(policy=d.ThresholdPolicy(SURE), quota=d.NoQuota(), window=window, **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", [d.NoCache(), d.BlockCache()])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("add_at", "full_at"), [(0.1, 0.95), (0.5, 0.75), (1.0, 1.0), (0.25, 0.0)])
def test_tokens_and_steps_are_those_of_the_release(add_at, full_at, shift, cache):
    """A ragged batch, without and with the cache; no text ends early: no word is its end."""
    backbone = tiny_backbone(**D2F, shift=shift)
    result = decoded(pipeline(add_at, full_at, cache=cache), backbone, PROMPTS, 24)
    stalled = 0
    for row, prompt in enumerate(PROMPTS):
        tokens, forwards, _ = slow_pipeline(
            backbone, prompt, blocks=6, add_at=add_at, full_at=full_at
        )
        assert result.ids[row, -24:].tolist() == tokens
        assert int(result.num_steps[row]) == forwards
        stalled += int(result.stalled_steps[row])
    assert stalled > 0


def test_a_text_that_ends_is_the_releases_after_fewer_steps():
    """Word 34 ends a text here; all rows come to write it."""
    backbone = tiny_backbone(**{**D2F, "eos_ids": (34,)})
    ends = set(backbone.spec.eos_ids)
    settings = d.DecodeSettings(eos_rule="stop")
    decoder = pipeline(0.25, 0.75, cache=d.BlockCache(), settings=settings)
    result = decoded(decoder, backbone, PROMPTS, 24)
    fewer = 0
    for row, prompt in enumerate(PROMPTS):
        tokens, forwards, until_end = slow_pipeline(
            backbone, prompt, blocks=6, add_at=0.25, full_at=0.75
        )
        count = next(j for j, one in enumerate(tokens) if one in ends) + 1
        assert result.ids[row, -24:][:count].tolist() == tokens[:count]
        assert int(result.num_steps[row]) == until_end
        fewer += until_end < forwards
    assert result.status == ["eos"] * 3
    assert fewer


def test_a_gate_that_holds_back_all_of_the_first_block_stalls_no_row():
    """Cells 1 to 3 propose the end of text before the rest has been written, which is unsure."""
    ids, probs = [4, 4, 5, EOS, EOS, EOS, 6, 7, 6, 7], [0.5, 0.5, *[0.95] * 4, *[0.4] * 4]
    backbone = TableBackbone(logits_for(ids, probs, 9))
    changes = {"attention": "block", "block_size": 4, "block_origin": "response"}
    backbone.spec = fake_spec(**changes, whole_prompt=True)
    settings = d.DecodeSettings(eos_gate=True, eos_rule="fill")
    result = decoded(pipeline(0.1, 0.95, settings=settings), backbone, [[4, 4]], 8)
    assert result.ids[0, 2:].tolist() == [5, EOS, EOS, EOS, 6, 7, 6, 7]
    assert (result.status, result.num_steps.tolist(), result.idle_steps.tolist()) == (
        ["complete"], [6], [0],
    )  # fmt: skip


def test_rows_do_not_matter_and_a_last_block_may_be_cut_short():
    backbone = tiny_backbone(**D2F)
    as_rows_alone(pipeline(0.25, 0.75, cache=d.BlockCache()), backbone, PROMPTS, 10)


def test_where_a_step_may_commit_and_what_must_not_stall():
    """Blocks of 3 behind a prompt of 2: columns 2-4, 5-7, 8-10 and the short 11.

    Half of a block begins the next one. Row 0: 2 of 3 written, nothing in the second block. Row 1:
    the first block is full, 1 of 3 in the second. Row 2: 2 of 3 in the first and in the third.
    """
    window = PipelineWindow(3, add_at=0.5, full_at=1.0)
    state = state_with_masks(
        [[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 0] + [1] * 7]
    )
    view = window.view(state)
    assert window.reach(state).tolist() == [8, 8, 8]
    found = [row.nonzero()[:, 0].tolist() for row in view.candidates]
    assert found == [[4, 5, 6, 7], [6, 7], [3, 5, 6, 7]]
    assert view.columns.tolist() == [[2, 3, 4, 5, 6, 7], [5, 6, 7, 7, 7, 7], [2, 3, 4, 5, 6, 7]]
    assert view.block.tolist() == [0, 1, 0]
    assert view.num_blocks == 4
    # Nothing is committed: what is fully active takes its best, here the last cell of each block.
    scores = torch.arange(12.0).expand(3, -1)
    none = torch.zeros_like(view.candidates)
    stalled = window.stalled(state, view.candidates, none, scores)
    assert [row.nonzero()[:, 0].tolist() for row in stalled] == [[4], [7], [3]]
    # A block with a commit owes nothing.
    some = none.clone()
    some[0, 4] = some[1, 6] = True
    stalled = window.stalled(state, view.candidates, some, scores)
    assert [row.nonzero()[:, 0].tolist() for row in stalled] == [[], [], [3]]


@pytest.mark.parametrize(
    ("changes", "cache", "message"),
    [
        (D2F, d.DualCache(), "cache: DualCache is for full attention; got .*PipelineWindow"),
        (D2F, d.PrefixCache(), "cache: PrefixCache is for full attention; got .*PipelineWindow"),
        (D2F, d.SubBlockCache(), "cache: SubBlockCache is for block attention, in parts"),
        ({**D2F, "block_size": 8}, d.BlockCache(), "cache: BlockCache is for block .*block_size 8"),
        ({}, d.DualCache(), "window: PipelineWindow needs block attention"),
        (in_blocks("sequence"), d.BlockCache(), "window: .*expected BlockWindow with origin"),
    ],
)
def test_a_cache_or_model_that_no_pipeline_can_have_is_refused(changes, cache, message):
    with pytest.raises(ValueError, match=message) as error:
        decoded(pipeline(0.5, 0.9, cache=cache), tiny_backbone(**changes), PROMPTS[:1], 8)
    assert "\n" not in str(error.value)


def test_options_out_of_range_are_refused():
    for options in ({"add_at": 0.0}, {"full_at": 1.5}, {"block_length": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            PipelineWindow(**options)
