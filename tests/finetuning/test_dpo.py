"""Preferences: equality with a slow loop over pairs, the reference, copies, refusals."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dlm.datamodules.supervised import check_pairs
from lit_dlm.finetuning.dpo import DPOModule
from lit_dlm.training.batch import SupervisedBatch, SupervisedExample
from lit_dlm.training.masking import RandomMasking
from tests.finetuning.runs import G, examples, small
from tests.training.supervised import LEARNING, batch_of, sft, slow_log_probs


def dpo(**options: Any) -> DPOModule:
    return DPOModule(small(), **{**LEARNING, "num_states": 3, **options})


def pairs(count: int) -> list[SupervisedExample]:
    """Each response against the next example's, both to the prompt of the first."""
    given = examples(count + 1)
    return [
        replace(one, rejected=replace(two, uid=f"{one.uid}/rejected", prompt_ids=one.prompt_ids))
        for one, two in itertools.pairwise(given)
    ]


def slow_bounds(model: DPOModule, batch: SupervisedBatch) -> list[Tensor]:
    """Nats of each row: every state's score times ``G`` over its hidden cells, a mean of three."""
    states, log_probs = slow_log_probs(model, batch)
    found = [log_probs.new_zeros(()) for _ in batch.uids]
    for state, row in enumerate(states.response.tolist()):
        cells = states.supervised[state].nonzero()[:, 0].tolist()
        for cell in cells:
            token = batch.ids[row, batch.start + cell]
            found[row] = found[row] + log_probs[state, cell, token] * G / len(cells) / 3
    return found


def slow_loss(model: DPOModule, batch: SupervisedBatch, beta: float) -> Tensor:
    policy = slow_bounds(model, batch)
    with torch.no_grad(), model.backbone.using_adapter(None):
        reference = slow_bounds(model, batch)
    gains = [one - two for one, two in zip(policy, reference, strict=True)]
    margins = [
        beta * (chosen - rejected) for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)
    ]
    return torch.stack([(1 + (-margin).exp()).log() for margin in margins]).mean()


def test_loss_and_gradients_equal_a_slow_loop_over_pairs() -> None:
    model = dpo(beta=0.3)
    batch = batch_of(model, pairs(4))
    assert len(batch.uids) == 8
    total, wanted = model.terms(batch).total, slow_loss(model, batch, 0.3)
    torch.testing.assert_close(total.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    values = [value for value in model.parameters() if value.requires_grad]
    found = torch.autograd.grad(total, values)
    for one, two in zip(found, torch.autograd.grad(wanted, values), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_the_reference_is_where_training_starts_and_copies_count_for_nothing() -> None:
    """Without a step of the adapter all margins are 0, whatever the masks: the same for both."""
    model = dpo()
    copy = replace(pairs(2)[1], is_real=False)
    alone, filled = (
        model.terms(batch_of(model, given)).total for given in (pairs(1), [*pairs(1), copy])
    )
    torch.testing.assert_close(alone, filled)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            value.data.zero_()
    terms = model.terms(batch_of(model, pairs(3)))
    torch.testing.assert_close(terms.total, torch.tensor(math.log(2.0)))
    assert terms.means()["margin"] == 0.0


def refusal(given: Sequence[SupervisedExample], model: Any) -> Any:
    return lambda: check_pairs(given, model)


def test_what_preferences_cannot_have_is_refused_by_name() -> None:
    mixed = [*pairs(2), replace(examples(4)[3])]
    for message, call in (
        ("DPOModule.backbone: .* lora", lambda: DPOModule(small(lora=False), **LEARNING)),
        (r"^backbone\.lora\.dropout", lambda: DPOModule(small(dropout=0.1), **LEARNING)),
        ("^beta", lambda: dpo(beta=0.0)),
        ("^num_states", lambda: dpo(num_states=0)),
        ("^fake/train/00003: expected a chosen and .* DPOModule", refusal(mixed, dpo())),
        (
            "^fake/train/00000: expected one response for SFTModule",
            refusal(mixed, sft(RandomMasking())),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
