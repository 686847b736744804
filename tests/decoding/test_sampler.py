import math
from itertools import product

import pytest
import torch

from lit_dlm.backbones.base import Denoised
from lit_dlm.decoding import Proposal, Sampler, sampler as module
from lit_dlm.tensors.sampling import RUN, cell_gumbel_noise, gumbel_noise, keep_top_k, keep_top_p
from tests.decoding.states import state_with_masks
from tests.fakes import PeakMemory


def test_draws_follow_the_temperature():
    """p ~ (4, 2, 1) ** (1 / T): at T = 2 this is (2, 1.414, 1) / 4.414."""
    state = state_with_masks([[1] * 4000])
    logits = torch.tensor([[4.0, 2.0, 1.0]]).log().expand(1, 4000, 3)
    denoised = Denoised(logits=logits, columns=torch.arange(2, 4002)[None])
    drawn = Sampler(temperature=2.0).propose(state, denoised, frozenset())
    assert drawn.entropy is drawn.margin is None  # nobody asked
    shares = torch.bincount(drawn.ids[0, 2:], minlength=3) / 4000
    expected = torch.tensor([2.0, math.sqrt(2.0), 1.0]) / (3.0 + math.sqrt(2.0))
    # Standard error at most 0.008.
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0.0)


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"allowed_ids": (5, 5)}]
)
def test_bad_settings_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampler(**settings)


def _slow(sampler: Sampler, state, denoised: Denoised) -> Proposal:
    """All cells at once over the whole vocabulary, whatever is masked."""
    raw = denoised.logits.float()
    filtered = raw if sampler.temperature in (0.0, 1.0) else raw / sampler.temperature
    if sampler.top_p is not None:
        filtered = keep_top_p(filtered, sampler.top_p)
    if sampler.top_k is not None:
        filtered = keep_top_k(filtered, sampler.top_k)
    noisy = filtered.double()
    if sampler.temperature > 0.0:
        positions = state.positions.gather(1, denoised.columns)
        tokens = torch.arange(raw.shape[-1])
        noisy = noisy + gumbel_noise(state.seeds, state.step, positions, tokens)
    ids = noisy.argmax(-1)
    if sampler.temperature > 0.0 and raw.shape[-1] > RUN and filtered.isfinite().all():
        for place in product(*map(range, ids.shape)):
            position = state.positions[place[0], denoised.columns[place]]
            key = state.seeds[place[0]], state.step[place[0]], position
            noise = cell_gumbel_noise(*(part[None] for part in key), 2 * RUN)[0]
            runs = filtered[place].double().split(RUN)
            weights = [float(run.logsumexp(0) + noise[RUN + at]) for at, run in enumerate(runs)]
            best = weights.index(max(weights))
            ids[place] = best * RUN + (runs[best] + noise[: len(runs[best])]).argmax()

    def scores(logits):
        probs = logits.softmax(-1)
        top = probs.topk(2, dim=-1).values
        picked = probs.gather(-1, ids[..., None])[..., 0]
        return picked, torch.special.entr(probs).sum(-1), top[..., 0] - top[..., 1]

    used, own = scores(filtered if sampler.score_on == "filtered" else raw), scores(raw)
    return Proposal(ids, *used, None, scores(filtered)[0], *own)


ALL_SCORES = ("prob", "entropy", "margin", "drawn", "raw_prob", "raw_entropy", "raw_margin")


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("score_on", ["raw", "filtered"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9}])
@pytest.mark.parametrize("vocab_size", [40, 3000])
def test_proposals_are_those_of_a_slow_loop_over_the_whole_vocabulary(
    monkeypatch, vocab_size, temperature, score_on, filters
):
    """Seven cells, two at a time; ties in the logits; rows with different numbers of masks."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 2 * vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(2, 5, vocab_size, generator=generator) * 3).bfloat16()
    columns = torch.tensor([[6, 2, 3, 4, 5], [2, 3, 4, 5, 6]])
    state = state_with_masks([[1, 0, 1, 1, 1], [0, 1, 0, 1, 1]], step=3)
    sampler = Sampler(temperature=temperature, score_on=score_on, **filters)
    denoised = Denoised(logits=logits, columns=columns)
    found = sampler.propose(state, denoised, frozenset(ALL_SCORES))
    slow = _slow(sampler, state, denoised)
    assert torch.equal(sampler.perturbed(state, denoised).argmax(-1), slow.ids)
    assert torch.equal(found.ids.gather(1, columns), slow.ids)
    for name in ALL_SCORES:
        values = getattr(found, name).gather(1, columns)
        torch.testing.assert_close(values, getattr(slow, name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_p": 0.95, "score_on": "filtered"},
        {"temperature": 0.2, "top_p": 0.95},
        {"temperature": 1.0},
    ],
    ids=str,
)
def test_scoring_takes_at_most_four_times_the_memory_of_the_logits(settings):
    """64 cells of a vocabulary of 152,064 in bfloat16: 19 MB of logits."""
    logits = torch.randn(2, 32, 152_064, generator=torch.Generator().manual_seed(0)) * 6
    logits = logits.bfloat16()
    denoised = Denoised(logits=logits, columns=torch.arange(2, 34).expand(2, -1))
    state = state_with_masks([[1] * 32] * 2)
    with PeakMemory() as memory:
        Sampler(**settings).propose(state, denoised, frozenset({"entropy", "raw_entropy"}))
    assert memory.peak <= 4 * logits.nbytes
