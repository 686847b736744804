"""Editing: states with masks, wrong tokens and what the model wrote; a slow loop on full logits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dlm.finetuning.editing import EditModule
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.masking import RandomMasking
from lit_dlm.training.states import States
from tests.finetuning.runs import VOCAB, small
from tests.training.supervised import BLOCK, LEARNING, assert_same_loss, batch_of, slow_log_probs

PACKED = {**BLOCK, "masking": RandomMasking(copies=2, level="block")}
MODELS: dict[str, dict[str, Any]] = {"full": {}, "shift": {"shift": 1}, "block": PACKED}


def editing(masking: RandomMasking | None = None, **options: Any) -> EditModule:
    own = {name: options.pop(name) for name in ("most_wrong", "drafted") if name in options}
    given = {**LEARNING, "masking": masking, "num_padding": 0, **own}
    return EditModule(small(edits_tokens=True, **options), **given)


def slow_loss(model: EditModule, batch: SupervisedBatch) -> Tensor:
    """A mean over all targets of all states, each predicted from its own true canvas."""
    states, log_probs = slow_log_probs(model, batch)
    scores = [
        -log_probs[state, cell, batch.ids[states.response[state], batch.start + cell]].double()
        for state, cell in states.supervised.nonzero().tolist()
    ]
    return torch.stack(scores).mean()


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_equal_a_slow_loop_on_full_logits(kind: str) -> None:
    model = editing(**MODELS[kind], most_wrong=0.9)
    batch = batch_of(model, 12)
    states, terms = model.states(batch), model.terms(batch)
    assert states.hidden.any()
    assert (states.shown >= 0).any()
    assert_same_loss(model, terms.total, slow_loss(model, batch))
    # Each kind of target has a count of its own, and together they are all.
    counts = {name: int(terms.sums[name][1]) for name in ("filled", "corrected", "kept")}
    assert sum(counts.values()) == int(states.supervised.sum())
    assert counts["corrected"] == int((states.shown >= 0).sum())


def test_noise_is_what_a_model_may_produce_and_all_of_the_answer_is_predicted() -> None:
    model = editing(drafted=0.0, most_wrong=1.0)
    batch = batch_of(model, 64)
    plain, states = model.masking.states(batch), model.states(batch)
    assert torch.equal(states.hidden, plain.hidden)
    assert torch.equal(states.supervised, batch.maskable)
    wrong = states.shown >= 0
    assert not (wrong & states.hidden).any()
    clean = batch.ids[:, batch.start :]
    assert (states.shown[wrong] != clean[wrong]).all()
    found = set(states.shown[wrong].tolist())
    assert found == set(range(VOCAB)) - set(model.backbone.spec.forbidden_ids)
    # Half of what is shown on average: the share is uniform from 0 to 1.
    assert 0.35 < float(wrong.sum() / (batch.maskable & ~plain.hidden).sum()) < 0.6


def test_a_part_of_some_states_holds_what_the_model_makes_of_them() -> None:
    before, after = (editing(drafted=share, most_wrong=0.5) for share in (0.0, 0.5))
    batch = batch_of(before, 64)
    noisy, log_probs = slow_log_probs(before, batch)
    log_probs[..., list(before.backbone.spec.forbidden_ids)] = -torch.inf
    own, states = log_probs.argmax(-1), after.states(batch)
    clean = batch.ids[:, batch.start :]
    seen, was = (torch.where(one.shown >= 0, one.shown, clean) for one in (states, noisy))
    changed = (noisy.hidden != states.hidden) | (seen != was)
    assert torch.equal(seen[changed], own[changed])
    assert not (states.hidden & ~noisy.hidden).any()
    assert 0.3 < float(changed.any(1).float().mean()) < 0.6  # of one half, all but small shares
    assert torch.equal(states.supervised, noisy.supervised)


def test_states_do_not_depend_on_the_batch() -> None:
    model = editing(masking=RandomMasking(copies=2))
    batch = batch_of(model, 6)
    whole, alone = model.states(batch), model.states(batch.take(torch.tensor([4])))
    for name in ("hidden", "shown", "supervised"):
        assert torch.equal(getattr(whole, name)[8:10], getattr(alone, name))
    assert not torch.equal(whole.shown[8], whole.shown[9])
    later = model.states(replace(batch, seeds=batch.seeds + 1))
    assert not torch.equal(whole.shown, later.shown)


def test_wrong_tokens_that_a_state_shows_already_stay() -> None:
    class Decoded(RandomMasking):
        def states(self, batch: SupervisedBatch) -> States:
            states = super().states(batch)
            return replace(states, shown=torch.where(states.hidden, -1, 5))

    model = editing(masking=Decoded(), most_wrong=0.0, drafted=0.0)
    states = model.states(batch_of(model, 6))
    assert torch.equal(states.shown, torch.where(states.hidden, -1, 5))


def test_weights_that_depend_on_what_is_hidden_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^masking\.weight: expected 'none'"):
        editing(masking=RandomMasking(weight="1/t"))
