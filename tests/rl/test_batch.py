"""Training samples: exact states, targets that cover the response, weights by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_dlm.finetuning.d2f import RisingMasking
from lit_dlm.rl.batch import RolloutBatch, SampleBuilder, join, order_of_writing
from lit_dlm.rl.step import score_batches, shard_samples
from lit_dlm.training.masking import (
    CoupledMasking,
    CoupledViews,
    MaskedPrompt,
    RandomMasking,
    TraceMasking,
)
from lit_dlm.trajectories.record import Trajectory
from tests.rollouts import (
    EOS,
    FAMILIES,
    MASK,
    VOCAB,
    G,
    answer_cells,
    decoded,
    direct_log_probs,
    every,
    module,
    policy,
    prepared,
    token_table,
    with_old_scores,
)


def per_sample(samples: RolloutBatch, name: str) -> list[list[Any]]:
    """A value of the tokens of each sample."""
    tokens = samples.tokens
    return [getattr(tokens, name)[tokens.sample == n].tolist() for n in range(len(samples))]


BLOCKS = [name for name, family in FAMILIES.items() if family.get("attention") == "block"]
CASES = {**FAMILIES, "tokens of pictures": {"text_vocab_size": 12}}  # which are never proposed


@pytest.mark.parametrize(
    ("name", "packing"), [*((name, 1) for name in CASES), *((name, 3) for name in BLOCKS)]
)
def test_log_probs_are_those_of_the_true_states(name: str, packing: int) -> None:
    """Left padding, a short last block and end-of-text fills are among these rollouts."""
    backbone = policy(**CASES[name]).eval()
    rl = module(backbone, packing=packing)
    records = decoded(backbone, 12, per_step=1 if packing > 1 else 2)
    assert min(len(answer_cells(record)) for record in records) < G
    samples = rl.rows.samples(records)
    assert packing == 1 or samples.states.sample.bincount().max() == packing
    assert samples.size.equal(samples.states.sample.bincount().double())
    batches = shard_samples(samples.size.numpy(), batch_size=7)
    old_scores, sums = score_batches(rl, batches, samples)
    mismatch, _, count = sums.tolist()
    samples, _ = with_old_scores(rl, batches, samples)
    found = token_table(samples, "old_log_prob")
    num_sampled = 0
    atol = 1e-7 if name == "experts" else 1e-10  # routers score in float32
    for row, record in enumerate(records):
        cells = answer_cells(record)  # all of them, each once, and nothing else
        assert found[row].isfinite().nonzero()[:, 0].tolist() == cells
        expected = direct_log_probs(backbone, record)
        torch.testing.assert_close(found[row, cells], expected[cells], rtol=0, atol=atol)
        num_sampled += int(np.isfinite(record.signals["commit_log_prob"][cells]).sum())
    # What the sampler noted is the same, rounded.
    assert count == num_sampled > 20
    assert mismatch / count < 1e-6
    for (numbers, factor), old in zip(batches, old_scores, strict=True):
        batch = samples.select(numbers, factor=factor, num_slots=7)
        # The ratio is 1 at the first update, to the last bit.
        assert rl.score(batch).log_prob.equal(old.old_log_prob)


def test_reference_alignment_moves_the_blocks_of_training_rows_only() -> None:
    backbone = policy(attention="block", block_size=3).eval()
    records = [record for record in decoded(backbone, 12) if record.num_prompt % 3]
    expected = torch.stack([direct_log_probs(backbone, record) for record in records])
    differences = []
    for alignment, origin in ((None, "sequence"), ("response", "response")):
        rl = module(backbone, block_alignment=alignment)
        assert (rl.row_spec.block_origin, backbone.spec.block_origin) == (origin, "sequence")
        samples, _ = prepared(rl, records)
        found = token_table(samples, "old_log_prob")
        differences.append(float((found - expected).abs().nan_to_num().max()))
    assert differences[0] < 1e-10
    assert differences[1] > 1e-3


def trace(steps: list[int], *, tokens: list[int] | None = None, prompt: int = 2) -> Trajectory:
    values = tokens or list(range(3, 3 + len(steps)))
    return Trajectory(
        uid="one",
        prompt_ids=np.arange(3, 3 + prompt, dtype=np.int32),
        tokens=np.array(values, np.int32),
        commit_step=np.array(steps, np.int32),
        num_steps=max(steps) + 1,
        mask_id=MASK,
        vocab_size=VOCAB,
        meta={"reward": 1.0, "prompt": 0, "response": 0},
    )


def builder(masking: Any = None, *, block: bool = False, **options: Any) -> SampleBuilder:
    changes: dict[str, Any] = {"attention": "block", "block_size": 4, "block_origin": "response"}
    spec = policy(lora=False, **(changes if block else {})).spec
    return SampleBuilder(masking or TraceMasking(padding="replayed"), spec, **options)


@pytest.mark.parametrize(
    ("block", "shrink", "count"),
    [(False, 1, 7), (False, 2, 4), (False, 8, 1), (True, 1, 4), (True, 2, 2), (True, 4, 1)],
)
def test_shrinkage_counts_rows(block: bool, shrink: int, count: int) -> None:
    """Seven distinct steps, four in the first block of four cells and three in the second.

    Full attention has ceil(7 / s) rows, a block model max(ceil(4 / s), ceil(3 / s)).
    """
    record = trace([0, 3, 1, 2, 4, 6, 5, 5])
    samples = builder(TraceMasking(shrink=shrink), block=block).samples([record])
    assert len(samples) == count
    assert samples.states.supervised.sum(0).tolist() == [1] * 8


def test_padding_is_no_target_but_may_be_asked_for() -> None:
    """Three cells of answer, five of fill, two of which were written before the answer's end."""
    record = trace([1, 0, 2, 2, 0, 1, 3, 3], tokens=[5, 6, EOS, EOS, EOS, EOS, EOS, EOS])
    plain = builder().samples([record])
    # Step 3 wrote fill only: no row. Fill of earlier steps is shown as it was.
    assert per_sample(plain, "position") == [[1], [0], [2]]
    assert plain.states.hidden[1].tolist() == [True, False, True, True, False, True, True, True]
    hidden = builder(TraceMasking()).samples([record]).states.hidden[1]
    assert hidden.tolist() == [True, False, True, True, True, True, True, True]
    assert per_sample(builder(num_padding=2).samples([record]), "position") == [[1, 4], [0], [2, 3]]
    assert len(builder(num_padding=None).samples([record])) == 4


