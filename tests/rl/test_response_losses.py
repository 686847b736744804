"""Losses of whole responses: equal, with their gradients, to loops over forwards at every state."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_dlm.rl.advantages import RawReward
from lit_dlm.rl.batch import RolloutBatch
from lit_dlm.rl.ebpo import EBPO
from lit_dlm.rl.espo import ESPO
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from lit_dlm.rl.spg import SPG
from lit_dlm.rl.wd1 import SoftmaxWeights, WeightedLikelihood
from lit_dlm.training.bounds import BoundViews, DecodedViews
from lit_dlm.trajectories.record import Trajectory
from tests.rollouts import MASK, VOCAB, decoded, every, module, policy, prepared

COUPLED, BLOCKWISE = BoundViews(num_states=2, coupled=True), BoundViews(num_states=3, block_size=3)


def scores(rl: TraceRLModule, samples: RolloutBatch, number: int) -> list[dict[int, Tensor]]:
    """Of every state of an item, the log-probabilities of the cells that are predicted in it."""
    row = int(samples.sample_response[number])
    clean, start = samples.responses.ids[row], samples.responses.start
    prompt = clean[start - int(samples.responses.num_prompt[row]) : start]
    found = []
    for state in (samples.states.sample == number).nonzero()[:, 0].tolist():
        ids = torch.cat([prompt, clean[start:].masked_fill(samples.states.hidden[state], MASK)])
        logits = rl.backbone.denoise(ids[None], response_start=len(prompt)).logits[0]
        log_probs = logits[len(prompt) :].log_softmax(-1)
        cells = samples.states.supervised[state].nonzero()[:, 0].tolist()
        found.append({cell: log_probs[cell, clean[start + cell]] for cell in cells})
    return found


def pair_bound(states: list[dict[int, Tensor]], length: int, pairs: int) -> Tensor:
    """Nats a token of coupled states: ``(L + 1) / l`` times each score, over both halves."""
    parts = [sum(one.values()) * (length + 1) / len(one) for one in states]
    return sum(parts) / (2 * pairs * length)


def slow_espo(rl: TraceRLModule, samples: RolloutBatch) -> Tensor:
    old, reference = samples.tokens.old_log_prob, samples.tokens.reference
    total = torch.zeros((), dtype=torch.float64)
    for number in range(len(samples)):
        length = int(samples.responses.maskable[int(samples.sample_response[number])].sum())
        bound = pair_bound(scores(rl, samples, number), length, pairs=2)
        ratio, advantage = (bound - old[number]).exp(), float(samples.tokens.advantage[number])
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        total = total - gain + 0.5 * length * (bound - reference[number]) ** 2 / 2
    return total


def slow_spg(rl: TraceRLModule, samples: RolloutBatch, beta: float, mix: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for number in range(len(samples)):
        states, advantage = scores(rl, samples, number), float(samples.tokens.advantage[number])
        bound = lower = sum(sum(one.values()) / len(one) for one in states) / len(states)
        if advantage <= 0:
            seen = set().union(*states)
            length = int(samples.responses.maskable[samples.tokens.response[number]].sum())
            uppers = []
            for cell in seen:
                powers = [
                    one[cell].exp() ** beta / (len(one) / length) for one in states if cell in one
                ]
                uppers.append((sum(powers) / len(states)).log() / beta)
            bound = mix * sum(uppers) / len(seen) + (1 - mix) * lower
        total = total - advantage * bound
    return total


def compared(rl: TraceRLModule, total: Tensor, slow: Tensor) -> None:
    values = [value for value in rl.parameters() if value.requires_grad]
    torch.testing.assert_close(total, slow, rtol=1e-6, atol=1e-8)
    found = torch.autograd.grad(total, values, retain_graph=True)
    for one, two in zip(found, torch.autograd.grad(slow, values), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)


def test_espo_clips_ratios_of_responses_and_squares_their_divergence() -> None:
    """Old bounds a little off, so that half of the ratios are outside of 0.9 to 1.1."""
    loss, objective = ESPO(clip=0.1, beta=0.5), PolicyObjective(kl_to="initial")
    rl = module(policy(), masking=COUPLED, policy_loss=loss, objective=objective)
    samples, _ = prepared(rl, decoded(rl.backbone, 6))
    assert len(samples.tokens.position) == len(samples) == 6
    off = torch.tensor([0.3, -0.3, 0.05, -0.05, -0.2, 0.2], dtype=torch.float64)
    samples = samples.with_tokens(old_log_prob=samples.tokens.old_log_prob + off)
    total = rl.training_step(samples.select(every(samples), num_slots=1))
    compared(rl, total, slow_espo(rl, samples))


def rewritten(records: list[Trajectory]) -> list[Trajectory]:
    """The records, with another token in every second position one step before the last write."""
    found = []
    for record in records:
        cells = [cell for cell in range(0, 8, 2) if record.commit_step[cell] > 0]
        early = [
            [record.commit_step[c] - 1, c, 3 + (record.tokens[c] - 2) % (VOCAB - 3)] for c in cells
        ]
        found.append(replace(record, superseded=np.array(sorted(early), np.int32)))
        found[-1].validate()
    return found


def slow_ebpo(rl: TraceRLModule, records: list[Trajectory], samples: RolloutBatch) -> Tensor:
    """Equations 4 and 5: a forward for every state and block, whose earlier blocks are final."""
    size = rl.backbone.spec.block_size or 8
    total = torch.zeros((), dtype=torch.float64)
    for number in range(len(samples)):
        record = records[int(samples.sample_response[number])]
        prompt, final = (torch.tensor(part) for part in (record.prompt_ids, record.tokens))
        offset = len(prompt) % size if rl.backbone.spec.block_size else 0
        length = int(samples.responses.maskable[int(samples.sample_response[number])].sum())
        gains: list[list[Tensor]] = [[], []]  # of the two states
        for n, first in itertools.product(range(2), range(-offset, 8, size)):
            cells = [cell for cell in range(first, first + size) if 0 <= cell < 8]
            events = record.events()
            steps = np.unique(events[np.isin(events[:, 1], cells), 0])
            seen = torch.tensor(record.state_at(int(steps[n * len(steps) // 2])))
            canvas = torch.cat([prompt, final[: cells[0]], seen[cells[0] : cells[-1] + 1]]).long()
            logits = rl.backbone.denoise(canvas[None], response_start=len(prompt)).logits[0]
            log_probs = logits[len(prompt) :].log_softmax(-1)
            left = [cell for cell in cells if cell < length and seen[cell] != final[cell]]
            gains[n] += [log_probs[cell, final[cell]] for cell in left]
        log_rho = sum(sum(one) / (2 * len(one)) for one in gains)
        rho, advantage = (
            (log_rho - samples.tokens.old_log_prob[number]).exp(),
            float(samples.tokens.advantage[number]),
        )
        total = total - torch.minimum(rho * advantage, rho.clamp(0.9, 1.3) * advantage)
    return total


@pytest.mark.parametrize("kind", [{}, {"attention": "block", "block_size": 3}])
def test_ebpo_clips_ratios_of_block_probabilities_in_states_that_show_wrong_tokens(
    kind: dict[str, Any],
) -> None:
    """Old scores a little off, so that half of the ratios are outside of 0.9 to 1.3."""
    loss = EBPO(clip=0.1, clip_high=0.3)
    rl = module(policy(**kind), masking=DecodedViews(num_states=2), policy_loss=loss)
    records = rewritten(decoded(rl.backbone, 6))
    samples, _ = prepared(rl, records)
    assert len(samples) == 6
    assert (samples.states.shown >= 0).any()
    off = torch.tensor([0.4, -0.4, 0.05, -0.05, -0.2, 0.2], dtype=torch.float64)
    old, advantage = samples.tokens.old_log_prob + off, [2.0, -0.5, 1.0, -1.0, 1.5, -0.5]
    samples = samples.with_tokens(old_log_prob=old, advantage=torch.tensor(advantage))
    total = rl.training_step(samples.select(every(samples), num_slots=1))
    compared(rl, total, slow_ebpo(rl, records, samples))


@pytest.mark.parametrize(
    ("masking", "beta", "mix"),
    [(BLOCKWISE, 1.5, 0.5), (BoundViews(num_states=1), 2.0, 1.0)],  # one state leaves cells out
)
def test_spg_takes_the_lower_bound_of_good_responses_and_the_upper_one_of_bad(
    masking: BoundViews, beta: float, mix: float
) -> None:
    rl = module(policy(), masking=masking, policy_loss=SPG(beta=beta, mix=mix))
    samples, _ = prepared(rl, decoded(rl.backbone, 6))
    assert (samples.tokens.advantage > 0).sum() == 3
    total = rl.training_step(samples.select(every(samples), num_slots=1))
    compared(rl, total, slow_spg(rl, samples, beta, mix))


def test_packed_states_of_a_block_model_have_the_scores_of_its_bound() -> None:
    """Blocks before a state's own are shown; each block has a level of its own."""
    rl = module(policy(attention="block", block_size=4), masking=BoundViews(num_states=2))
    samples, _ = prepared(rl, decoded(rl.backbone, 4), advantage=RawReward())
    torch.testing.assert_close(samples.tokens.kl_weight, samples.tokens.kl_weight.round())
    flipped = every(samples).flip(0)
    batch = samples.select(flipped)
    one_by_one = [rl.score(samples.select(number[None])).log_prob for number in flipped]
    found = rl.score(batch).log_prob
    torch.testing.assert_close(found, torch.cat(one_by_one), rtol=1e-4, atol=1e-6)


