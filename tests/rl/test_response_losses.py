"""Losses of whole responses: equal, with their gradients, to loops over forwards at every state."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_dlm.rl.advantages import RawReward
from lit_dlm.rl.espo import ESPO
from lit_dlm.rl.items import Items
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from lit_dlm.rl.spg import SPG
from lit_dlm.rl.wd1 import SoftmaxWeights, WeightedLikelihood
from lit_dlm.training.bounds import BoundViews
from tests.rollouts import MASK, answer_cells, decoded, every, module, policy, prepared

COUPLED, BLOCKWISE = BoundViews(num_states=2, coupled=True), BoundViews(num_states=3, block_size=3)


def scores(rl: TraceRLModule, items: Items, number: int) -> list[dict[int, Tensor]]:
    """Of every state of an item, the log-probabilities of the cells that are predicted in it."""
    record = items.records[int(items.item_record[number])]
    tokens = torch.from_numpy(record.tokens.astype(np.int64))
    found = []
    for state in (items.item == number).nonzero()[:, 0].tolist():
        ids = torch.tensor([*record.prompt_ids.tolist(), *record.tokens.tolist()])
        ids[record.num_prompt :][items.hidden[state]] = MASK
        logits = rl.backbone.denoise(ids[None], response_start=record.num_prompt).logits[0]
        log_probs = logits[record.num_prompt :].log_softmax(-1)
        cells = items.supervised[state].nonzero()[:, 0].tolist()
        found.append({cell: log_probs[cell, tokens[cell]] for cell in cells})
    return found


def pair_bound(states: list[dict[int, Tensor]], length: int, pairs: int) -> Tensor:
    """Nats a token of coupled states: ``(L + 1) / l`` times each score, over both halves."""
    parts = [sum(one.values()) * (length + 1) / len(one) for one in states]
    return sum(parts) / (2 * pairs * length)


def slow_espo(rl: TraceRLModule, items: Items, old: Tensor, reference: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for number in range(len(items)):
        length = len(answer_cells(items.records[int(items.item_record[number])]))
        bound = pair_bound(scores(rl, items, number), length, pairs=2)
        ratio, advantage = (bound - old[number]).exp(), float(items.advantage[number])
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        total = total - gain + 0.5 * length * (bound - reference[number]) ** 2 / 2
    return total


def slow_spg(rl: TraceRLModule, items: Items, beta: float, mix: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for number in range(len(items)):
        states, advantage = scores(rl, items, number), float(items.advantage[number])
        bound = lower = sum(sum(one.values()) / len(one) for one in states) / 3
        if advantage <= 0:
            seen = set().union(*states)
            uppers = []
            for cell in seen:
                powers = [
                    one[cell].exp() ** beta / (len(one) / len(seen))
                    for one in states
                    if cell in one
                ]
                uppers.append((sum(powers) / 3).log() / beta)
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
    items, _ = prepared(rl, decoded(rl.backbone, 6))
    assert len(items.cell) == len(items) == 6
    off = torch.tensor([0.3, -0.3, 0.05, -0.05, -0.2, 0.2], dtype=torch.float64)
    items.old_log_prob = items.old_log_prob + off
    total = rl.training_step(items.batch(every(items), num_slots=1))
    compared(rl, total, slow_espo(rl, items, items.old_log_prob, items.reference))


@pytest.mark.parametrize(("beta", "mix"), [(1.5, 0.5), (2.0, 1.0)])
def test_spg_takes_the_lower_bound_of_good_responses_and_the_upper_one_of_bad(
    beta: float, mix: float
) -> None:
    rl = module(policy(), masking=BLOCKWISE, policy_loss=SPG(beta=beta, mix=mix))
    items, _ = prepared(rl, decoded(rl.backbone, 6))
    assert (items.advantage > 0).sum() == 3
    total = rl.training_step(items.batch(every(items), num_slots=1))
    compared(rl, total, slow_spg(rl, items, beta, mix))


def test_packed_states_of_a_block_model_have_the_scores_of_its_bound() -> None:
    """Blocks before a state's own are shown; each block has a level of its own."""
    rl = module(policy(attention="block", block_size=4), masking=BoundViews(num_states=2))
    items, _ = prepared(rl, decoded(rl.backbone, 4), advantage=RawReward())
    torch.testing.assert_close(items.kl_weight, items.kl_weight.round())
    flipped = every(items).flip(0)
    batch = items.batch(flipped)
    one_by_one = [rl.score(items.batch(number[None])).log_prob for number in flipped]
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
    ("^masking: expected BoundViews with policy_loss ESPO", {"policy_loss": ESPO()}),
    ("^masking: expected BoundViews with policy_loss SPG", {"policy_loss": SPG()}),
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
