"""On-policy conversion of ``experiments/``: equality with a slow loop over prefixes."""

import pytest
import torch

from tests.e2e.runs import ROOT
from tests.finetuning.runs import small
from tests.training.supervised import LEARNING, assert_same_loss, batch_of, slow_log_probs


def test_loss_and_gradients_equal_a_slow_loop_over_prefixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    from on_policy import OnPolicyModule

    teacher = small(shift=1, attention="block", block_size=1, decoder="qwen3")
    model = OnPolicyModule(small(shift=1), teacher=teacher, **LEARNING)
    batch = batch_of(model, 6)
    states, log_probs = slow_log_probs(model, batch)
    # All that was written at the cut or later, whatever its step.
    assert states.cut is not None
    assert torch.equal(states.supervised, batch.steps >= states.cut[:, None])

    terms = []
    for row, cell in states.supervised.nonzero().tolist():
        prefix = batch.ids[row, : batch.start + cell]
        if batch.pad_mask is not None:
            prefix = prefix[batch.pad_mask[row, : batch.start + cell]]
        canvas = torch.cat([prefix, torch.tensor([teacher.spec.mask_id])])
        logits = teacher.denoise(canvas[None], response_start=len(prefix)).logits[0, -1]
        odds = logits.double().softmax(-1)
        possible = odds > 0
        terms.append(-(odds[possible] * log_probs[row, cell, possible].double()).sum())
    assert_same_loss(model, model.terms(batch).total, torch.stack(terms).mean())
    assert not any(value.requires_grad for value in teacher.parameters())
