"""dParallel: states of both halves of a block, and equality with a slow loop on full logits."""

import pytest
import torch
from torch import Tensor

from lit_dlm.finetuning.dparallel import TEMPERATURE, BlockComplements, DParallelModule
from lit_dlm.training.batch import SupervisedBatch
from tests.finetuning.runs import VOCAB, small
from tests.training.reference import responses
from tests.training.supervised import BLOCK, LEARNING, assert_same_loss, batch_of, slow_log_probs


def dparallel(**options: object) -> DParallelModule:
    backbone = options.pop("backbone", None) or small(shift=options.pop("shift", 0))
    return DParallelModule(backbone, **{**LEARNING, "block_size": 3, **options})  # type: ignore[arg-type]


def slow_loss(model: DParallelModule, batch: SupervisedBatch) -> Tensor:
    """Full logits, one cell at a time; the release takes each term as a mean of its own."""
    states, log_probs = slow_log_probs(model, batch)
    kept = torch.tensor([v for v in range(VOCAB) if v not in model.backbone.spec.forbidden_ids])
    total = torch.zeros((), dtype=torch.float64)
    for view in (0, 1):
        ce, entropies = [], []
        for row, cell in states.supervised[view::2].nonzero().tolist():
            row = 2 * row + view
            target = batch.ids[states.response[row], batch.start + cell]
            values = log_probs[row, cell, kept].double()
            ce.append(-log_probs[row, cell, target].double())
            if kept[values.argmax()] == target:
                sharp = (values / TEMPERATURE).log_softmax(-1)
                entropies.append(-(sharp.exp() * sharp).sum())
        assert 2 <= len(entropies) < len(ce)
        total = total + torch.stack(ce).mean()
        total = total + model.entropy_weight * torch.stack(entropies).mean()
    return total


@pytest.mark.parametrize(("shift", "block_size"), [(0, 3), (1, None)])
def test_loss_and_gradients_equal_a_slow_loop_on_full_logits(
    shift: int, block_size: int | None
) -> None:
    model = dparallel(shift=shift, block_size=block_size, entropy_weight=1.5)
    batch = batch_of(model, 24)
    # Every second cell holds what the model predicts most, so that some predictions are right.
    batch.ids[:, batch.start :: 2] = slow_log_probs(model, batch)[1].argmax(-1).flatten().mode()[0]
    terms = model.terms(batch)
    assert_same_loss(model, terms.total, slow_loss(model, batch))
    torch.testing.assert_close(model.combined(terms.means()), terms.total.detach())


def test_two_states_of_a_sample_hide_a_block_by_halves() -> None:
    """Answers of 7 cells have blocks 0 to 2, 3 to 5 and 6; cell 7 is padding."""
    states = BlockComplements(block_size=3).states(responses(B=64, answer=7))
    assert states.response.tolist() == [number for number in range(64) for _ in range(2)]
    half, complement = states.supervised[::2], states.supervised[1::2]
    assert not (half & complement).any()
    block = half | complement
    assert {tuple(row.nonzero().flatten().tolist()) for row in block} == {
        (0, 1, 2),
        (3, 4, 5),
        (6,),
    }
    assert 0.35 < float(half.sum() / block.sum()) < 0.65
    first = block.long().argmax(1, keepdim=True)
    behind = (torch.arange(8) > first) & ~block
    for hidden, targets in ((states.hidden[::2], half), (states.hidden[1::2], complement)):
        assert torch.equal(hidden, targets | behind)


def test_it_needs_full_attention() -> None:
    with pytest.raises(ValueError, match="full attention"):
        dparallel(backbone=small(**BLOCK))