def test_wd1_weighs_responses_by_two_softmaxes_of_their_group() -> None:
    """Rewards 1 and 0, 0, 0 less their mean: 3/4 and -1/4. ``w+`` has e^(3/4), ``w-`` e^(-3/4).

    All alike weigh nothing, and the loss is minus the weighted sum of log-probabilities.
    """
    high, low = (math.exp(sign * 0.75) for sign in (1, -1))
    first, rest = (math.exp(sign * 0.25) for sign in (-1, 1))
    plus = [high / (high + 3 * first), first / (high + 3 * first)]
    minus = [low / (low + 3 * rest), rest / (low + 3 * rest)]
    expected = torch.tensor([plus[0] - minus[0], *[plus[1] - minus[1]] * 3]) * 4
    weights = SoftmaxWeights().compute(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(weights, expected)
    assert not SoftmaxWeights().compute(torch.ones(4)).any()
    log_prob = torch.tensor([-1.0, -2.0, -math.inf], requires_grad=True)
    weight = torch.tensor([0.5, 1.0, 0.0])
    loss = WeightedLikelihood()
    total = loss.compute(log_prob, log_prob, torch.tensor([2.0, -3.0, 9.0]), weight).total
    total.backward()
    torch.testing.assert_close(total, torch.tensor(0.5 * 2.0 - 3.0 * 2.0))
    torch.testing.assert_close(log_prob.grad, torch.tensor([-1.0, 3.0, 0.0]))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (
        "^masking: expected BoundViews or DecodedViews with ESPO",
        {"policy_loss": ESPO()},
    ),
    ("^masking: expected BoundViews or DecodedViews with SPG", {"policy_loss": SPG()}),
    (r"^objective\.kl_to: .*WeightedLikelihood", {"policy_loss": WeightedLikelihood()}),
    (r"^objective\.kl_to: .*SPG", {"policy_loss": SPG(), "masking": BLOCKWISE}),
]


def test_options_that_a_method_cannot_have_are_refused_by_name() -> None:
    initial = PolicyObjective(kl_to="initial")
    for message, options in REFUSED:
        with pytest.raises(ValueError, match=message):
            module(policy(), objective=initial, **options)
    for message, options in (
        ("^value: BoundViews", {"value": ValueObjective()}),
        (r"^objective\.normalise", {"objective": PolicyObjective(normalise="group_mean")}),
    ):
        with pytest.raises(ValueError, match=message):
            module(policy(), masking=COUPLED, **options)
    for wrong, name in ((lambda: SPG(beta=0.5), "beta"), (lambda: SPG(mix=2.0), "mix")):
        with pytest.raises(ValueError, match=f"^{name}"):
            wrong()
    rl = module(policy(), masking=COUPLED)
    records = decoded(rl.backbone, 2)
    records = [replace(one, meta={**one.meta, "token_rewards": [1.0]}) for one in records]
    with pytest.raises(ValueError, match=r"^r0\.0: .* rewards per token, .*BoundViews"):
        prepared(rl, records)