def test_weights_of_every_normalisation() -> None:
    """Groups of two, one and one token; the answer has four of eight cells."""
    record = trace([0, 0, 1, 2, 3, 3, 3, 3], tokens=[5, 6, 7, EOS, EOS, EOS, EOS, EOS])
    longer = trace([0] * 8)

    def weights(normalise: Any, *, block: bool = False) -> list[list[float]]:
        samples = builder(normalise=normalise, block=block).samples([record, longer])
        return per_sample(samples, "weight")[: int((samples.sample_response == 0).sum())]

    assert weights("group_mean") == weights(None) == [[0.5, 0.5], [1.0], [1.0]]
    assert weights("response_length") == [[0.25, 0.25], [0.25], [0.25]]
    assert weights("max_gen_length") == [[0.125, 0.125], [0.125], [0.125]]
    assert weights("max_gen_length") == weights(None, block=True)
    # dLLM-RL: full attention by targets with the divergence undivided, blocks by the longest.
    assert weights("reference") == [[0.5, 0.5], [1.0], [1.0]]
    samples = builder(normalise="reference").samples([record])
    assert per_sample(samples, "kl_weight")[0] == [1.0, 1.0]
    assert weights("reference", block=True) == [[0.125, 0.125], [0.125], [0.125]]
    # Of a block model row 0 holds step 0 of both blocks: three tokens of the first, one of the
    # second, which are divided apart.
    samples = builder(block=True, normalise="group_mean").samples([trace([0, 0, 0, 1, 2, 3, 3, 3])])
    assert per_sample(samples, "position")[0] == [0, 1, 2, 4]
    torch.testing.assert_close(samples.tokens.weight[:4], torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))


def test_states_of_one_copy_are_scored_on_one_canvas() -> None:
    """A block sees the masks of those before it, as they are in the pipeline that decodes it."""
    backbone = policy(attention="block", block_size=3).eval()
    rl = module(backbone, masking=RisingMasking())
    records = decoded(backbone)
    samples = rl.rows.samples(records)
    with torch.no_grad():
        found = rl.score(samples.select(every(samples))).log_prob
    states, tokens = samples.states, samples.tokens
    expected = torch.full_like(found, torch.nan)
    for number, (row, hidden) in enumerate(zip(states.response, states.hidden, strict=True)):
        record = records[row]
        answer = torch.from_numpy(record.tokens).long().masked_fill(hidden, MASK)
        ids = torch.cat([torch.from_numpy(record.prompt_ids).long(), answer])[None]
        with torch.no_grad():
            logits = backbone.denoise(ids, response_start=record.num_prompt).logits[0]
        own = tokens.sample == number
        cells = tokens.position[own]
        log_probs = logits[record.num_prompt + cells].log_softmax(-1)
        expected[own] = log_probs[torch.arange(len(cells)), record.tokens[cells]]
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=1e-10)


def test_a_row_cap_weighs_what_is_left() -> None:
    """Three of eight rows stand for all: their weights add up to those of eight."""
    capped = builder(TraceMasking(rows_per_sample=3, padding="replayed"))
    samples = capped.samples([trace(list(range(8)))])
    assert len(samples) == 3
    torch.testing.assert_close(samples.tokens.weight, torch.full((3,), 8 / 3))
    torch.testing.assert_close(samples.size, torch.full((3,), 8 / 3, dtype=torch.float64))


