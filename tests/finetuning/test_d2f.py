"""D2F: rates that rise, and equality with a slow loop on full logits of student and teacher."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dlm.finetuning.d2f import D2FModule, RisingMasking
from lit_dlm.training.batch import SupervisedBatch
from tests.decoding.slow_cache import slow_visibility
from tests.finetuning.runs import G, small
from tests.training.reference import responses
from tests.training.supervised import BLOCK, LEARNING, assert_same_loss, batch_of

STUDENT: dict[str, Any] = {**BLOCK, "block_origin": "response", "whole_prompt": True}


def d2f(**changes: Any) -> D2FModule:
    return D2FModule(small(**{**STUDENT, **changes}), **LEARNING)


def slow_loss(model: D2FModule, batch: SupervisedBatch) -> Tensor:
    """One sample at a time, without padding; logits of all cells under masks made by loops."""
    backbone, start = model.backbone, batch.start
    spec, states = backbone.spec, model.masking.states(batch)
    size = spec.block_size
    assert size is not None
    losses = []
    for row, hidden in enumerate(states.hidden):
        prompt, answer = batch.ids[row, :start], batch.ids[row, start:]
        if batch.pad_mask is not None:
            prompt = prompt[batch.pad_mask[row, :start]]
        ids = torch.cat([prompt, answer.masked_fill(hidden, spec.mask_id)])[None]
        student = backbone(ids, slow_visibility(len(prompt), ids.shape[1], size))[0]
        with torch.no_grad(), backbone.using_adapter(None):
            teacher = backbone(ids)[0]
        kept = [v for v in range(backbone.vocab_size) if v not in spec.forbidden_ids]
        for cell in states.supervised[row].nonzero()[:, 0].tolist():
            place = len(prompt) + cell
            target = teacher[place, kept].double().softmax(-1)
            ce = -(target * student[place, kept].double().log_softmax(-1)).sum()
            losses.append(ce * states.weight[row, cell].double())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("shift", [0, 1])
def test_loss_and_gradients_equal_a_slow_loop_on_full_logits(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1 to 4 tokens, and chunks of 5 rows."""
    model = d2f(shift=shift)
    monkeypatch.setitem(
        D2FModule.score.__globals__["CHUNK_ELEMENTS"], "cpu", 5 * model.backbone.vocab_size
    )
    batch = batch_of(model, 8)
    terms = model.terms(batch)
    assert_same_loss(model, terms.total, slow_loss(model, batch))


def test_rates_rise_from_block_to_block_and_cells_are_hidden_at_them() -> None:
    """20,000 answers of 9 cells in blocks of 3; the tenth cell is padding.

    The first rate has the mean 0.45, the last one ``0.45 + 2 (0.25 / 2) / 2``.
    """
    blocks = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2, 3]]).expand(20_000, -1)
    batch = responses(B=20_000, G=10, answer=9, blocks=blocks)
    states = RisingMasking().states(batch)
    assert states.hidden[:, 9].all()
    assert not states.supervised[:, 9].any()
    assert torch.equal(states.hidden[:, :9], states.supervised[:, :9])
    assert states.weight is not None
    rates = torch.where(states.supervised, 1 / states.weight, torch.nan)[:, :9]
    rates = rates.unflatten(1, (3, 3)).nanmean(-1)  # (B, 3), of blocks with a target
    first, last = rates[:, 0].nan_to_num(0.5), rates[:, 2].nan_to_num(0.5)
    assert 0.2 <= float(first.min()) < 0.21
    assert 0.69 < float(last.max()) <= 0.7 + 1e-6
    every = rates[~rates.isnan().any(1)]
    assert (every.diff(dim=1) >= -1e-6).all()
    share = states.hidden[:, :9].float().unflatten(1, (3, 3)).mean((0, 2))
    torch.testing.assert_close(share, torch.tensor([0.45, 0.5125, 0.575]), atol=0.01, rtol=0)


def test_states_are_those_of_the_sample_in_any_batch() -> None:
    model = d2f()
    model.num_padding = 0
    few, many = (batch_of(model, count) for count in (1, 8))
    one, all_of_them = (model.masking.states(batch) for batch in (few, many))
    assert batch_of(model, 1, cut=True).maskable.shape[1] == G  # the teacher sees all of it
    cells = few.maskable.shape[1]
    assert torch.equal(one.supervised[0], all_of_them.supervised[0, :cells])
    assert torch.equal(one.weight[0], all_of_them.weight[0, :cells])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": False}, "expected lora settings or an adapter"),
        ({"whole_prompt": False}, "spec_overrides: expected whole_prompt: true"),
    ],
)
def test_what_has_no_teacher_or_no_blocks_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        d2f(**changes)
    with pytest.raises(ValueError, match="RisingMasking: expected a model with block attention"):
        RisingMasking().states(responses())