def test_views_become_one_sample_whose_scores_are_added_up() -> None:
    """In any order of the samples, and in two passes that are put together."""
    backbone = policy().eval()
    records = decoded(backbone, 6)
    rl = module(backbone, masking=CoupledViews(), seed=3)
    samples = join([rl.rows.samples(records), rl.rows.samples(records, epoch=1)])
    assert samples.sample_response.tolist() == [*range(6), *range(6)]
    assert samples.size.tolist() == [1.0] * 12
    order = every(samples).flip(0)
    log_prob = torch.empty(len(samples.tokens.position), dtype=torch.float64)
    with torch.no_grad():
        log_prob[samples.tokens_of(order)] = rl.score(samples.select(order)).log_prob
    for number, row in enumerate(samples.sample_response.tolist()):
        record, own = records[row], samples.tokens.sample == number
        assert samples.tokens.position[own].tolist() == answer_cells(record)
        expected = torch.zeros(G, dtype=torch.float64)
        coefficient = samples.coefficient[samples.tokens.sample[samples.token] == number]
        for view in (samples.states.sample == number).nonzero()[:, 0]:
            canvas = torch.tensor([*record.prompt_ids.tolist(), *record.tokens.tolist()])
            canvas[record.num_prompt :][samples.states.hidden[view]] = MASK
            with torch.no_grad():
                logits = backbone.denoise(canvas[None]).logits[0, record.num_prompt :]
            cells = samples.states.supervised[view].nonzero()[:, 0]
            factor, coefficient = coefficient[: len(cells)], coefficient[len(cells) :]
            tokens = torch.from_numpy(record.tokens.astype(np.int64))[cells]
            expected[cells] += factor * logits.log_softmax(-1)[cells, tokens]
        wanted = expected[samples.tokens.position[own]]
        torch.testing.assert_close(log_prob[own], wanted, rtol=0, atol=1e-6)


def test_masked_prompts_differ_between_passes_and_not_between_batches() -> None:
    backbone = policy().eval()
    records = decoded(backbone, 8)
    made = builder(MaskedPrompt())

    def prompts(samples: RolloutBatch, numbers: Tensor) -> list[list[int]]:
        rows = samples.select(numbers).rows()
        start = rows.response_start
        assert (rows.ids[:, start:] == MASK).all()
        return [
            ids[start - records[row].num_prompt : start].tolist()
            for ids, row in zip(rows.ids, samples.sample_response[numbers].tolist(), strict=True)
        ]

    first, second = made.samples(records), made.samples(records, epoch=1)
    alone = [prompts(first, number[None])[0] for number in every(first)]
    assert prompts(first, every(first)) == alone
    assert prompts(second, every(second)) != alone
    assert any(MASK in prompt for prompt in alone)


@pytest.mark.parametrize("masking", [RandomMasking(copies=2), CoupledMasking(level="block")])
def test_rows_do_not_depend_on_what_they_are_drawn_with(masking: Any) -> None:
    rows = builder(masking, block=True)
    records = decoded(policy(attention="block", block_size=4, block_origin="response"), 6)
    whole, part = rows.samples(records), rows.samples(records[4:5])
    assert whole.states.hidden[whole.states.response == 4].equal(part.states.hidden)


@pytest.mark.parametrize("masking", [TraceMasking(), RandomMasking(copies=4), CoupledViews()])
@pytest.mark.parametrize("block", [False, True])
def test_given_tokens_are_shown_in_every_state_and_never_predicted(
    block: bool, masking: Any
) -> None:
    """The mark behind a picture stands there before the first step."""
    record = replace(trace([2, 0, 1, -1]), given=np.array([False, False, False, True]))
    made = builder(masking, block=block)
    samples = made.samples([record])
    assert set(samples.tokens.position.tolist()) <= {0, 1, 2}
    rows = samples.select(every(samples)).rows()
    shown = (rows.targets == record.tokens[3]) & (rows.ids == rows.targets)
    assert shown.sum() == (rows.targets == record.tokens[3]).sum() > 0


def test_rewritten_tokens_are_refused() -> None:
    record = trace([0, 1, 2, 3])
    object.__setattr__(record, "superseded", np.array([[0, 1, 4]], np.int32))
    with pytest.raises(ValueError, match=r"one: expected a decode that writes .* for TraceM"):
        builder().samples([record])


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("shrink", [1, 2, 3])
def test_steps_of_returns_are_the_states_of_the_decode(name: str, shrink: int) -> None:
    """Padding that is written in steps of its own counts in both."""
    backbone = policy(**FAMILIES[name])
    rows = SampleBuilder(TraceMasking(padding="replayed", shrink=shrink), backbone.spec)
    records = decoded(backbone, 12, per_step=1)
    responses, samples = rows.responses(records), rows.samples(records)
    steps, members = order_of_writing(responses, shrink=shrink)
    blocks = torch.zeros_like(steps) if responses.blocks is None else responses.blocks
    # A state of a block model has a step of each block: (record, sample, block) is one step.
    response, position = samples.tokens.response, samples.tokens.position
    kinds = torch.stack([response, samples.tokens.sample, blocks[response, position]])
    groups = kinds.unique(dim=1, return_inverse=True)[1]
    numbers = steps[response, position]
    assert members.sum() == len(position)
    for row in range(len(records)):
        own = response == row
        found = set(zip(groups[own].tolist(), numbers[own].tolist(), strict=True))
        # One to one.
        assert sorted(number for _, number in found) == list(range(len(found)))
        assert len({group for group, _ in found}) == len(found)
